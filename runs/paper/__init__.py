"""The paper's experiments, one file each, and the numbers it prints."""
