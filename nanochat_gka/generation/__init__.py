"""Drawing text from a model."""
