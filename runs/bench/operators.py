"""The attention operators under test: shapes, inputs, every candidate as a plain function, and the gate each must pass.

Layout (B, T, H, D) for all; where a library wants another, the transposed views are part of what is timed.
Legend: B batch, T tokens, H heads, D head_dim.
"""

import contextlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka import dot_product_attention, gaussian_attention, inverse_variance, select_impl, testing
from gka.api import EPS
from gka.masking import Mask
from runs.bench.gate import disagreement

FORWARD, FULL = "forward", "forward+backward"
GATE_TOKENS = {"cuda": 2048, "cpu": 512}  # float64 builds T x T matrices
LAXEST = 0.1  # in bfloat16 the worst case of log_sigma's gradient, which cancels, would let anything pass
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
        return {"batch": self.batch, "tokens": self.tokens, "heads": self.heads, "head_dim": self.head_dim, "causal": self.causal,
                "window": self.window, "constant_norm": self.constant_norm, "queries": self.queries or self.tokens}  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> "Case":
        """A shape as the command line gives it: BxTxHxD, then c (causal), wN (window N), n (RMS-normalised heads), d (decode). Raises ValueError."""
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(c?)(?:w(\d+))?(n?)(d?)", text)
        if not found or 0 in (sizes := [int(found[i]) for i in range(1, 5)]):
            raise ValueError(f"expected BxTxHxD such as 16x2048x10x128, then c, wN, n or d, got {text!r}")
        causal, window, normalised, decode = found.groups()[4:]
        return cls(
            text, *sizes, bool(causal), int(window) if window else None, bool(normalised), queries=int(bool(decode))
        )


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


def normalise(case: Case, tensors: Tensors) -> Tensors:
    """The features of a gka operator through the RMS norm in front of it, where the case has one."""
    if not case.constant_norm:
        return tensors
    x, sigma, *cache = tensors
    return (F.rms_norm(x, x.shape[-1:]), sigma, *(F.rms_norm(t, t.shape[-1:]) for t in cache))


def eager_gaussian(x, log_sigma, keys=None, *, visible=None, eps: float = EPS):
    """The paper's operator as one would write it, T x T matrices and all: the formula of gka.testing.plain, with foreign keys too.

    visible: (Tq, Tk), 1 where a query may look, in x's dtype; None hides nothing.
    """
    q = x.transpose(1, 2)
    k = q if keys is None else keys.transpose(1, 2)
    distance2 = q.square().sum(-1, keepdim=True) + k.square().sum(-1, keepdim=True).mT - 2 * q @ k.mT
    affinity = torch.exp(-0.5 * distance2 * inverse_variance(log_sigma).to(x.dtype)[:, None, None])
    affinity = affinity if visible is None else affinity * visible
    weights = affinity / (affinity.sum(-1, keepdim=True) + eps)
    return (weights @ k).transpose(1, 2)


def softmax_definition(q, k, v, mask: Mask):
    """softmax(q.k / sqrt(D)) v with T x T matrices, in the inputs' dtype: float64 makes it the oracle of the baselines."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask.dense(q.shape[1], k.shape[1], q.device), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def operators(case: Case, device: torch.device, dtype: torch.dtype, phase: str) -> dict[str, Operator]:
    """Every candidate for the case on this device, ours first. One that cannot serve says so when it is called."""
    cuda, masked = device.type == "cuda", case.mask != Mask()
    x, sigma, *cache = (
        t.requires_grad_(phase == FULL) for t in inputs(replace(case, batch=1), "gka", device, dtype, 0)
    )
    auto = select_impl(
        x,
        log_sigma=sigma,
        keys=cache[0] if cache else None,
        causal=case.causal,
        window=case.window,
        constant_norm=case.constant_norm,
    )
    found = {}
    for impl in dict.fromkeys((auto, "triton", *(("flex",) if cuda else ()), "sdpa")):
        for constant_norm in dict.fromkeys((case.constant_norm, False)):
            name = f"gka {impl}" + (", general norms" if case.constant_norm and not constant_norm else "")
            role = "ours" if impl == auto and constant_norm == case.constant_norm else "variant"
            found[name] = Operator(role, "gka", _gaussian(case, impl, constant_norm), constant_norm)
    visible = case.mask.dense(case.queries or case.tokens, case.tokens, device).to(dtype) if masked else None
    found["gka eager"] = Operator("eager", "gka", lambda *tensors: eager_gaussian(*tensors, visible=visible))
    if not cuda:
        return found | {"softmax sdpa": Operator("baseline", "softmax", _sdpa(case, None))}

    def flex(q, k, v):
        return dot_product_attention(q, k, v, causal=case.causal, window=case.window, impl="flex")

    # Flash has no windows in torch: there everything that is right and windowed counts.
    fallback = "baseline" if case.window is not None else "other"
    return found | {
        "softmax flash": Operator("baseline", "softmax", _sdpa(case, SDPBackend.FLASH_ATTENTION)),
        "softmax cudnn": Operator("baseline", "softmax", _sdpa(case, SDPBackend.CUDNN_ATTENTION)),
        "softmax efficient": Operator(fallback, "softmax", _sdpa(case, SDPBackend.EFFICIENT_ATTENTION)),
        "softmax flex": Operator(fallback, "softmax", flex),
        "softmax fa3": Operator("baseline", "softmax", _flash_attention_3(case)),
    }


def _gaussian(case: Case, impl: str, constant_norm: bool):
    def attend(x, log_sigma, cache=None):
        return gaussian_attention(
            x, log_sigma, keys=cache, causal=case.causal, window=case.window, constant_norm=constant_norm, impl=impl
        )

    return attend


def _sdpa(case: Case, backend: SDPBackend | None):
    """torch's softmax attention held to one kernel; None leaves the choice to torch. A dense mask only where the kernel has no other way."""
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


