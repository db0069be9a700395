"""A GPT trainer in nanochat's shape with softmax, VLT and Gaussian kernel attention in one code."""

from trainkit_gka import importing
from trainkit_gka.extras import require

importing(__name__)
require(__name__, "lm", "numpy", "safetensors", "rich", "tyro", "pyarrow", "rustbpe", "tiktoken")
