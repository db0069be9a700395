"""The softmax model, its optimiser, schedules, packing and bits per byte against numbers that upstream nanochat printed.

golden/nanochat_b07604e.json: upstream at commit b07604ebaa6dffa9e21e0d2d7d0a5980301c6364 run on CPU in float32, eager, one thread.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from nanochat_gka.config import GPTConfig
from nanochat_gka.gpt import build

GOLDEN = json.loads((Path(__file__).parent / "golden" / "nanochat_b07604e.json").read_text())
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


def test_state_dict_names_and_shapes():
    names = [[name, list(tensor.shape)] for name, tensor in build(CONFIG, "cpu").state_dict().items()]
    assert names == GOLDEN["model"]["state_dict"]


@pytest.mark.parametrize("section,how", [("model", "sine"), ("model_randn", "randn")])
def test_logits_and_losses(section, how):
    want, model = GOLDEN[section], fill(build(CONFIG, "cpu"), how)
    ids, targets = batch()
    logits = model(ids)
    for key, (b, t) in {"logits_0_0_8": (0, 0), "logits_0_31_8": (0, 31), "logits_1_17_8": (1, 17)}.items():
        torch.testing.assert_close(logits[b, t, :8], torch.tensor(want[key]), rtol=1e-5, atol=1e-5)
    assert model(ids, targets).item() == pytest.approx(want["loss_mean"], rel=1e-6)
    losses = model(ids, targets, reduction="none").view(2, 32)[0]
    torch.testing.assert_close(losses, torch.tensor(want["loss_row0"]), rtol=1e-5, atol=1e-5)


def test_initialisation_draws_the_same_numbers():
    torch.manual_seed(42)
    parameters = dict(build(CONFIG, "cpu").named_parameters())
    assert parameters.keys() == GOLDEN["init"]["params"].keys()
    for name, (total, absolute, *first) in GOLDEN["init"]["params"].items():
        values = parameters[name].detach().flatten()
        assert values[:3].tolist() == pytest.approx(first, rel=1e-7), name
        assert values.double().abs().sum().item() == pytest.approx(absolute, rel=1e-6), name
        assert values.double().sum().item() == pytest.approx(total, rel=1e-4, abs=1e-4), name