def results(function, tensors: Tensors, grad_y: torch.Tensor | None, names: Tensors) -> dict[str, torch.Tensor]:
    """y and, with grad_y, the gradients, by name."""
    leaves = [t.detach().clone().requires_grad_(grad_y is not None) for t in tensors]
    y = function(*leaves)
    if grad_y is None:
        return {"y": y}
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, leaves, grad_y.to(y.dtype))))}


def gate(operator: Operator, case: Case, phase: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the operator is wrong on fresh inputs of this kind, or None.

    It works on the whole batch, but only the first and last sequence get a gradient: so they alone decide every gradient, log_sigma's too, and
    float64 need see no others. The gradient of normalised heads is taken before their norm, where dropping it is exact. More than GATE_TOKENS
    tokens are judged on that many.
    """
    case = replace(case, tokens=min(case.tokens, GATE_TOKENS[device.type]))
    tensors = inputs(case, operator.family, device, dtype, seed=1)
    names = ("dx", "dlog_sigma") if operator.family == "gka" else ("dq", "dk", "dv")
    picked = sorted({0, case.batch - 1})
    grad_y = None
    if phase == FULL:
        grad_y = torch.zeros_like(tensors[0])
        grad_y[picked] = inputs(case, "gka", device, dtype, seed=2)[0][picked]

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[picked] if tensor.dim() == 4 else tensor

    few = tuple(pick(t) for t in tensors)
    few_grad_y = None if grad_y is None else pick(grad_y)
    precise = tuple(t.double() for t in few), None if few_grad_y is None else few_grad_y.double()
    if operator.family == "gka":
        visible = case.mask.dense(tensors[0].shape[1], case.tokens, device).to(dtype)

        def function(*t):
            return operator.function(*normalise(case, t))

        def plain(*t):
            return eager_gaussian(*normalise(case, t), visible=visible, eps=0.0)

        def oracle(x, log_sigma, cache=None):
            return gaussian_attention(
                x, log_sigma, keys=cache, causal=case.causal, window=case.window, eps=0.0, impl="reference"
            )

        want = results(lambda *t: oracle(*normalise(case, t)), *precise, names)
        floors = _gaussian_floors(case, few, few_grad_y)
    else:
        function = operator.function

        def plain(q, k, v):
            return softmax_definition(q, k, v, case.mask)

        want = results(plain, *precise, names)
        floor = _rounding(dtype) * (1 if dtype.itemsize == 2 else 1 + case.head_dim**0.5)  # scores reach about sqrt(D)
        floors = {"y": floor, **dict.fromkeys(names, 3 * floor)}
    got = {name: pick(value) for name, value in results(function, tensors, grad_y, names).items()}
    return disagreement(got, want, results(plain, few, few_grad_y, names), floors)


def _gaussian_floors(case: Case, tensors: Tensors, grad_y: torch.Tensor | None) -> dict[str, float]:
    """The rounding floors of the tests (tests/gka/test_numerics.py), half-precision paths keeping the exponent in float32, and what eps is worth:
    some implementations drop it, and the oracle does."""
    x, sigma, *_ = normalise(case, tensors)
    half = x.dtype.itemsize == 2
    floor = EPS + (_rounding(x.dtype) if half else testing.exponent_ulp(x, sigma))
    floors = {"y": floor, "dx": 3 * floor}  # x enters as query, as key and as norm
    if grad_y is not None:
        floors["dlog_sigma"] = min(LAXEST, floor * testing.log_sigma_condition(x, sigma, None, grad_y, case.mask))
    return floors


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
