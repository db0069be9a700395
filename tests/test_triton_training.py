"""Models train with the Triton kernels as with the literal reference: the same weights and batches give the same losses.

Ten steps in `make test`; 200 where there is a GPU (`make test-gpu`) or with `-m slow`.
"""

import functools

import pytest
import timm
import torch

import deit_gka.models  # noqa: F401 (registers the GKA models in timm)
from gka import gaussian_attention
from nanochat_gka import attention
from nanochat_gka.config import GPTConfig
from nanochat_gka.gpt import build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow
STEPS = [10, pytest.param(200, marks=LONG)]

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")


def train(model, batches) -> torch.Tensor:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for inputs, targets in batches:
        losses.append(model(inputs, targets))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach().cpu()


def assert_same(fused: torch.Tensor, reference: torch.Tensor):
    """Float32 rounding is all that differs; training magnifies it, so the long run is held to its level, not to its digits."""
    assert reference[-4:].mean() < 0.95 * reference[:4].mean(), "it did not learn"
    torch.testing.assert_close(fused[:10], reference[:10], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused, reference, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("offsets", ["", "PS"])
def test_gpt(monkeypatch, steps, offsets):
    config = GPTConfig(sequence_len=24, vocab_size=32, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, window_pattern="SL", attention="gka",
                       head_offsets=offsets)  # fmt: skip
    text = torch.randint(32, (2, 25), device=DEVICE)  # two rows again and again: there is something to learn
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in (text[i % 2 : i % 2 + 1] for i in range(steps))]
    curves = []
    for impl in ("triton", "reference"):
        monkeypatch.setattr(attention, "gaussian_attention", functools.partial(gaussian_attention, impl=impl))
        torch.manual_seed(1)
        curves.append(train(build(config, DEVICE), batches))
    assert_same(*curves)


@pytest.mark.parametrize("steps", STEPS)
def test_vit(steps):
    images, labels = torch.randn(2, 2, 3, 16, 16, device=DEVICE), torch.randint(5, (2, 2), device=DEVICE)
    curves = []
    for impl in ("triton", "reference"):
        torch.manual_seed(1)
        model = timm.create_model(
            "deit_tiny_gka_patch16_224", impl=impl, img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5
        )
        model = model.to(DEVICE).train()

        def loss(inputs, targets, model=model):
            return torch.nn.functional.cross_entropy(model(inputs), targets)

        loss.parameters = model.parameters
        curves.append(train(loss, [(images[i % 2], labels[i % 2]) for i in range(steps)]))
    assert_same(*curves)
