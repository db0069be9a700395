"""What only a GPU can show of the Triton kernels: real sizes, bfloat16, every shipped configuration, races, CUDA
graphs, speed of the first call.

test_triton_accuracy.py, test_memory.py, test_triton_op.py and test_triton_training.py run their cases on the GPU
too, where there is one.
"""

import math
import time
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka import GaussianKernelAttention, gaussian_attention, testing
from gka.api import EPS
from gka.impl.triton.configs import TABLES, generation, override
from gka.masking import Mask
from gka.testing import Problem

pytestmark = pytest.mark.gpu

DEIT = (4, 197, 3, 64)
GPT = (1, 1024, 2, 128)
SHAPES = [(DEIT, False, None), (GPT, True, None), (GPT, True, 300), ((2, 333, 2, 32), True, 50)]
SHAPES += [((2, 300, 2, 96), False, None), ((1, 600, 2, 64), False, 77)]


def seeded(shape, dtype, causal, window, with_values, constant_norm=False):
    fields = dict(with_values=with_values, device="cuda", mask=Mask(causal, window), eps=EPS)
    return Problem.seeded("unit_norm" if constant_norm else "normal", shape, dtype, **fields)


def flash_errors(x, grad_y, causal) -> dict[str, float]:
    """The errors of flash attention on softmax attention with q = k = v of the same inputs, against float64."""

    def attend(q, k, v, backend=None):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    results = []
    for dtype, backend in ((x.dtype, SDPBackend.FLASH_ATTENTION), (torch.float64, SDPBackend.MATH)):
        leaf = x.detach().to(dtype).requires_grad_()
        y = attend(leaf, leaf, leaf, backend)
        results.append((y, *torch.autograd.grad(y, leaf, grad_y.to(dtype))))
    return {name: testing.error(got, want) for name, got, want in zip(("y", "dx"), *results, strict=True)}


@pytest.mark.parametrize("constant_norm", [False, True], ids=["general", "constant"])
@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape,causal,window", SHAPES)
def test_no_less_accurate_than_flash_attention(shape, causal, window, dtype, with_values, constant_norm):
    """At most twice flash attention's own error, in y, dx and dvalues."""
    problem = seeded(shape, dtype, causal, window, with_values, constant_norm)
    options = dict(causal=causal, window=window, constant_norm=constant_norm, impl="triton")
    got, want = testing.run(partial(gaussian_attention, **options), problem), testing.oracle(problem)
    limits = flash_errors(problem.x, problem.grad_y, causal)
    limits = {"y": limits["y"], "dx": limits["dx"], "dvalues": limits["dx"]}
    if constant_norm:  # the norms are constant up to the rounding of the features
        rounding = torch.finfo(dtype).eps * shape[3] / problem.log_sigma.mul(2).exp().min().item()
        limits = {name: limit + rounding for name, limit in limits.items()}
    for name, limit in limits.items():
        if (value := getattr(got, name)) is not None:
            assert testing.error(value, getattr(want, name)) <= 2 * limit, name


OPTIONAL = [("triangular", (2, length, 2, 64), False, False) for length in (1024, 1300)]
OPTIONAL += [("short", (4, length, 3, 64), False, False) for length in (129, 160, 192, 197, 208)]
OPTIONAL += [("cudnn", shape, True, values) for shape in (GPT, (2, 333, 2, 64)) for values in (False, True)]


def is_hopper(path):
    """Whether this GPU can have the optional path, which needs Hopper's instructions; on another it must be off."""
    if torch.cuda.get_device_capability()[0] == 9:
        return True
    assert not TABLES[generation(torch.device("cuda"))].takes(path)
    return False


def with_path(path, function, monkeypatch):
    """The function's result with an optional path on, not in the suite's deterministic mode."""
    with monkeypatch.context() as patch, override(generation(torch.device("cuda")), paths={path: ("",)}):
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        return function()


