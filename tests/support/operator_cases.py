"""Inputs for tests of the operator, and its implementations held to the error budget on them."""

import itertools
import math
from functools import partial

import torch

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.impl.triton.configs import Config, generation, override
from gka.masking import Mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS = [(False, None), (True, None), (True, 20), (False, 9), (True, 500)]  # causal, window


def sigmas(heads: int, dim: int, device: str = "cpu") -> torch.Tensor:
    """log_sigma for sigma^2 from sqrt(D) to D, never a power of two."""
    return 0.5 * torch.log(torch.linspace(1.3 * math.sqrt(dim), 1.3 * dim, heads)).to(device)


def problem(shape, dtype, kind, with_values=False, device="cpu"):
    """(x, log_sigma, values or None, grad_y)."""
    x = testing.make_features(kind, shape, dtype).to(device)
    values = testing.make_features("normal", shape, dtype, 1).to(device) if with_values else None
    grad_y = testing.make_features("normal", shape, dtype, 2).to(device)
    return x, sigmas(shape[2], shape[3], device), values, grad_y


def check(
    impl,
    shape,
    dtype=torch.float32,
    kind="normal",
    causal=False,
    window=None,
    with_values=False,
    constant_norm=False,
    eps=EPS,
    device=DEVICE,
):
    """y and all gradients of an implementation are within the budget; sdpa and flex are the kernel with eps = 0."""
    arguments = problem(shape, dtype, "unit_norm" if constant_norm else kind, with_values, device)
    options = dict(causal=causal, window=window, constant_norm=constant_norm, eps=eps, impl=impl)
    applied = eps if impl == "triton" else 0.0
    route, mask = partial(gaussian_attention, **options), Mask(causal, window)
    testing.check(route, *arguments, mask, eps=applied, constant_norm=constant_norm)


# Triton's kernels

KERNELS = ("forward", "decode", "symmetric", "queries", "keys")


def features(kind: str, shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return testing.make_features(kind, shape, dtype, seed).to(DEVICE)


def tiles(rows: int, columns: int):
    """A context in which every kernel has these tiles, whatever the table says."""
    sizes = itertools.product(KERNELS, (32, 64, 128), (2, 4))
    entries = {(kernel, *size): Config(16 if kernel == "decode" else rows, columns, 4, 2) for kernel, *size in sizes}
    return override(generation(torch.device(DEVICE)), entries=entries)
