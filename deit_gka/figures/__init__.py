"""The paper's figures of vision models: a file for every family, which takes models and images and writes one
picture."""