@pytest.mark.parametrize("path,shape,causal,with_values", OPTIONAL, ids=str)
def test_optional_path_is_no_less_accurate(path, shape, causal, with_values, monkeypatch):
    """And is another one: its last bits are not the usual kernel's."""
    if not is_hopper(path):
        return
    problem = seeded(shape, torch.bfloat16, causal, None, with_values)
    if path == "cudnn":  # dx lacks its part along x, and dlog_sigma may leave the budget
        problem = replace(problem, front=partial(torch.nn.functional.rms_norm, normalized_shape=shape[3:]))

    def route(x, log_sigma, **tensors):
        log_sigma = log_sigma.detach() if path == "cudnn" else log_sigma
        return gaussian_attention(x, log_sigma, **tensors, causal=causal, constant_norm=causal, impl="triton")

    with_path(path, partial(testing.check, route, problem, constant_norm=causal), monkeypatch)
    results = testing.run(route, problem), with_path(path, partial(testing.run, route, problem), monkeypatch)
    assert not torch.equal(*(result.dx for result in results))


def test_optional_path_for_short_sequences_knows_what_the_kernel_knows(monkeypatch):
    """NaN stays in its sequence, although the last tile reaches into the next; rows beyond float32 are their limit."""
    if not is_hopper("short"):
        return
    x = testing.make_features("normal", (300, 197, 2, 64), torch.bfloat16).cuda()  # several heads for each program
    x[2] = math.nan
    route = partial(gaussian_attention, impl="triton")
    for log_sigma in (torch.tensor([1.0, math.nan], device="cuda"), torch.tensor([-8.5, 30.0], device="cuda")):
        want, got = route(x, log_sigma), with_path("short", partial(route, x, log_sigma), monkeypatch)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)
        assert got[2].isnan().all() and not got[[1, 3, 299], :, 0].isnan().any()


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("shape,causal,window", SHAPES)
def test_memory_that_was_full_of_nan_changes_nothing(shape, causal, window, with_values):
    """The allocator hands out poisoned blocks; twenty runs are equal to the bit."""
    problem = seeded(shape, torch.bfloat16, causal, window, with_values)

    def run(poisoned):
        if poisoned:
            junk = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(16)]
            del junk
        route = partial(gaussian_attention, causal=causal, window=window, impl="triton")
        return testing.run(route, problem).named()

    first = run(poisoned=False)
    assert all(torch.isfinite(t).all() for t in first.values())
    for _ in range(20):
        again = run(poisoned=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape,causal,window", [(DEIT, False, None), ((4, 700, 2, 128), True, 300)])
def test_padding_that_is_nan(shape, causal, window, dtype, with_values):
    """At most twice flash attention's own error on whole rows."""
    problem = seeded(shape, dtype, causal, window, with_values)
    lengths = torch.tensor([shape[1], 100, 1, 0], device="cuda")
    hidden = (torch.arange(shape[1], device="cuda") >= lengths[:, None])[:, :, None, None]
    options, results = dict(causal=causal, window=window, lengths=lengths), []
    for impl, filler, each in (("triton", math.nan, problem), ("reference", 0.0, problem.double())):
        filled = each.map(lambda t, filler=filler: t.masked_fill(hidden, filler) if t.dim() == 4 else t)
        results.append(testing.run(partial(gaussian_attention, impl=impl, **options), filled))
    limits = flash_errors(problem.x, problem.grad_y, causal)
    for name, like in (("y", "y"), ("dx", "dx"), ("dvalues", "dx")):
        got, want = (getattr(result, name) for result in results)
        if got is not None:
            assert testing.error(got, want) <= 2 * limits[like] and not got.masked_select(hidden).any(), name


DOCUMENTS = [300, 0, 1, 7, 63, 130, 700, 199]


@pytest.mark.parametrize("with_values", [False, True], ids=["own", "values"])
@pytest.mark.parametrize("head_dim,causal,window", [(64, False, None), (128, True, None), (128, True, 50)])
def test_packed_documents(head_dim, causal, window, with_values):
    """At most twice flash attention's own error on one sequence; NaN stays in its document; nothing waits for the
    GPU.
    """
    length = sum(DOCUMENTS)
    problem = seeded((1, length, 2, head_dim), torch.bfloat16, causal, window, with_values)
    starts = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32, device="cuda")
    options, damaged = dict(causal=causal, window=window, cu_seqlens=starts), problem.map(torch.Tensor.clone)
    damaged.x[:, -199:] = math.nan
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, other = (testing.run(partial(gaussian_attention, impl="triton", **options), p) for p in (problem, damaged))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = testing.run(partial(gaussian_attention, impl="reference", **options), problem.double())
    limits = flash_errors(problem.x, problem.grad_y, causal)
    for name, like in (("y", "y"), ("dx", "dx"), ("dvalues", "dx")):
        if (value := getattr(got, name)) is not None:
            assert testing.error(value, getattr(want, name)) <= 2 * limits[like], name
            assert torch.equal(value[:, :-199], getattr(other, name)[:, :-199]), name
    assert other.y[:, -199:].isnan().all()


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("constant_norm", [False, True])
def test_decoding_from_a_long_cache(batch, constant_norm):
    kind = "unit_norm" if constant_norm else "normal"
    x, cache = (testing.make_features(kind, (batch, n, 10, 128), torch.bfloat16, n).cuda() for n in (1, 3000))
    log_sigma = torch.full((10,), 1.7, device="cuda")
    got = gaussian_attention(x, log_sigma, keys=cache, causal=True, constant_norm=constant_norm, impl="triton")
    want = gaussian_attention(x.double(), log_sigma.double(), keys=cache.double(), causal=True, impl="reference")
    floor = torch.finfo(torch.bfloat16).eps * (1 + constant_norm * 128 / math.exp(3.4))
    assert testing.error(got, want) <= floor


