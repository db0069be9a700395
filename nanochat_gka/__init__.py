"""A GPT trainer in nanochat's shape with softmax, VLT and Gaussian kernel attention in one code."""
