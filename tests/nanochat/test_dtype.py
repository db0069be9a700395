"""Training in bfloat16 on a CPU: what is rounded and what is not, the loss, and continued runs."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import gpt_runs
from gpt_runs import events, final
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.loss import ROWS_AT_ONCE, capped, cross_entropy
from tiny_gpt import SHAPE, awake

STEPS = 12


BFLOAT16 = ["--num-iterations", STEPS, "--dtype", "bfloat16"]


@pytest.fixture(scope="module")
def trained(packed, tmp_path_factory):
    """A whole run in bfloat16."""
    out = tmp_path_factory.mktemp("bfloat16")
    assert gpt_runs.train(packed, out, *BFLOAT16) == 0
    return out


def losses(out):
    return torch.tensor([line["loss"] for line in events(out, "train")])


def test_activations_are_rounded_and_weights_are_not():
    model = awake(SHAPE)
    ids = torch.randint(70, (2, 16))
    exact = model(ids)
    assert model.dtype == torch.float32
    model.compute_in(torch.bfloat16)
    assert model.dtype == model.hidden(ids).dtype == model.new_cache(1, 4).layers[0][0].dtype == torch.bfloat16
    rounded = model(ids)
    assert rounded.dtype == torch.float32 and {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.02
    model(ids, ids).backward()
    assert {weight.grad.dtype for weight in model.parameters() if weight.grad is not None} == {torch.float32}


def test_a_frequent_tokens_gradient_is_summed_in_float32():
    """300 equal addends: a bfloat16 sum of ones stops at 256."""
    model = awake(SHAPE)
    model.compute_in(torch.bfloat16)
    ids = torch.full((30, 10), 5)
    model.transformer.wte(ids).to(model.dtype).sum().backward()
    assert model.transformer.wte.weight.grad[5].eq(300).all()


def test_bfloat16_run_continues_to_the_bit_with_its_own_dtype_alone(packed, trained, tmp_path, capsys):
    assert gpt_runs.train(packed, tmp_path, *BFLOAT16, "--stop-after", 7) == 0
    for dtype in ("auto", "float32"):
        assert gpt_runs.train(packed, tmp_path, *BFLOAT16[:2], "--dtype", dtype) == 2
        assert f"--dtype is {dtype} but the run in" in capsys.readouterr().err
    assert gpt_runs.train(packed, tmp_path, *BFLOAT16) == 0 and "resuming at step 7" in capsys.readouterr().out
    assert final(tmp_path, STEPS) == final(trained, STEPS)
    weights = load_file(tmp_path / "run/checkpoints" / f"step_{STEPS:08d}" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert load(tmp_path / "run").model.dtype == torch.float32


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE, 3 * ROWS_AT_ONCE + 5])
def test_the_loss_by_rows_is_the_plain_loss(rows, reduction):
    """Against float64: as far off as the plain computation, whose gradient is rounded to bfloat16 too."""
    torch.manual_seed(rows)
    raw, targets = (torch.randn(rows, 96) * 15).bfloat16(), torch.randint(90, (rows,))
    targets[1::4] = -1
    results = []
    for compute, dtype in ((plain, torch.float64), (plain, torch.bfloat16), (cross_entropy, torch.bfloat16)):
        logits = raw.to(dtype, copy=True).requires_grad_()
        loss = compute(logits[:, :90], targets, reduction)
        (loss / 7).backward()
        results.append((loss.double(), logits.grad.double()))
    for exact, ours, theirs in zip(results[0], results[2], results[1]):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 4e-3 * exact.norm()
    assert results[2][1][1::4].eq(0).all() and results[2][1][:, 90:].eq(0).all()


@pytest.mark.parametrize("rows", [0, 1, ROWS_AT_ONCE, 3 * ROWS_AT_ONCE + 5])
def test_losses_without_gradients_are_the_plain_losses(rows):
    """They are computed by rows. Up to float32 rounding: processors may treat the ends of what they are given apart."""
    torch.manual_seed(rows)
    logits, targets = torch.randn(rows, 307) * 15, torch.randint(307, (rows,))
    targets[1::4] = -1
    expected = plain(logits, targets, "none")
    torch.testing.assert_close(cross_entropy(logits, targets, "none"), expected, rtol=1e-6, atol=1e-6)
    with_gradients = cross_entropy(logits.requires_grad_(), targets, "none")
    assert with_gradients.requires_grad and torch.equal(with_gradients, expected)


def plain(logits, targets, reduction):
    capped_logits = 20 * torch.tanh(logits / 20) if logits.dtype == torch.float64 else capped(logits)
    return F.cross_entropy(capped_logits, targets, ignore_index=-1, reduction=reduction)
