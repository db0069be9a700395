"""Speed and memory, measured in turns behind a correctness gate."""
