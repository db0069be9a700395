"""Inputs for tests of the operator, and its implementations held to the error budget on them."""

import contextlib
import itertools
from functools import partial

import pytest
import torch

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.dispatch import IMPLEMENTATIONS
from gka.impl.cpu import build
from gka.impl.triton.configs import Config, generation, override
from gka.masking import Mask
from gka.testing import Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUTO_ON_CPU = "sdpa" if build.obstacle() else "cpu"  # for float32
CPU = pytest.param("cpu", marks=pytest.mark.skipif(AUTO_ON_CPU != "cpu", reason=str(build.obstacle())))
TRITON = pytest.param("triton", marks=pytest.mark.skipif(DEVICE == "cuda", reason="CPU tensors need its interpreter"))
IMPLS = [{"cpu": CPU, "triton": TRITON}.get(name, name) for name in IMPLEMENTATIONS]  # on CPU tensors
FUSED = {
    device: [CPU if name == "cpu" else name for name, one in IMPLEMENTATIONS.items() if device in one.SERVES.fused_on]
    for device in ("cpu", "cuda")
}
PRODUCTS = {"AMX": 2, "AVX512-BF16": 1}  # what multiplies bfloat16 on CPUs: what gka_ready_bfloat16 answers
NO_PRODUCTS = f"neither {' nor '.join(PRODUCTS)} on this machine"
MASKS = [(False, None), (True, None), (True, 20), (False, 9), (True, 500)]  # causal, window


@contextlib.contextmanager
def multiplied_by(name: str):
    """Products of bfloat16 by that one of PRODUCTS; the test is skipped on a machine that has not got it."""
    ready = build.library().gka_ready_bfloat16
    try:
        if ready(int(name == "AMX")) != PRODUCTS[name]:
            pytest.skip(f"no {name} on this machine")
        yield
    finally:
        ready(1)


def check(
    impl, shape, dtype=torch.float32, kind="normal", causal=False, window=None, with_values=False, constant_norm=False,
    eps=EPS, device=DEVICE
):  # fmt: skip
    """y and all gradients of an implementation are within the budget, with the eps that it applies."""
    kind, applied = "unit_norm" if constant_norm else kind, eps if IMPLEMENTATIONS[impl].SERVES.applies_eps else 0.0
    fields = dict(with_values=with_values, device=device, mask=Mask(causal, window), eps=applied)
    options = dict(causal=causal, window=window, constant_norm=constant_norm, eps=eps, impl=impl)
    problem = Problem.seeded(kind, shape, dtype, **fields)
    testing.check(partial(gaussian_attention, **options), problem, constant_norm=constant_norm)


def foreign(
    num_queries, num_keys, head_dim, mask, with_values, with_gradients=True, dtype=torch.float32, kind="normal"
):
    """A problem of two sequences and two heads whose keys are not its queries."""

    def draw(tokens: int, seed: int, kind: str = "normal") -> torch.Tensor:
        return testing.make_features(kind, (2, tokens, 2, head_dim), dtype, seed)

    tensors = dict(keys=draw(num_keys, 3, kind), values=draw(num_keys, 1) if with_values else None)
    grad_y = draw(num_queries, 2) if with_gradients else None
    log_sigma = testing.make_log_sigma(2, head_dim)
    return Problem(draw(num_queries, 0, kind), log_sigma, mask=mask, grad_y=grad_y, **tensors)


# Triton's kernels

KERNELS = ("forward", "decode", "symmetric", "triangular", "queries", "keys")


def features(kind: str, shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return testing.make_features(kind, shape, dtype, seed).to(DEVICE)


def tiles(rows: int, columns: int):
    """A context in which every kernel has these tiles, whatever the table says."""
    sizes = itertools.product(KERNELS, (32, 64, 128), (2, 4))
    entries = {(kernel, *size): Config(16 if kernel == "decode" else rows, columns, 4, 2) for kernel, *size in sizes}
    return override(generation(torch.device(DEVICE)), entries=entries)
