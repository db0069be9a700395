"""The Triton kernels against the float64 oracle: in Triton's interpreter on CPU tensors, or on the GPU where there is
one.

The interpreter checks arithmetic and indices. What it cannot see (registers, shared memory, tensor cores) is the
subject of test_triton_compile.py; speed and bfloat16, whose products the interpreter gets wrong, that of
test_triton_gpu.py.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.impl.triton import cudnn, launch
from gka.impl.triton.configs import generation, override
from gka.masking import Mask
from gka.testing import Problem, make_log_sigma
from operator_cases import DEVICE, MASKS, boundaries, check, check_parts, features, tiles

# Float32 tiles have 16 to 64 rows and columns, the larger the fewer channels.
SHAPES = [(2, 1, 2, 16), (2, 63, 2, 32), (1, 75, 3, 24), (1, 111, 1, 64), (1, 69, 1, 96), (1, 83, 1, 128)]

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning")


BOTH, HALF = (False, True), dict(dtype=torch.float16)
MASKED = [dict(causal=causal, window=window) for causal, window in MASKS]
CASES = [
    # The next line has a window wider than the sequence.
    *(dict(shape=shape, constant_norm=norm, **mask) for shape in SHAPES for mask in MASKED[:4] for norm in BOTH),
    *(dict(shape=(1, 75, 2, 40), with_values=True, constant_norm=norm, **mask) for mask in MASKED for norm in BOTH),
    *(dict(shape=(1, 100, 2, 64), kind=kind, **mask, **HALF) for kind in ("normal", "clusters") for mask in MASKED[:3]),
    # Whole tiles and all widths of the last one, the norms in the kernel and from one of their own.
    *(dict(shape=(1, length, 2, 64), **HALF) for length in (1, 16, 64, 65, 127, 130, 197, 256, 257)),
    *(dict(shape=(2, length, 1, 40), **HALF) for length in (1, 16, 64, 65)),
    *(dict(shape=(1, 70, 2, 32), kind=kind, **mask) for kind in ("x10", "x50", "+50") for mask in MASKED[:2]),
    # An eps that matters: y shrinks by D / (D + eps), and gradients know it.
    *(dict(shape=(1, 50, 2, 32), eps=0.5, with_values=values, **mask) for values in BOTH for mask in MASKED[:2]),
    *(dict(shape=(1, 50, 2, 64), eps=0.5, **mask, **HALF) for mask in MASKED[:2]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value).split(".")[-1] for value in case.values()))
def test_outputs_and_gradients_keep_to_the_budget(case):
    check("triton", **case)


@pytest.mark.parametrize("tokens", [0, 1000])
def test_norms_from_a_kernel_of_their_own(tokens, monkeypatch):
    monkeypatch.setattr(launch, "NORMS_FIRST_TOKENS", tokens)
    check("triton", (1, 300, 2, 16))
    check("triton", (1, 300, 1, 16), causal=True, with_values=True)


ROUTE = partial(gaussian_attention, impl="triton")
TRIANGULAR = [(64, 64, 1), (64, 64, 64), (64, 64, 197), (64, 64, 256), (32, 16, 63), (32, 16, 100), (32, 32, 257)]


@pytest.fixture
def triangular(monkeypatch):
    """Short sequences take the triangular schedule, although the suite computes in torch's deterministic mode."""
    monkeypatch.setattr(launch, "TRIANGULAR_FIRST_TOKENS", 1)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    with override(generation(torch.device(DEVICE)), paths={"triangular": ("",)}):
        yield


@pytest.mark.parametrize("rows,columns,length", TRIANGULAR)
def test_triangular_schedule(rows, columns, length, triangular, monkeypatch):
    """Odd and even numbers of blocks, whole and cut. Where bits must repeat, another kernel computes."""
    problem = Problem.seeded("normal", (2, length, 2, 32), device=DEVICE, eps=EPS)
    with tiles(rows, columns):
        testing.check(ROUTE, problem)
        got = testing.run(ROUTE, problem)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        repeatable = testing.run(ROUTE, problem)
        monkeypatch.setattr(launch, "TRIANGULAR_FIRST_TOKENS", math.inf)
        assert torch.equal(repeatable.dx, testing.run(ROUTE, problem).dx)
    assert torch.equal(got.dx, repeatable.dx) == (length == 1)


