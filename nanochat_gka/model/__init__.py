"""The GPT: shape, blocks, attention, cache, and its files."""
