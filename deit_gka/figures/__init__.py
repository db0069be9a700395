"""The paper's figures of vision models."""
