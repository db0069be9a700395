"""The Gaussian kernel attention operator."""
