"""Models train with Triton as with the reference: six steps, or 200 on a GPU and with `-m slow`."""

import functools

import pytest
import timm
import torch

import deit_gka.model.registry  # noqa: F401 (registers the GKA models in timm)
from gka import gaussian_attention
from nanochat_gka.model import attention
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow
STEPS = [6, pytest.param(200, marks=LONG)]

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")


def check(model_of, batches, lr: float) -> None:
    """Losses are equal but for float32's rounding. Every batch is new: repeating few would magnify rounding."""
    curves = []
    for impl in ("triton", "reference"):
        torch.manual_seed(1)
        parameters, loss_of = model_of(impl)
        optimizer, losses = torch.optim.AdamW(parameters, lr), []
        for batch in batches:
            losses.append(loss_of(*batch))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        curves.append(torch.stack(losses).detach().cpu())
    fused, reference = curves
    assert len(reference) < 100 or reference[-20:].mean() < 0.9 * reference[:20].mean(), "it did not learn"
    torch.testing.assert_close(fused, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("offsets", ["", "PS"])
def test_gpt(monkeypatch, steps, offsets):
    config = GPTConfig(sequence_len=24, vocab_size=32, n_layer=2, n_head=2, n_kv_head=2, n_embd=32,
                       window_pattern="SL", attention="gka", head_offsets=offsets)  # fmt: skip
    following = torch.full((32, 32), 0.3).exponential_().pow(3)  # how likely each token is after each other
    rows = [torch.randint(32, (2,))]
    while len(rows) < 25 * steps:
        rows.append(torch.multinomial(following[rows[-1]], 1)[:, 0])
    rows = torch.stack(rows).view(steps, 25, 2).mT.to(DEVICE)

    def model_of(impl):
        monkeypatch.setattr(attention, "gaussian_attention", functools.partial(gaussian_attention, impl=impl))
        model = build(config, DEVICE)
        model.compute_in(torch.float32)
        return model.parameters(), model

    check(model_of, [(row[:, :-1], row[:, 1:]) for row in rows], lr=1e-2)


@pytest.mark.parametrize("steps", STEPS)
def test_vit(steps):
    labels = torch.randint(5, (steps, 2), device=DEVICE)
    images = torch.randn(5, 3, 16, 16, device=DEVICE)[labels] + 0.3 * torch.randn(steps, 2, 3, 16, 16, device=DEVICE)
    sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5)

    def model_of(impl):
        model = timm.create_model("deit_tiny_gka_patch16_224", impl=impl, **sizes).to(DEVICE).train()
        return model.parameters(), lambda *batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    check(model_of, list(zip(images, labels, strict=True)), lr=1e-3)
