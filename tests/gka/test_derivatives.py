"""Derivatives of every order and mode of the reference, where tokens repeat and where keys contain the queries,
against explicit sums; and those that the others have, against the reference.
"""

from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import explicit_sums
from gka import gaussian_attention, log_kernel, testing
from gka.dispatch import IMPLEMENTATIONS
from gka.kernel import squared_distances
from operator_cases import CPU, DEVICE

REPEATED = [0, 1, 0, 2, 2]  # tokens 0 and 2 are equal, and 3 and 4
CASES = ["distinct tokens", "repeated tokens", "own values", "keys with the queries"]
TIGHT = dict(rtol=1e-11, atol=1e-13)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Problem:
    """The operator's arguments by name, and the one that each of x, keys, values and log_sigma comes from: directions
    of one are equal, gradients add up.
    """

    def __init__(self, case: str, causal: bool):
        foreign, own_values = case == "keys with the queries", case == "own values"
        x = random(2, 5, 2, 3)
        x = x if case == "distinct tokens" else x[:, REPEATED]
        self.arguments = {"x": x, "log_sigma": torch.tensor([-0.2, 0.4], dtype=torch.float64)}
        if foreign:
            self.arguments["keys"] = torch.cat([random(2, 3, 2, 3, seed=1), x], dim=1)
        keys = "keys" if foreign else "x"
        if not own_values:
            self.arguments["values"] = random(*self.arguments[keys].shape, seed=2)
        self.sources = "x", keys, keys if own_values else "values", "log_sigma"
        self.options = dict(causal=causal, eps=0.0 if foreign else 1e-3)
        self.grad_y, seeds = random(*x.shape, seed=3), range(4, 8)
        self.directions = [random(*t.shape, seed=seed) for t, seed in zip(self.tensors, seeds)]

    @property
    def tensors(self):
        return list(self.arguments.values())

    def function(self, *tensors):
        return gaussian_attention(impl="reference", **self.options, **dict(zip(self.arguments, tensors)))

    def four(self, tensors):
        """x, keys, values and log_sigma of tensors like the arguments, for the explicit sums."""
        named = dict(zip(self.arguments, tensors))
        return [named[source].numpy() for source in self.sources]

    def gather(self, four):
        """What the explicit sums say of each argument."""
        pairs = list(zip(self.sources, map(torch.from_numpy, four), strict=True))
        return [sum(t for source, t in pairs if source == name) for name in self.arguments]


@pytest.fixture(params=product(CASES, [False, True]), ids=str)
def problem(request):
    return Problem(*request.param)


def close(got, want):
    torch.testing.assert_close(tuple(got), tuple(want), **TIGHT)


def test_derivatives_in_every_mode(problem):
    """First and second ones, in reverse and forward mode and each over the other, and of a batch of gradients."""
    grad_y, directions = problem.grad_y, tuple(problem.directions)
    along, by = dict(directions=problem.four(directions), **problem.options), dict(grad_y=grad_y.numpy())
    tensors = problem.four(problem.tensors)
    tangent = torch.from_numpy(explicit_sums.tangent(tensors, **along))
    gradients = problem.gather(explicit_sums.gradients(tensors, **problem.options, **by))
    curvature = problem.gather(explicit_sums.curvature(tensors, **along, **by))

    def loss(*tensors):
        return (problem.function(*tensors) * grad_y).sum()

    def slope(*tensors):
        return torch.func.jvp(loss, tensors, directions)[1]

    leaves = [t.clone().requires_grad_() for t in problem.tensors]
    by_autograd = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    close(by_autograd, gradients)
    along = sum((g * d).sum() for g, d in zip(by_autograd, directions, strict=True))
    close(torch.autograd.grad(along, leaves), curvature)
    two = torch.stack([grad_y, 2 * grad_y])
    batched = torch.autograd.grad(problem.function(*leaves), leaves, two, is_grads_batched=True)
    close(batched, [torch.stack([g, 2 * g]) for g in gradients])

    arguments, indices = tuple(problem.tensors), tuple(range(len(directions)))
    close([torch.func.jvp(problem.function, arguments, directions)[1]], [tangent])
    close(torch.func.jvp(torch.func.grad(loss, indices), arguments, directions)[1], curvature)
    close(torch.func.grad(slope, indices)(*arguments), curvature)
    close(torch.func.jacfwd(slope, indices)(*arguments), curvature)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(arguments, directions, strict=True)]
        close([forward_ad.unpack_dual(problem.function(*duals)).tangent], [tangent])


