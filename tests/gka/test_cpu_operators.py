"""The CPU kernel as torch operators: checked by torch, compiled, exported, batched, and named by a revision."""

import hashlib
import subprocess
import sys
from functools import partial

import pytest
import torch

from gka import GaussianKernelAttention, gaussian_attention, select_impl
from gka.impl.cpu import build, call, decoding, op
from gka.testing import make_features
from operator_cases import NO_PRODUCTS

pytestmark = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
READY = build.obstacle() is None and call.has_bfloat16()
needs_products = pytest.mark.skipif(not READY, reason=NO_PRODUCTS)

attend = partial(gaussian_attention, impl="cpu")
HALF = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not READY, reason=NO_PRODUCTS))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("kind", ["full", "values", "foreign", "foreign, values", "documents, values"])
def test_the_operator_is_a_proper_one(kind, dtype):
    """Schema, fake tensors, autograd registration, dynamic shapes: torch's own check."""
    x, keys, values = (make_features("normal", (1, n, 2, 32), dtype, n) for n in (20, 30, 31))
    log_sigma, foreign = torch.zeros(2).requires_grad_(), "foreign" in kind
    documents = torch.tensor([0, 3, 3, 20], dtype=torch.int32) if "documents" in kind else None
    limits = (5, 0, False) if "values" in kind else (-1, -1, True)
    values = values[:, : 30 if foreign else 20].requires_grad_() if "values" in kind else None
    tensors = x.requires_grad_(), keys.requires_grad_() if foreign else None, values
    torch.library.opcheck(op.attend, (*tensors, log_sigma, None, documents, *limits, 0.0 if foreign else 1e-6, True))


@needs_products
def test_autocast_and_compile_give_what_bfloat16_features_give():
    layer = GaussianKernelAttention(64, 2, causal=True, impl="cpu")
    x = torch.randn(2, 40, 64, requires_grad=True)

    def step(layer):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))]

    want = step(layer)
    assert want[0].dtype == torch.bfloat16 and want[1].dtype == torch.float32
    got = step(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(got, want, atol=0.02, rtol=0.02)


RUN_ELSEWHERE = """
import sys, torch
from gka.impl.cpu import op
x, log_sigma, want = torch.load(sys.argv[1], weights_only=True)
assert torch.equal(op.attend(x, None, None, log_sigma, None, None, -1, -1, True, 1e-6, False)[0], want)
"""


@needs_products
def test_an_exported_program_asks_for_the_kernel_before_it_uses_it(tmp_path, monkeypatch):
    """In a process that has chosen no kernel: the same bits. On a machine without: one line, not a crash."""
    x, log_sigma = make_features("normal", (1, 20, 2, 32), torch.bfloat16), torch.zeros(2)
    arguments = (x, None, None, log_sigma, None, None, -1, -1, True, 1e-6, False)
    torch.save([x, log_sigma, op.attend(*arguments)[0]], tmp_path / "tensors")
    subprocess.run([sys.executable, "-c", RUN_ELSEWHERE, tmp_path / "tensors"], check=True)
    monkeypatch.setattr(call, "has_bfloat16", lambda: False)
    monkeypatch.setattr(call, "_functions", call._functions.__wrapped__)
    with pytest.raises(RuntimeError, match="needs AMX or AVX512-BF16"):
        op.attend(*arguments)


class _Foreign(torch.nn.Module):
    def forward(self, x, keys, values, log_sigma):
        return attend(x, log_sigma, keys=keys, values=values)


@pytest.mark.parametrize("queries", [3, 40], ids=["decoding", "attention"])
def test_an_exported_program_takes_other_strides_than_its_example(queries):
    """torch.export keeps the copies that its example needed, and does not look at strides again."""
    arguments = *(torch.randn(2, n, 4, 16) for n in (queries, 50, 50)), torch.randn(4) / 4
    program, want = torch.export.export(_Foreign(), arguments).module(), _Foreign()(*arguments)
    for same in (arguments, [torch.stack([t, t], dim=-1)[..., 0] for t in arguments]):  # not side by side
        torch.testing.assert_close(program(*same), want, rtol=0, atol=0)
    image = torch.randn(2, 64, queries).transpose(1, 2)  # as a ViT's patches come
    layer = GaussianKernelAttention(64, 4, impl="cpu").eval()
    program = torch.export.export(layer, (image.contiguous(),)).module()
    torch.testing.assert_close(program(image), program(image.contiguous()), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("foreign", [0, 2])
def test_batched_gradients_are_those_of_a_loop(foreign):
    leaves = [torch.randn(2, 9, 2, 8, requires_grad=True) for _ in range(1 + foreign)]
    log_sigma = torch.zeros(2, requires_grad=True)
    leaves.append(log_sigma)
    y = attend(leaves[0], log_sigma, **dict(zip(("keys", "values"), leaves[1:-1])))
    gradients = torch.randn(3, *y.shape)
    each = [torch.autograd.grad(y, leaves, gradient, retain_graph=True) for gradient in gradients]
    got = torch.autograd.grad(y, leaves, gradients, is_grads_batched=True)
    assert all(torch.equal(batch, torch.stack(one)) for batch, one in zip(got, zip(*each), strict=True))


def test_vmap_is_a_loop_and_other_transforms_go_to_sdpa():
    x, log_sigma = make_features("normal", (1, 20, 2, 16)), torch.zeros(2)
    stacked = torch.stack([x, 2 * x])
    got = torch.func.vmap(lambda x: attend(x, log_sigma))(stacked)
    assert all(torch.equal(a, attend(b, log_sigma)) for a, b in zip(got, stacked, strict=True))
    names = []

    def energy(x):
        names.append(select_impl(x))
        return gaussian_attention(x, log_sigma).square().sum()

    got = torch.func.grad(energy)(x)
    assert names == ["sdpa"]
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(energy(leaf), leaf)[0], rtol=1e-4, atol=1e-4)
    assert names == ["sdpa", "cpu"]


def test_the_operators_names_change_with_what_they_take_and_give_back():
    """If this fails, raise REVISION. torch keeps compiled programs, also over an update of this package, and finds them
    again by the names and arguments of operators; a program that expects other results ends training.
    """
    schemas = [str(operator._schema) for operator in (op.attend, op.attend_backward, decoding.attend_cached)]
    with torch._subclasses.FakeTensorMode():
        x, log_sigma, options = torch.empty(2, 9, 3, 16), torch.empty(3), (-1, 0, False, 1e-6)
        saved = op.attend(x, None, None, log_sigma, None, None, *options, True)
        half = op.attend(x.bfloat16(), None, None, log_sigma, None, None, *options, True)
        gradients = op.attend_backward(x, x, x, None, log_sigma, None, None, *saved, *options)
        y = decoding.attend_cached(x, None, x, log_sigma, None, None, None, [9], [], [], -1, 0)
        results = [f"{t.dtype} {tuple(t.shape)}" for t in (*saved, *half, *gradients, y)]
    text = "\n".join([*schemas, *results])
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == "3ac8f836", text
