"""The attention operators under test: shapes, inputs, every candidate as a plain function, and the gate each must pass.

Layout (B, T, H, D) for all; where a library wants another, the transposed views are part of what is timed.
Legend: B batch, T tokens, H heads, D head_dim.
"""

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka import dot_product_attention, gaussian_attention, select_impl, testing
from gka.api import EPS
from gka.masking import Mask

FORWARD, FULL = "forward", "forward+backward"
GATE_TOKENS = {"cuda": 2048, "cpu": 512}  # float64 builds T x T matrices
# Above 1 and no power of two, or x / sigma^2 would be exact.
SIGMA_FACTOR = 1.3

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A shape to time. `queries` 1 is decoding: one query for each sequence against a cache of `tokens`."""

    name: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None  # earlier tokens a query sees beside itself, as in gaussian_attention
    constant_norm: bool = False  # heads are RMS-normalised, as in nanochat
    queries: int = 0  # 0: every token is a query

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.tokens, self.heads, self.head_dim

    @property
    def mask(self) -> Mask:
        return Mask(self.causal, self.window)

    def settings(self) -> dict:
        """What the result file says about the shape."""
        return {
            "batch": self.batch,
            "tokens": self.tokens,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "causal": self.causal,
            "window": self.window,
            "constant_norm": self.constant_norm,
            "queries": self.queries or self.tokens,
        }

    @classmethod
    def parse(cls, text: str) -> "Case":
        """A shape as the command line gives it: BxTxHxD, then c, wN, n or d. Raises ValueError for anything else.

        c: causal. wN: window N. n: RMS-normalised heads. d: decode.
        """
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(c?)(?:w(\d+))?(n?)(d?)", text)
        if not match or 0 in (sizes := [int(match[i]) for i in range(1, 5)]):
            raise ValueError(f"expected BxTxHxD such as 16x2048x10x128, then c, wN, n or d, got {text!r}")
        causal, window, normalised, decode = match.groups()[4:]
        window = int(window) if window else None
        return cls(text, *sizes, bool(causal), window, bool(normalised), queries=1 if decode else 0)


@dataclass(frozen=True)
class Operator:
    """A candidate. gka operators take (x, log_sigma) or, decoding, (x, log_sigma, cache); softmax ones (q, k, v)."""

    role: str  # see runs/bench/results.py
    family: str  # gka or softmax
    function: Callable[..., torch.Tensor]
    constant_norm: bool = False


def log_sigma(case: Case, device) -> torch.Tensor:
    """sigma^2 about where the models start: sqrt(D) for general features, D for normalised heads."""
    sigma_squared = case.head_dim if case.constant_norm else math.sqrt(case.head_dim)
    return torch.full((case.heads,), 0.5 * math.log(SIGMA_FACTOR * sigma_squared), device=device)


def inputs(case: Case, family: str, device, dtype, seed: int) -> Tensors:
    """Fresh random inputs of a family."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(tokens: int) -> torch.Tensor:
        return torch.randn(case.batch, tokens, case.heads, case.head_dim, generator=generator, device=device).to(dtype)

    queries = draw(case.queries or case.tokens)
    if family == "softmax":
        return queries, draw(case.tokens), draw(case.tokens)
    return (queries, log_sigma(case, device)) + ((draw(case.tokens),) if case.queries else ())


