"""bfloat16 on a CPU: which tensors are rounded, the loss, Muon's products, and runs that continue."""

import pytest
import torch
import torch.nn.functional as F

import gpt_runs
from nanochat_gka.model.loss import ROWS_AT_ONCE, capped, cross_entropy
from nanochat_gka.training import muon
from nanochat_gka.training.muon import product
from tiny_gpt import SHAPE, awake
from trainkit_gka import hardware

CPU = torch.device("cpu")
ROUNDING, ULP = 2.0**-24, 2.0**-8  # of float32; half a unit in the last place of bfloat16


def test_activations_are_rounded_and_weights_are_not():
    """A frequent token's gradient is a float32 sum too: of 300 ones, where a bfloat16 sum stops at 256."""
    model, ids = awake(SHAPE), torch.randint(70, (2, 16))
    exact = model(ids)
    assert model.dtype == torch.float32
    model.compute_in(torch.bfloat16)
    assert model.dtype == model.hidden(ids).dtype == model.new_cache(1, 4).layers[0][0].dtype == torch.bfloat16
    rounded = model(ids)
    assert rounded.dtype == torch.float32 and {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.02
    model(ids, ids).backward()
    assert {weight.grad.dtype for weight in model.parameters() if weight.grad is not None} == {torch.float32}
    table = model.transformer.wte
    table.weight.grad = None
    table(torch.full((30, 10), 5)).to(model.dtype).sum().backward()
    assert table.weight.grad[5].eq(300).all()


# The loss


def plain(logits, targets, reduction):
    capped_logits = 20 * torch.tanh(logits / 20) if logits.dtype == torch.float64 else capped(logits)
    return F.cross_entropy(capped_logits, targets, ignore_index=-1, reduction=reduction)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE, 3 * ROWS_AT_ONCE + 5])
def test_the_loss_by_rows_and_its_gradient_are_those_in_float64(rows, reduction):
    """The gradient is rounded twice, for the sum and for the mean: 1 / 255 in bfloat16 is a third such rounding.

    Up to float32's sums: a probability is off by some roundings of its exponent, at most 40.
    """
    raw, targets = (torch.randn(rows, 96) * 15).bfloat16(), torch.randint(90, (rows,))
    targets[1::4] = -1
    results = []
    for compute, dtype in ((plain, torch.float64), (cross_entropy, torch.bfloat16)):
        logits = raw.to(dtype, copy=True).requires_grad_()
        loss = compute(logits[:, :90], targets, reduction) / 255
        loss.backward()
        results.append((loss.item(), logits.grad.double()))
    (exact_loss, exact), (loss, gradient) = results
    assert loss == pytest.approx(exact_loss, rel=40 * ROUNDING)
    assert ((gradient - exact).abs() <= ((1 + ULP) ** 2 - 1) * exact.abs() + 80 * ROUNDING / 255).all()
    assert gradient[1::4].eq(0).all() and gradient[:, 90:].eq(0).all()


# Muon on processors without instructions for bfloat16


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (64, 256, 64), (256, 64, 200)], ids=str)
@pytest.mark.parametrize("through_float32", [True, False])
def test_product_of_bfloat16_is_rounded_once(shape, through_float32):
    """Float32 sums of n exact products, in any order, are off by n roundings of the sum of their sizes; then y is
    rounded to bfloat16.
    """
    rows, n, columns = shape
    a, b = torch.randn(2, rows, n).bfloat16(), torch.randn(2, n, columns).bfloat16()
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    result = product(a, b, through_float32)
    assert result.dtype == torch.bfloat16
    assert ((result - exact).abs() <= (ULP * (1 + ROUNDING * n)) * exact.abs() + n * ROUNDING * sizes).all()


def test_a_processor_without_instructions_for_bfloat16_is_known():
    """Without oneDNN bfloat16 is multiplied in a scalar loop, some 30 times slower, as without instructions for it."""
    with torch.backends.mkldnn.flags(enabled=False):
        assert hardware.bfloat16_products_are_slow(CPU)


@pytest.mark.parametrize("began", [True, False])
def test_a_continued_run_multiplies_as_it_began(packed, tmp_path, monkeypatch, began):
    chosen = set()

    def recorded(a, b, through_float32):
        chosen.add(through_float32)
        return product(a, b, through_float32)

    monkeypatch.setattr(muon, "product", recorded)
    for slow, steps in ((began, 4), (not began, 6)):
        monkeypatch.setattr(hardware, "bfloat16_products_are_slow", lambda device, slow=slow: slow)
        assert gpt_runs.train(packed, tmp_path, "--stop-after", steps) == 0
    assert chosen == {began}
