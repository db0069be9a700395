"""Numbers that upstream nanochat printed, and the deterministic weights and batch they were made with."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch

from nanochat_gka.model.config import GPTConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "nanochat_b07604e.json").read_text())
CONFIG = GPTConfig(sequence_len=32, vocab_size=100, n_layer=4, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SSL")


def fill(model, how):
    """The deterministic weights the golden numbers were made with."""
    state = model.state_dict()
    for name, tensor in state.items():
        seed = zlib.crc32(name.encode())
        if how == "sine":
            values = np.sin(0.37 * (np.arange(tensor.numel()) % 100003) + seed % 1000)
        else:
            values = np.random.RandomState(seed % 2**31).standard_normal(tensor.numel())
        scale, offset = (0.5 if name.endswith("wte.weight") else 0.1), (1.0 if name == "resid_lambdas" else 0.0)
        state[name] = torch.from_numpy((offset + scale * values).astype(np.float32)).reshape(tensor.shape)
    model.load_state_dict(state)
    return model


def batch():
    b, t = torch.arange(2)[:, None], torch.arange(32)[None, :]
    ids = (7 * b + 3 * t + t * t) % 100
    return ids, torch.cat([ids[:, 1:], torch.full((2, 1), -1)], dim=1)
