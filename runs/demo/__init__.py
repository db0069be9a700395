"""The paper's experiments in miniature."""
