"""DCLM's CORE as nanochat runs it: bundle (data), questions (prompts and spans), scoring, published figures, table."""