@pytest.mark.parametrize("damaged", ["x", "grad_y"])
def test_triangular_schedule_keeps_nan_in_its_sequence(damaged, triangular):
    """The last tile of a sequence reaches into the next one's rows."""
    problem = Problem.seeded("normal", (3, 75, 2, 32), device=DEVICE)
    with tiles(32, 16):
        want = testing.run(ROUTE, problem).dx
        getattr(problem, damaged)[1] = math.nan
        got = testing.run(ROUTE, problem).dx
    assert got[1].isnan().all()
    torch.testing.assert_close(got[::2], want[::2], rtol=1e-5, atol=1e-6)


def softmax_backward(dy, q, k, v, y, log_sum_exp):
    """What cuDNN computes, in plain PyTorch: exponents and sums in float32, factors of products rounded."""
    dtype = q.dtype
    dy, q, k, v, y = (t.float() for t in (dy, q, k, v, y))
    weights = torch.exp(q @ k.mT - log_sum_exp).tril()
    g = weights * (dy @ v.mT - (dy * y).sum(-1, keepdim=True))
    weights, g = (t.to(dtype).float() for t in (weights, g))
    return tuple(t.to(dtype) for t in (g @ k, g.mT @ q, weights.mT @ dy))


@pytest.fixture
def by_cudnn(monkeypatch):
    """Causal attention with constant norms has cuDNN's backward, for which a stand-in computes."""
    monkeypatch.setattr(cudnn, "softmax_backward", softmax_backward)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    with override(generation(torch.device(DEVICE)), paths={"cudnn": ("",)}):
        yield


@pytest.mark.parametrize("form", ["own", "values", "keys and values"])
@pytest.mark.parametrize("length,head_dim", [(33, 64), (75, 24), (130, 128)])
def test_backward_by_cudnn(length, head_dim, form, by_cudnn, monkeypatch):
    """Where bits must repeat, another kernel computes. bfloat16: test_triton_gpu.py."""
    dtype = torch.float16
    norm = partial(nn.functional.rms_norm, normalized_shape=(head_dim,))
    problem = Problem.seeded("normal", (2, length, 2, head_dim), dtype, with_values=form != "own", device=DEVICE)
    keys = features("normal", problem.x.shape, dtype, 3) if form == "keys and values" else None
    problem = replace(problem, keys=keys, mask=Mask(causal=True), front=norm, eps=EPS)
    route = partial(ROUTE, causal=True, constant_norm=True)
    testing.check(route, problem, constant_norm=True)
    got = testing.run(route, problem)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not torch.equal(got.dx, testing.run(route, problem).dx)


