"""The attention operators under test: shapes, inputs, every candidate as a plain function, and the gate each must pass.

Layout (B, T, H, D) for all; where a library wants another, the transposed views are part of what is timed.
Legend: B batch, T tokens, H heads, D head_dim.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from gka import decode_attention, dot_product_attention, gaussian_attention, select_impl, testing
from gka.dispatch import IMPLEMENTATIONS
from gka.masking import Mask
from gka.options import EPS
from nanochat_gka.model.blocks import Rotary
from runs.bench import baselines

FORWARD, FULL = "forward", "forward+backward"
GATE_TOKENS = {"cuda": 2048, "cpu": 512}  # float64 builds T x T matrices
# Above 1 and no power of two, or x / sigma^2 would be exact.
SIGMA_FACTOR = 1.3

Tensors = tuple[torch.Tensor, ...]
Candidates = dict[str, tuple[str, Callable[..., torch.Tensor]]]  # name -> role, and a route or a softmax attention


@dataclass(frozen=True)
class Case:
    """A shape to time. `queries` 1 is decoding: one query for each sequence against a cache of `tokens`.

    derived: the cache holds values before rotation, and the keys are their rotation and norm (our form of GKA; the
    default's keys are its values). The softmax side has keys and values in both.
    """

    name: str
    batch: int
    tokens: int
    heads: int
    head_dim: int
    causal: bool = False
    window: int | None = None  # earlier tokens a query sees beside itself, as in gaussian_attention
    constant_norm: bool = False  # heads are RMS-normalised, as in nanochat
    queries: int = 0  # 0: every token is a query
    derived: bool = False
    shortest: int | None = None  # sequences of `shortest` to `tokens` tokens, padded on the right; None: no lengths
    apart: str = ""  # tensors beside the features: v, values (value embeddings); vk, keys too (head offsets)

    @property
    def phases(self) -> tuple[str, ...]:
        return (FORWARD,) if self.queries else (FORWARD, FULL)

    @property
    def mask(self) -> Mask:
        return Mask(self.causal, self.window)

    @property
    def norm(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The RMS norm of each head, which the features of a gka operator pass first; None where there is none."""
        return partial(F.rms_norm, normalized_shape=(self.head_dim,)) if self.constant_norm else None

    @property
    def lengths(self) -> list[int] | None:
        """How many tokens each sequence has, uniform and always the same; None if there is no padding to speak of."""
        if self.shortest is None:
            return None
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.shortest, self.tokens + 1, (self.batch,), generator=generator).tolist()

    def settings(self) -> dict:
        """The shape as columns of a row."""
        return {name: value for name, value in asdict(self).items() if name != "name"} | {
            "queries": self.queries or self.tokens
        }

    @classmethod
    def parse(cls, text: str, device_type: str = "") -> "Case":
        """A shape as `--shapes` has it. dk needs n and heads as a model has them; vk needs n. Raises ValueError."""
        form = r"(\d+)x(\d+)x(\d+)x(\d+)(?:p(\d+)|(c?)(?:w(\d+))?(n?)(?:(d)((?<=nd)k)?|(v(?:(?<=nv)k)?))?)"
        match = re.fullmatch(form, text)
        if not match or 0 in (sizes := [int(match[i]) for i in range(1, 5)]):
            letters = "pN, or c, wN, n, and d, ndk, v or nvk"
            raise ValueError(f"expected BxTxHxD such as 16x2048x10x128, then {letters}, got {text!r}")
        shortest, causal, window, normalised, decode, derived, apart = match.groups()[4:]
        if shortest and not 0 < int(shortest) <= sizes[1]:
            raise ValueError(f"pN needs lengths N from 1 to T, got {text!r}")
        if derived and (sizes[3] % 2 or sizes[2] * sizes[3] < 32):
            raise ValueError(f"dk needs heads of even size with at least 32 channels together, got {text!r}")
        window = int(window) if window else None
        more = dict(queries=1 if decode else 0, derived=bool(derived), shortest=int(shortest) if shortest else None)
        return cls(text, *sizes, bool(causal), window, bool(normalised), **more, apart=apart or "")


@dataclass(frozen=True)
class Operator:
    """A candidate: a route of `gka.testing`. Of softmax attention x, keys and values are q, k and v; in decoding the
    cache is the keys, or the values where keys are derived from them.
    """

    role: str  # see runs/bench/program.py
    family: str  # gka or softmax
    function: testing.Route
    dtype: torch.dtype


