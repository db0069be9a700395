"""A GPT trainer in nanochat's shape with softmax, VLT and Gaussian kernel attention in one code."""

from trainkit_gka.extras import require

require(__name__, "lm", "numpy", "safetensors", "filelock", "rich", "tyro", "pyarrow", "rustbpe", "tiktoken")
