"""The methods of the paper's Table 1, built literally and measured side by side."""