def inputs(case: Case, family: str, device, dtype, seed: int, full: bool) -> testing.Problem:
    """Fresh random inputs of a family, with grad_y for a full pass."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(tokens: int) -> torch.Tensor:
        return torch.randn(case.batch, tokens, case.heads, case.head_dim, generator=generator, device=device).to(dtype)

    if family == "softmax":
        names = ("keys", "values")
    elif case.queries:
        names = ("values",) if case.derived else ("keys",)
    else:
        names = {"": (), "v": ("values",), "vk": ("keys", "values")}[case.apart]
    tensors = {name: draw(case.tokens) for name in names}
    if family == "gka" and case.derived:
        tensors = {name: case.norm(t) for name, t in tensors.items()}
    queries = case.queries or case.tokens
    # About where the models start, for normalised heads and for general features.
    sigma_squared = SIGMA_FACTOR * (case.head_dim if case.constant_norm else math.sqrt(case.head_dim))
    log_sigma = torch.full((case.heads,), 0.5 * math.log(sigma_squared), device=device)
    tensors |= {"x": draw(queries), "log_sigma": log_sigma, "grad_y": draw(queries) if full else None}
    return testing.Problem(**tensors, mask=case.mask, front=case.norm if family == "gka" else None)


def operators(case: Case, device: torch.device, dtype: torch.dtype, phase: str) -> dict[str, Operator]:
    """Every candidate for the case on this device, ours first. One that cannot serve says so when it is called."""
    ours = derived_candidates(case, device) if case.derived else gka_candidates(case, device, dtype, phase)
    candidates = {name: Operator(role, "gka", route, dtype) for name, (role, route) in ours.items()}
    # On a CPU torch's own is slower in bfloat16 than in float32.
    float32 = {", float32": torch.float32} if device.type == "cpu" and dtype == torch.bfloat16 else {}
    for suffix, computed_in in {"": dtype, **float32}.items():
        for name, (role, attend) in softmax_candidates(case, device).items():
            candidates[name + suffix] = Operator(role, "softmax", as_route(attend), computed_in)
    return candidates


def as_route(attend: baselines.Softmax) -> testing.Route:
    return lambda x, log_sigma, *, keys, values: attend(x, keys, values)


def gka_candidates(case: Case, device: torch.device, dtype: torch.dtype, phase: str) -> Candidates:
    """Our implementations, and GKA written out."""
    known = inputs(replace(case, batch=1), "gka", device, dtype, 0, full=False)
    known = known.map(lambda t: t.requires_grad_(phase == FULL))
    options = dict(causal=case.causal, window=case.window)
    lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
    auto = select_impl(
        known.x, log_sigma=known.log_sigma, keys=known.keys, values=known.values, constant_norm=case.constant_norm,
        lengths=None if lengths is None else lengths.min()[None], **options,
    )  # fmt: skip

    def decoding(x, log_sigma, *, keys, values):
        return decode_attention(x, log_sigma, keys, constant_norm=case.constant_norm)

    # What a model calls while it decodes.
    candidates: Candidates = {"gka decoding": ("ours", decoding)} if case.queries else {}
    fused = [name for name, one in IMPLEMENTATIONS.items() if device.type in one.SERVES.fused_on]
    for impl in dict.fromkeys((auto, *fused)):
        role = "ours" if impl == auto and not case.queries else "variant"
        more = dict(constant_norm=case.constant_norm, impl=impl, lengths=lengths)
        candidates[f"gka {impl}"] = role, partial(gaussian_attention, **options, **more)
    if case.shortest == case.tokens:
        more = dict(constant_norm=case.constant_norm, impl=auto)
        candidates[f"gka {auto} without lengths"] = "variant", partial(gaussian_attention, **options, **more)
    dense = functools.cache(lambda *lengths: case.mask.dense(*lengths, device).to(dtype))

    def eager(x, log_sigma, *, keys, values):
        visible = dense(x.shape[1], (x if keys is None else keys).shape[1]) if case.mask != Mask() else None
        if lengths is not None:
            visible = (torch.arange(case.tokens, device=device) < lengths[:, None])[:, None, None].to(x.dtype)
        return testing.plain_attention(x, log_sigma, keys=keys, values=values, visible=visible)

    return candidates | {"gka eager": ("eager", eager)}


def derived_candidates(case: Case, device: torch.device) -> Candidates:
    """A decoding step of a language model whose values are not rotated; and GKA written out."""
    derive, rotary = derived_keys(case, device)

    def ours(x, log_sigma, *, keys, values):
        return decode_attention(x, log_sigma, values, rotary=rotary.tables, constant_norm=True)

    def eager(x, log_sigma, *, keys, values):
        return testing.plain_attention(x, log_sigma, keys=derive(values), values=values)

    return {"gka decoding": ("ours", ours), "gka eager": ("eager", eager)}


def derived_keys(case: Case, device: torch.device) -> tuple[Callable[[torch.Tensor], torch.Tensor], Rotary]:
    """(keys of a cache: its rotation and norm, the rotation)."""
    rotary = Rotary(case.head_dim, case.tokens).to(device)
    rotary.init_weights()
    return lambda cache: case.norm(rotary(cache, slice(0, case.tokens))), rotary


def softmax_candidates(case: Case, device: torch.device) -> Candidates:
    """The baselines."""
    mask, windowed = case.mask, case.window is not None
    if case.lengths and case.shortest < case.tokens:
        return {
            "softmax padding mask": ("baseline", baselines.padded(case.lengths, case.tokens, as_products=False)),
            "softmax products": ("baseline", baselines.padded(case.lengths, case.tokens, as_products=True)),
            "softmax one by one": ("other", baselines.one_by_one(case.lengths)),
        }
    if device.type != "cuda":
        candidates: Candidates = {
            "softmax dense mask" if windowed else "softmax sdpa": ("baseline", baselines.sdpa(mask)),
            "softmax products": ("baseline", baselines.products(mask)),
        }
        if windowed and not case.queries:
            for block in (size for size in baselines.BLOCKS if size < case.tokens):
                candidates[f"softmax blocks of {block}"] = "baseline", baselines.sdpa(mask, block=block)
        return candidates

    flex = partial(dot_product_attention, causal=case.causal, window=case.window, impl="flex")
    # Flash has no windows in torch: there everything that is right and windowed counts.
    fallback = "baseline" if windowed else "other"
    return {
        "softmax flash": ("baseline", baselines.sdpa(mask, SDPBackend.FLASH_ATTENTION)),
        "softmax cudnn": ("baseline", baselines.sdpa(mask, SDPBackend.CUDNN_ATTENTION)),
        "softmax efficient": (fallback, baselines.sdpa(mask, SDPBackend.EFFICIENT_ATTENTION)),
        "softmax flex": (fallback, flex),
    }


def gate(operator: Operator, case: Case, phase: str, device: torch.device) -> str | None:
    """Why the operator is wrong on fresh inputs of this kind, or None.

    It works on the whole batch, but only the first and last sequence are judged and get a gradient: float64 needs no
    others. With padding each is judged by itself, as if there were none. The gradient of normalised heads is taken
    before their norm, where dropping it is exact. More than GATE_TOKENS tokens are judged on that many.
    """
    # A layer's window, rotation and lengths are of the case's own length.
    if not (case.derived or case.lengths):
        case = replace(case, tokens=min(case.tokens, GATE_TOKENS[device.type]))
    ends = sorted({0, case.batch - 1})
    parts = [([row], case.lengths[row]) for row in ends] if case.lengths else [(ends, case.tokens)]
    return next(filter(None, (_wrong(operator, case, phase, device, *part) for part in parts)), None)


def _wrong(
    operator: Operator, case: Case, phase: str, device: torch.device, rows: list[int], length: int
) -> str | None:
    """Why the operator is wrong on the first `length` tokens of these sequences of the batch."""
    judged = torch.tensor(rows, device=device)
    whole = inputs(case, operator.family, device, operator.dtype, seed=1, full=phase == FULL)
    few = whole.map(lambda t: t[judged, :length] if t.dim() == 4 else t)
    whole = whole.behind_front()

    def put(name: str, part: torch.Tensor) -> torch.Tensor | None:
        """The whole batch with these judged sequences."""
        t = getattr(whole, name)
        return None if t is None else t.index_copy(0, judged, torch.cat([part, t[judged, part.shape[1] :]], 1))

    def route(x, log_sigma, *, keys, values):
        y = operator.function(put("x", x), log_sigma, keys=put("keys", keys), values=put("values", values))
        return y[judged, :length]

    if operator.family == "softmax":
        return _judge_softmax(route, few)
    if case.derived:
        few = few.behind_front()
        few = replace(few, keys=derived_keys(case, device)[0](few.values.double()).to(operator.dtype))
    return testing.judge(route, few, slack=EPS)  # some implementations drop eps, and so does the oracle


def _judge_softmax(route: testing.Route, problem: testing.Problem) -> str | None:
    """`testing.judge` for the baselines, with `baselines.definition` as oracle and as plain PyTorch."""
    definition = as_route(partial(baselines.definition, mask=problem.mask))
    runs = (route, problem), (definition, problem.double()), (definition, problem)
    got, exact, plain = (testing.run(*each).named() for each in runs)
    dtype, head_dim = problem.x.dtype, problem.x.shape[-1]
    floor = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 1 + head_dim**0.5)  # scores reach about sqrt(D)
    floors = {name: floor if name == "y" else 3 * floor for name in exact}
    return testing.disagreement(got, exact, plain, floors)