def test_compiles_to_cuda_graphs():
    """mode="max-autotune", as benchmarks and trainers use it: the gradients of uncompiled code, in replays."""
    layer = GaussianKernelAttention(128, 2, impl="triton").cuda().bfloat16()
    compiled = torch.compile(layer, mode="max-autotune", fullgraph=True)
    for seed in range(5):
        x = testing.make_features("normal", (4, 197, 1, 128), torch.bfloat16, seed).flatten(2).cuda().requires_grad_()
        want = torch.autograd.grad(layer(x).float().square().mean(), (x, layer.log_sigma))
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(compiled(x).float().square().mean(), (x, layer.log_sigma))
        for a, b in zip(got, want, strict=True):
            assert testing.error(a, b.double()) <= 4 * torch.finfo(torch.bfloat16).eps


def test_documents_do_not_recompile():
    """Other lengths of as many tokens, and other numbers of documents, cost no compilation."""
    x, log_sigma = torch.randn(1, 600, 2, 64, device="cuda").bfloat16().requires_grad_(), torch.zeros(2, device="cuda")

    def run(*lengths):
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        start = time.perf_counter()
        for window in (None, 40):
            gaussian_attention(x, log_sigma, causal=window is None, window=window, cu_seqlens=starts).sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    run(300, 300)
    assert max(run(599, 1), run(0, 600), run(*[1] * 600), run(16, 32, 552)) < 0.2


def test_lengths_do_not_recompile():
    """A new length, window or batch costs no compilation beyond those of its divisibility and tail."""
    log_sigma = torch.zeros(2, device="cuda")

    def run(length, window):
        x = testing.make_features("normal", (1, length, 2, 64), torch.bfloat16).cuda().requires_grad_()
        start = time.perf_counter()
        gaussian_attention(x, log_sigma, causal=True, window=window, impl="triton").sum().backward()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for length in (301, 304, 320, 336, 352, 317):
        run(length, 40)
    assert max(run(length, window) for length, window in ((511, 33), (513, 41), (640, 77), (800, 48))) < 0.2