def test_cudnn_takes_the_arguments():
    """Without a GPU, by what torch says of the results' shapes."""
    q = torch.empty(2, 9, 3, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    level = torch.empty(2, 3, 9, 1, device="meta")
    assert all(t.shape == q.shape and t.stride() == q.stride() for t in cudnn.softmax_backward(q, q, q, q, q, level))


ANY_TILES = dict(
    causal=st.booleans(),
    window=st.none() | st.integers(0, 95),
    rows=st.sampled_from([16, 32]),
    columns=st.sampled_from([16, 32]),
    with_values=st.booleans(),
    constant_norm=st.booleans(),
)


@settings(max_examples=16)
@given(lengths=st.lists(st.integers(0, 70), min_size=1, max_size=2), **ANY_TILES)
def test_any_mask_and_lengths_with_any_tiles(lengths, causal, window, rows, columns, with_values, constant_norm):
    """Windows, diagonals and rows that start, end and vanish inside, between and at the edges of tiles. NaN in padding;
    a row alone has none.
    """
    kind, shape = "unit_norm" if constant_norm else "normal", (len(lengths), max([1, *lengths]), 1, 16)
    fields = dict(with_values=with_values, device=DEVICE, mask=Mask(causal, window), eps=EPS)
    problem, of_rows = Problem.seeded(kind, shape, **fields), torch.tensor(lengths, device=DEVICE)
    hidden = (torch.arange(shape[1], device=DEVICE) >= of_rows[:, None])[:, :, None, None]
    options = dict(causal=causal, window=window, lengths=of_rows, constant_norm=constant_norm)
    with tiles(rows, columns):
        padded = problem.map(lambda t: t.masked_fill(hidden, math.nan) if t.dim() == 4 else t)
        got = testing.run(partial(ROUTE, **options), padded).named()
    check_parts(problem, [(row, slice(length), slice(length)) for row, length in enumerate(lengths) if length], got)


@pytest.mark.parametrize("constant_norm", [False, True], ids=["general", "constant"])
@pytest.mark.parametrize("queries,keys,causal,window", [(1, 700, True, None), (1, 700, True, 300), (5, 600, True, 70),
(16, 600, False, None), (3, 40, True, None), (50, 90, True, 20), (50, 90, False, None)])  # fmt: skip
def test_foreign_keys(queries, keys, causal, window, constant_norm):
    """Decoding: few queries split the keys over programs. Far from every key, where all affinities underflow, too. With
    a constant norm, that of a normalisation in front, all gradients, as head offsets train.
    """
    x, k, v, grad_y = (features("normal", (2, n, 2, 32), seed=n) for n in (queries, keys, keys + 1, queries + 2))
    fields = dict(log_sigma=torch.tensor([-1.0, 1.1], device=DEVICE), keys=k, mask=Mask(causal, window))
    problem = Problem(x if constant_norm else x + 30, **fields)
    if constant_norm:
        norm = partial(nn.functional.rms_norm, normalized_shape=(32,))
        problem = replace(problem, log_sigma=make_log_sigma(2, 32, DEVICE), front=norm, grad_y=grad_y[:, :queries])
    short = torch.tensor([keys - (window or 200 % keys) - 2, 0], device=DEVICE)  # a window leaves the last without keys
    for values, lengths in ((None, None), (v[:, :keys], None), (v[:, :keys], short)):
        case, route = replace(problem, values=values), partial(gaussian_attention, causal=causal, window=window)
        route = partial(route, lengths=lengths)
        got = testing.run(partial(route, constant_norm=constant_norm, impl="triton"), case).named()
        want = testing.run(partial(route, impl="reference"), case.double()).named()
        for name, t in got.items():
            floor = testing.exponent_ulp(case.behind_front()) if name == "y" else 100 * torch.finfo(t.dtype).eps
            floor *= testing.log_sigma_condition(case.behind_front()) if name == "dlog_sigma" else 1
            assert (t.double() - want[name]).norm() <= floor * want[name].norm(), name
        assert not got["y"][(want["y"] == 0).all(-1)].any()


def check_documents(problem, lengths, constant_norm=False, **options):
    """Packed, with all gradients, as the reference in float64."""
    options["cu_seqlens"] = boundaries(lengths).to(DEVICE)
    got = testing.run(partial(ROUTE, constant_norm=constant_norm, **options), problem)
    want = testing.run(partial(gaussian_attention, impl="reference", **options), problem.double())
    for name, t in got.named().items():
        torch.testing.assert_close(t.double(), getattr(want, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other_keys,with_values,causal,window", [(False, False, False, None),
(False, False, True, None), (True, False, True, 9), (True, True, False, None)])  # fmt: skip
def test_documents_with_constant_norms(other_keys, with_values, causal, window):
    """Of any norms: test_packed.py."""
    shape, norm = (1, 61, 2, 16), partial(nn.functional.rms_norm, normalized_shape=(16,))
    problem = Problem.seeded("normal", shape, with_values=with_values, device=DEVICE, front=norm)
    if other_keys:
        problem = replace(problem, keys=features("normal", shape, seed=3))
    with tiles(16, 16):
        check_documents(problem, [0, 1, 7, 33, 0, 20], constant_norm=True, causal=causal, window=window)


def test_the_triangular_schedule_is_not_for_documents(triangular):
    with tiles(32, 16):
        check_documents(Problem.seeded("normal", (1, 75, 2, 32), device=DEVICE), [30, 45])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal,with_values", [(False, False), (True, True)])
def test_bandwidths_too_small_for_float32(dtype, causal, with_values):
    """|x|^2 / sigma^2 around 1e9: rounding loses K_ii = 1, rows are those of the limit, gradients stay finite."""
    x, log_sigma = features("normal", (1, 100, 2, 64), dtype), torch.full((2,), -8.5, device=DEVICE)
    values = features("normal", (1, 100, 2, 64), dtype, 1) if with_values else None
    route = partial(gaussian_attention, causal=causal, impl="triton")
    got = testing.run(route, Problem(x, log_sigma, values, grad_y=x))
    torch.testing.assert_close(got.y, x if values is None else values, rtol=2e-3, atol=1e-5)
    assert all(torch.isfinite(t).all() for t in got.named().values())
    # Where W is known to float32's last digits no longer, it is still no more than 1.
    assert got.dx.abs().max() <= 4 * x.abs().max() / math.exp(-17) and (
        values is None or got.dvalues.norm() <= 1.01 * x.norm()
    )
