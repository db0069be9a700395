"""Inputs for tests of the operator, and its implementations held to the error budget on them."""

import contextlib
import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.bandwidth import inverse_variance
from gka.dispatch import IMPLEMENTATIONS
from gka.impl import reference, sdpa
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


def half_kept():
    """A context in which sdpa computes general norms in half precision on CPUs, as it does on CUDA."""
    return mock.patch.object(sdpa, "KEEPS_HALF", {"cpu"})


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


def foreign(num_queries, num_keys, head_dim, mask, with_values, dtype=torch.float32, kind="normal") -> Problem:
    """A problem of two sequences and two heads whose keys are not its queries."""
    problem = Problem.seeded(kind, (2, num_keys, 2, head_dim), dtype, with_values=with_values, mask=mask)
    return of_other_queries(problem, num_queries, kind)


def of_other_queries(problem: Problem, num_queries: int, kind="normal") -> Problem:
    """The problem whose keys are the features of this one."""
    batch, _, *heads = problem.x.shape
    shape, dtype = (batch, num_queries, *heads), problem.x.dtype
    x, grad_y = testing.make_features(kind, shape, dtype, 3), testing.make_features("normal", shape, dtype, 4)
    return replace(problem, x=x, keys=problem.x, grad_y=grad_y)


# Models with the layer


def filled(model):
    """The model, with parameters that are zeros at first filled, so that they matter."""
    for name, parameter in model.named_parameters():
        if "log_scale" in name or "head_gate" in name:
            nn.init.normal_(parameter, std=0.5 if "log_scale" in name else 5.0)
    return model


# Calls that are several attentions, such as a padded batch or packed documents

FORMS = {  # whether keys are not the queries, whether values are not the keys
    "own": (False, False),
    "values": (False, True),
    "other keys": (True, False),
    "other keys and values": (True, True),
}


def problem_of(form, shape, impl, dtype=torch.float32, mask=testing.FULL, num_queries=None) -> Problem:
    """A problem of one of FORMS, with the eps that `impl` applies. num_queries: beside other keys; None: as many."""
    other_keys, with_values = FORMS[form]
    eps = EPS if IMPLEMENTATIONS[impl].SERVES.applies_eps and not other_keys else 0.0
    problem = Problem.seeded("normal", shape, dtype, with_values=with_values, mask=mask, eps=eps)
    if dtype == torch.float64:
        problem = replace(problem, log_sigma=problem.log_sigma.double())
    return of_other_queries(problem, num_queries or shape[1]) if other_keys else problem


def boundaries(lengths) -> torch.Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def parts_of(lengths) -> list:
    """Documents that have tokens, as `check_parts` takes them."""
    places = [slice(begin, end) for begin, end in itertools.pairwise(boundaries(lengths).tolist()) if end > begin]
    return [(0, tokens, tokens) for tokens in places]


def gradients(problem, impl, **options):
    """y and the gradients of every tensor of a problem under `gaussian_attention`, or y alone where it has none: flex
    on CPUs, triton of foreign keys of any norm (those of one norm: test_triton_accuracy.py).
    """
    if impl == "flex" or (impl == "triton" and problem.keys is not None):
        problem = replace(problem, grad_y=None)
    with tiles(32, 32):  # so that some rows end before others begin a tile
        return testing.run(partial(gaussian_attention, impl=impl, **options), problem).named()


def check_parts(problem, parts, got):
    """`got`, of a call of `problem`, is what the oracle gives for each part alone, and 0 elsewhere; what the floors of
    parts allow adds up. parts: (row of the batch, its queries, its keys), by index.
    """
    slack = EPS if problem.x.dtype.itemsize == 2 else 0.0
    want, by_plain = ({name: torch.zeros_like(t, dtype=torch.float64) for name, t in got.items()} for _ in range(2))
    squares, sums = dict.fromkeys(got, 0.0), dict.fromkeys(got, 0.0)
    for row, queries, keys in parts:
        places = dict(
            x=queries, grad_y=queries, y=queries, dx=queries, keys=keys, values=keys, dkeys=keys, dvalues=keys
        )
        tensors = {name: t for name in places if (t := getattr(problem, name, None)) is not None}
        alone = replace(problem, **{name: t[row : row + 1, places[name]] for name, t in tensors.items()})
        floors, difference = testing.coarse_floors(alone, slack=slack), _cancelled(alone)
        results = testing.oracle(alone).named(), testing.plain(alone).named()
        for name in got:  # y alone, where an implementation has no gradients here
            for to, result in zip((want, by_plain), results):
                if name == "dlog_sigma":
                    to[name] += result[name]
                else:
                    to[name][row, places[name]] = result[name][0].double()
            off = floors[name] * results[0][name].norm().item() + difference.get(name, 0.0)
            squares[name], sums[name] = squares[name] + off**2, sums[name] + off
    limits = {name: sums[name] if name == "dlog_sigma" else squares[name] ** 0.5 for name in got}
    limits = {name: limit if want[name].any() else max(limit, testing.ZERO) for name, limit in limits.items()}
    reason = testing.disagreement(got, want, by_plain, limits, absolute=True)
    assert reason is None, reason


STRIDES = {
    "as they come": lambda t: t,
    "heads before tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "tokens before rows": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels before tokens": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    # Among numbers that are not to be read:
    "a part of wider channels": lambda t: torch.cat([t, torch.full_like(t, torch.nan)], -1)[..., : t.shape[-1]],
    "channels apart": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0],
    "every second token": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], 2).flatten(1, 2)[:, ::2],
}


def _cancelled(problem):
    """What rounding leaves of g_i.v_j - g_i.y_i where the two are equal, as for a query that sees one key: norms."""
    exact = problem.double().request()
    y, weights = reference.output_and_weights(exact)
    keys, values, g = exact.key_features, exact.value_features, problem.grad_y.double()
    apart = torch.cdist(exact.x.transpose(1, 2), keys.transpose(1, 2))
    norm_g, norm_v, norm_y = (t.norm(dim=-1).mT for t in (g, values, y))  # (B, H, T)
    off_g = weights * norm_g[..., None] * (norm_v[:, :, None] + norm_y[..., None])
    pulls = off_g * apart * inverse_variance(exact.log_sigma)[:, None, None]
    terms = {"dx": pulls.sum(-1), "dkeys": pulls.sum(-2), "dlog_sigma": (pulls * apart).sum((0, 2, 3))}
    eps = torch.finfo(torch.promote_types(problem.x.dtype, torch.float32)).eps
    return {name: eps * t.norm().item() for name, t in terms.items()}


# Triton's kernels

KERNELS = ("forward", "decode", "symmetric", "triangular", "queries", "keys")


def features(kind: str, shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return testing.make_features(kind, shape, dtype, seed).to(DEVICE)


def tiles(rows: int, columns: int):
    """A context in which every kernel has these tiles, whatever the table says."""
    sizes = itertools.product(KERNELS, (32, 64, 128), (2, 4))
    entries = {(kernel, *size): Config(16 if kernel == "decode" else rows, columns, 4, 2) for kernel, *size in sizes}
    return override(generation(torch.device(DEVICE)), entries=entries)