def front(case: Case) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What the features of a gka operator pass first: the RMS norm of each head, where the case has one."""
    return partial(F.rms_norm, normalized_shape=(case.head_dim,)) if case.constant_norm else None


def normalise(case: Case, tensors: Tensors) -> Tensors:
    """The arguments of a gka operator, its features through `front`."""
    norm = front(case)
    return tensors if norm is None else tuple(norm(t) if t.dim() == 4 else t for t in tensors)


def softmax_definition(q, k, v, mask: Mask):
    """softmax(q.k / sqrt(D)) v with T x T matrices, in the inputs' dtype: float64 makes it the oracle of the
    baselines.
    """
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask.dense(q.shape[1], k.shape[1], q.device), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def operators(case: Case, device: torch.device, dtype: torch.dtype, phase: str) -> dict[str, Operator]:
    """Every candidate for the case on this device, ours first. One that cannot serve says so when it is called."""
    cuda, masked = device.type == "cuda", case.mask != Mask()
    tensors = (t.requires_grad_(phase == FULL) for t in inputs(replace(case, batch=1), "gka", device, dtype, 0))
    x, sigma, *cache = tensors
    options = dict(causal=case.causal, window=case.window, constant_norm=case.constant_norm)
    auto = select_impl(x, log_sigma=sigma, keys=cache[0] if cache else None, **options)
    candidates = {}
    for impl in dict.fromkeys((auto, "triton", "flex" if cuda else "cpu", "sdpa")):
        for constant_norm in dict.fromkeys((case.constant_norm, False)):
            name = f"gka {impl}" + (", general norms" if case.constant_norm and not constant_norm else "")
            role = "ours" if impl == auto and constant_norm == case.constant_norm else "variant"
            candidates[name] = Operator(role, "gka", _gaussian(case, impl, constant_norm), constant_norm)
    visible = case.mask.dense(case.queries or case.tokens, case.tokens, device).to(dtype) if masked else None

    def eager(x, log_sigma, cache=None):
        return testing.plain_attention(x, log_sigma, keys=cache, visible=visible)

    candidates["gka eager"] = Operator("eager", "gka", eager)
    if not cuda:
        return candidates | {"softmax sdpa": Operator("baseline", "softmax", _sdpa(case, None))}

    def flex(q, k, v):
        return dot_product_attention(q, k, v, causal=case.causal, window=case.window, impl="flex")

    # Flash has no windows in torch: there everything that is right and windowed counts.
    fallback = "baseline" if case.window is not None else "other"
    return candidates | {
        "softmax flash": Operator("baseline", "softmax", _sdpa(case, SDPBackend.FLASH_ATTENTION)),
        "softmax cudnn": Operator("baseline", "softmax", _sdpa(case, SDPBackend.CUDNN_ATTENTION)),
        "softmax efficient": Operator(fallback, "softmax", _sdpa(case, SDPBackend.EFFICIENT_ATTENTION)),
        "softmax flex": Operator(fallback, "softmax", flex),
        "softmax fa3": Operator("baseline", "softmax", _flash_attention_3(case)),
    }


def _gaussian(case: Case, impl: str, constant_norm: bool):
    options = dict(causal=case.causal, window=case.window, constant_norm=constant_norm, impl=impl)

    def attend(x, log_sigma, cache=None):
        return gaussian_attention(x, log_sigma, keys=cache, **options)

    return attend


def _sdpa(case: Case, backend: SDPBackend | None):
    """torch's softmax attention held to one kernel; None leaves the choice to torch.

    A dense mask only where the kernel has no other way.
    """
    dense: dict[torch.device, torch.Tensor] = {}

    def attend(q, k, v):
        mask = None
        if case.window is not None:
            mask = dense.get(q.device)
            if mask is None or mask.shape != (q.shape[1], k.shape[1]):
                mask = dense[q.device] = case.mask.dense(q.shape[1], k.shape[1], q.device)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=case.causal and mask is None).transpose(1, 2)

    return attend


def _flash_attention_3(case: Case):
    def attend(q, k, v):
        try:
            from flash_attn_interface import flash_attn_func
        except ImportError:
            raise RuntimeError("flash_attn_interface is not installed") from None
        window = (-1, -1) if case.window is None else (case.window, 0 if case.causal else case.window)
        y = flash_attn_func(q, k, v, causal=case.causal, window_size=window)
        return y[0] if isinstance(y, tuple) else y

    return attend


def gate(operator: Operator, case: Case, phase: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the operator is wrong on fresh inputs of this kind, or None.

    It works on the whole batch, but only the first and last sequence are judged and get a gradient: float64 needs no
    others. The gradient of normalised heads is taken before their norm, where dropping it is exact. More than
    GATE_TOKENS tokens are judged on that many.
    """
    case = replace(case, tokens=min(case.tokens, GATE_TOKENS[device.type]))
    tensors = inputs(case, operator.family, device, dtype, seed=1)
    judged = torch.tensor(sorted({0, case.batch - 1}), device=device)
    few = tuple(t[judged] if t.dim() == 4 else t for t in tensors)
    grad_y = inputs(case, "gka", device, dtype, seed=2)[0][judged] if phase == FULL else None
    whole = normalise(case, tensors) if operator.family == "gka" else tensors

    def function(*parts: torch.Tensor) -> torch.Tensor:
        """The operator on the whole batch, into which the judged sequences are put."""
        batch = (t.index_copy(0, judged, part) if t.dim() == 4 else part for t, part in zip(whole, parts, strict=True))
        return operator.function(*batch)[judged]

    if operator.family == "softmax":
        return _softmax_disagreement(function, few, grad_y, case.mask)

    def route(x, log_sigma, *, keys, values):
        return function(x, log_sigma) if keys is None else function(x, log_sigma, keys)

    # Some implementations drop eps, and so does the oracle.
    x, sigma, *cache = few
    keys = cache[0] if cache else None
    problem = testing.Problem(x, sigma, grad_y=grad_y, keys=keys, mask=case.mask, front=front(case))
    return testing.judge(route, problem, slack=EPS)


def _softmax_disagreement(function, tensors: Tensors, grad_y: torch.Tensor | None, mask: Mask) -> str | None:
    """`testing.judge` for the baselines, with `softmax_definition` as oracle and as plain PyTorch."""
    names = ("dq", "dk", "dv")

    def results(function, tensors: Tensors, grad_y: torch.Tensor | None) -> dict[str, torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_(grad_y is not None) for t in tensors]
        y = function(*leaves)
        if grad_y is None:
            return {"y": y}
        return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, leaves, grad_y.to(y.dtype)), strict=True))}

    definition = partial(softmax_definition, mask=mask)
    want = results(definition, tuple(t.double() for t in tensors), grad_y)
    dtype, head_dim = tensors[0].dtype, tensors[0].shape[-1]
    floor = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 1 + head_dim**0.5)  # scores reach about sqrt(D)
    floors = {"y": floor, **dict.fromkeys(names, 3 * floor)}
    return testing.disagreement(results(function, tensors, grad_y), want, results(definition, tensors, grad_y), floors)