HALF_SEEN = torch.arange(12).view(3, 4) % 2 == 0
OPTIONS = [
    dict(), dict(causal=True), dict(window=1), dict(constant_norm=True), dict(lengths=torch.tensor([3, 1])),
    dict(key_padding_mask=torch.tensor([[True, False, False], [False, False, True]])), dict(attn_mask=HALF_SEEN[:, :3]),
    dict(keys=True, attn_mask=HALF_SEEN), dict(cu_seqlens=torch.tensor([0, 1, 3], dtype=torch.int32)),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_auto_has_forward_mode_with_every_mask(options):
    """By jvp, dual numbers and hessian, the first compiled too: what the reference says in float64."""
    x, keys, direction = random(2, 3, 2, 4), random(2, 4, 2, 4, seed=2), random(2, 3, 2, 4, seed=1)
    options = {**options, **(dict(keys=keys) if "keys" in options else {})}
    x, direction = (t[:1] if "cu_seqlens" in options else t for t in (x, direction))

    def derivatives(dtype, impl, compiled):
        def function(x, log_sigma):
            cast = {name: t.to(dtype) if name == "keys" else t for name, t in options.items()}
            return gaussian_attention(nn.functional.rms_norm(x, (4,)), log_sigma, eps=0.0, impl=impl, **cast)

        def tangent(x, log_sigma, direction):
            return torch.func.jvp(function, (x, log_sigma), (direction, torch.ones_like(log_sigma)))[1]

        def curvature(x, log_sigma):
            return torch.func.hessian(lambda s: function(x, s).square().sum())(log_sigma)

        tensors = x.to(dtype), torch.zeros(2, dtype=dtype), direction.to(dtype)
        if compiled:
            torch._dynamo.reset()
            tangent = torch.compile(tangent, fullgraph=True, backend="aot_eager")
        with forward_ad.dual_level():
            directions = tensors[2], torch.ones(2, dtype=dtype)
            duals = [forward_ad.make_dual(t, d) for t, d in zip(tensors[:2], directions)]
            by_duals = forward_ad.unpack_dual(function(*duals)).tangent
        return [t.double() for t in (tangent(*tensors), by_duals, curvature(*tensors[:2]))]

    for compiled in (False, True) if options in OPTIONS[:2] else (False,):
        got, want = derivatives(torch.float32, "auto", compiled), derivatives(torch.float64, "reference", False)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS.keys() - {"reference", "sdpa"}))
def test_kernels_refuse_forward_mode_by_name(impl):
    x = torch.ones(1, 5, 2, 16)
    with pytest.raises(ValueError, match=f'{impl} does not serve forward_mode; use impl="auto"'):
        torch.func.jvp(lambda x: gaussian_attention(x, torch.zeros(2), impl=impl), (x,), (x,))


def double_backward(x, log_sigma, impl):
    y = gaussian_attention(x, log_sigma, eps=0.0, impl=impl)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)


@pytest.mark.parametrize("impl", [CPU, "triton", "sdpa"])
def test_kernels_refuse_double_backward(impl):
    x, log_sigma = testing.make_features("normal", (1, 5, 2, 16)).to(DEVICE), torch.zeros(2, device=DEVICE)
    with pytest.raises(RuntimeError, match=r'impl="reference" for double backward|is not implemented'):  # torch's words
        double_backward(x.requires_grad_(), log_sigma, impl)


def test_sdpa_has_double_backward_without_its_fused_kernels():
    x, log_sigma = random(1, 5, 2, 3).requires_grad_(), torch.zeros(2, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        close(double_backward(x, log_sigma, "sdpa"), double_backward(x, log_sigma, "reference"))


def test_vmap_is_a_loop():
    x, log_sigma = random(3, 2, 5, 2, 3)[:, :, REPEATED], random(3, 2, seed=1)
    got = torch.func.vmap(lambda x, s: gaussian_attention(x, s, causal=True, impl="reference"))(x, log_sigma)
    want = [gaussian_attention(*pair, causal=True, impl="reference") for pair in zip(x, log_sigma, strict=True)]
    close(got, want)


class Largest(TorchDispatchMode):
    """Records the most numbers that one tensor has while it is on."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.itemsize)
        return result


def test_training_with_the_reference_takes_matrices_and_nothing_larger():
    """No tensor has more than B H T T numbers, forward or backward, where differences would have D times that."""
    x = testing.make_features("normal", (2, 197, 3, 64)).requires_grad_()
    log_sigma = torch.zeros(3, requires_grad=True)
    with Largest() as largest:
        gaussian_attention(x, log_sigma, impl="reference").sum().backward()
    assert 2 * 3 * 197 * 197 <= largest.numbers < 2 * (2 * 3 * 197 * 197)
    assert x.grad.abs().max() > 0


def test_distances_do_not_cancel():
    """Tokens a millionth apart, a thousand from the origin: the distance has all its digits."""
    a = torch.full((1, 4), 1024.0) + torch.tensor([[0.0], [2.0**-13], [0.0]])
    want = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]) * 4 * 2.0**-26
    assert torch.equal(squared_distances(a, a), want)
    tokens = a[None, :, None]  # (B, T, H, D)
    assert torch.equal(log_kernel(tokens, tokens, torch.zeros(1))[0, 0], -0.5 * want)
