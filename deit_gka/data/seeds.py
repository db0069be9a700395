"""Seeds derived from their purpose, so that no draw depends on earlier draws."""

import hashlib
import random

import numpy as np
import torch


def seed_of(*purpose) -> int:
    """A 63-bit seed that depends on everything given."""
    return int.from_bytes(hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch's CPU.

    torch.manual_seed would queue a call, stack trace included, for a CUDA that a worker never starts.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
