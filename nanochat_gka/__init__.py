"""A GPT trainer in nanochat's shape with softmax, VLT and Gaussian kernel attention in one code."""

from trainkit.extras import require

require(__name__, "lm", "numpy", "safetensors", "filelock", "rich", "tyro", "pyarrow", "rustbpe", "tiktoken")
