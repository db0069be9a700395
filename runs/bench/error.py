"""Errors of the operator's routes against the float64 oracle: the tables of docs/accuracy.md.

    python -m runs.bench.error                  measures all three parts again, in some ten minutes
    python -m runs.bench.error --only routes    one of them; the others' lines in the file stay

- routes, in seconds: every route that a CPU can run, for each kind of features and dtype; relative Frobenius norm, the
  worse of full and causal, on inputs as rounded to the dtype. Routes that apply eps are compared with the oracle at
  that eps, routes that drop it with the oracle at eps = 0.
- cases, in about a minute: the CPU kernel beside plain PyTorch in float32, over seeds, long rows among them: the root
  mean square of the error, of the root mean square of what is exact. One seed shows chance, of dlog_sigma by a factor
  of ten.
- sweep, in some eight minutes: how many times plain PyTorch's error the CPU kernel makes, in thousands of small cases.
  An error of y, dx, dkeys and dvalues is relative to what is exact of one seed, and the root mean square is over seeds,
  so that no seed decides: with a narrow kernel one close pair of tokens may be nearly all that there is. dlog_sigma is
  a sum whose terms cancel, in one seed more than in another, and is taken as it is. Where the kernel's error is the
  larger one over a few seeds, the case is measured again over many.

Lines go to runs/results/error.jsonl; `python -m runs.tables` puts them into the page.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.dispatch import IMPLEMENTATIONS
from gka.impl.cpu import build
from gka.masking import Mask
from runs.frames import RESULTS
from trainkit_gka.cli import UserError, run
from trainkit_gka.files import atomic
from trainkit_gka.progress import progress_bar
from trainkit_gka.results import append_line, append_result, read_results

FILE = RESULTS / "error.jsonl"
FULL, CAUSAL = Mask(), Mask(causal=True)
BOTH = ("plain", "cpu")
CONSTANT_NORM = "sdpa constant_norm"
Squares = tuple[dict[str, float], dict[str, dict[str, float]]]  # of what is exact, and of every route's errors, by name
Row = tuple[dict[str, Any], dict[str, Any]]  # settings and errors


def squares(problem: testing.Problem, routes: tuple[str, ...]) -> Squares:
    """Sums of squares of the exact output and gradients, and of every route's errors."""
    want = testing.oracle(problem).named()
    wrong = {}
    for route in routes:
        got = _result(route, problem).named()
        wrong[route] = {name: (got[name].double() - want[name]).square().sum().item() for name in want}
    return {name: tensor.square().sum().item() for name, tensor in want.items()}, wrong


def _result(route: str, problem: testing.Problem) -> testing.Result:
    if route == "plain":
        return testing.plain(problem)
    options: dict[str, Any] = dict(causal=problem.mask.causal, window=problem.mask.window)
    options |= dict(impl="sdpa", constant_norm=True) if route == CONSTANT_NORM else dict(impl=route)
    return testing.run(partial(gaussian_attention, **options), problem)


def relative(exact: dict[str, float], wrong: dict[str, float]) -> dict[str, float]:
    """The root of the errors' squares over those of what is exact."""
    return {name: math.sqrt(wrong[name] / exact[name]) for name in exact}


# Routes: every kind of features.

SHAPE = (2, 197, 2, 64)  # DeiT's token count and head size: neither a multiple of a tile
SIGMA_SQUARED = (10.4, 83.2)  # of the heads, as `testing.make_log_sigma` has them
DTYPES = (torch.float32, torch.bfloat16)
KINDS = (*testing.KINDS, "all+10", "all+100")


def routes() -> Iterator[Row]:
    """One row per kind of features, dtype and route; the worse of the masks in every column."""
    for features, dtype in product(KINDS, DTYPES):
        measured: dict[str, list[dict[str, float]]] = defaultdict(list)
        for mask in (FULL, CAUSAL):
            for problem, names in _problems(features, dtype, mask):
                seen = problem.behind_front()
                sizes = {
                    "max_norm2_over_sigma2": (seen.x.double().square().sum(-1) / torch.tensor(SIGMA_SQUARED)).max(),
                    "log_sigma_condition": testing.log_sigma_condition(seen),
                }
                exact, wrong = squares(problem, names)
                for route in names:
                    measured[route].append(relative(exact, wrong[route]) | {n: float(s) for n, s in sizes.items()})
        for route, of_masks in measured.items():
            settings = {"features": features, "dtype": str(dtype).removeprefix("torch."), "route": route}
            worst = {name: _largest([one[name] for one in of_masks]) for name in of_masks[0]}
            yield settings | {"shape": SHAPE, "sigma_squared": SIGMA_SQUARED}, worst


def _largest(numbers: list[float]) -> float:
    """NaN if one of them is."""
    return torch.tensor(numbers, dtype=torch.float64).max().item()


def _problems(features: str, dtype: torch.dtype, mask: Mask) -> Iterator[tuple[testing.Problem, tuple[str, ...]]]:
    """Problems, and the routes that are compared on each."""
    problem = testing.Problem.seeded(features, SHAPE, dtype, mask=mask, eps=EPS)
    without_eps = replace(problem, eps=0.0)
    yield problem, ("plain", "reference", *_fused(applies_eps=True))
    yield without_eps, _fused(applies_eps=False)
    if features == "unit_norm":
        # Dropping the constant norm is exact only for what lies before the normalisation: gradients are taken there.
        norm = partial(F.rms_norm, normalized_shape=SHAPE[-1:])
        yield replace(without_eps, x=testing.make_features("normal", SHAPE, dtype), front=norm), (CONSTANT_NORM,)


def _fused(applies_eps: bool) -> tuple[str, ...]:
    """Implementations that are fused on CPUs, and apply eps or drop it."""
    serve = {name: one.SERVES for name, one in IMPLEMENTATIONS.items()}
    return tuple(n for n, one in serve.items() if "cpu" in one.fused_on and one.applies_eps == applies_eps)


# Cases: the CPU kernel over seeds.

SEEDS, HEADS = 16, 2


@dataclass(frozen=True)
class Case:
    """keys None: x; log_sigma None: sigma^2 of 1.3 sqrt(D) and 1.3 D, as `testing.make_log_sigma`."""

    queries: int
    mask: Mask = FULL
    keys: int | None = None
    own_values: bool = True
    log_sigma: float | None = None
    head_dim: int = 64
    with_gradients: bool = True
    features: str = "normal"
    label: str = field(kw_only=True)

    def problem(self, seed: int) -> testing.Problem:
        """Of one sequence and two heads, float32."""

        def draw(tokens: int, role: int) -> torch.Tensor:
            return testing.make_features(self.features, (1, tokens, HEADS, self.head_dim), seed=10 * seed + role)

        usual = testing.make_log_sigma(HEADS, self.head_dim)
        return testing.Problem(
            draw(self.queries, 0),
            usual if self.log_sigma is None else torch.full((HEADS,), self.log_sigma),
            keys=None if self.keys is None else draw(self.keys, 1),
            values=None if self.own_values else draw(self.keys or self.queries, 2),
            grad_y=draw(self.queries, 3) if self.with_gradients else None,
            mask=self.mask,
            eps=EPS if self.keys is None else 0.0,  # not used with others' keys
        )


CASES = (
    Case(197, label="197 tokens"),
    Case(197, log_sigma=4.0, label="197 tokens, log σ = 4"),
    Case(700, CAUSAL, label="700 tokens, causal"),
    Case(700, CAUSAL, log_sigma=4.0, label="700 tokens, causal, log σ = 4"),
    Case(700, CAUSAL, own_values=False, log_sigma=4.0, label="the same, other values"),
    Case(700, own_values=False, log_sigma=4.0, label="700 tokens, log σ = 4, other values"),
    Case(700, CAUSAL, keys=700, own_values=False, label="700 tokens, causal, other keys and values"),
    Case(700, keys=700, own_values=False, log_sigma=4.0, label="700 queries, 700 other keys, log σ = 4"),
    Case(64, keys=8000, log_sigma=2.0, label="64 queries, 8,000 other keys, log σ = 2"),
    Case(64, keys=8000, own_values=False, log_sigma=4.0, label="64 queries, 8,000 keys and values, log σ = 4"),
    Case(4000, keys=64, own_values=False, log_sigma=4.0, label="4,000 queries, 64 keys and values, log σ = 4"),
    Case(3, keys=3000, own_values=False, log_sigma=4.0, label="3 queries, 3,000 keys and values, log σ = 4"),
    Case(8, keys=8000, with_gradients=False, log_sigma=2.0, label="decoding 8 queries, 8,000 keys, log σ = 2"),
    Case(500, CAUSAL, log_sigma=1.0, head_dim=16, label="500 tokens, causal, D = 16, log σ = 1"),
    Case(60, CAUSAL, log_sigma=1.0, head_dim=16, label="60 tokens, causal, D = 16, log σ = 1"),
    Case(8, CAUSAL, own_values=False, log_sigma=1.0, label="8 tokens, causal, other values, log σ = 1"),
    Case(300, CAUSAL, log_sigma=1.5, head_dim=128, label="300 tokens, causal, D = 128, log σ = 1.5"),
    Case(300, keys=300, own_values=False, log_sigma=1.0, head_dim=128, label="300 other keys, D = 128, log σ = 1"),
)


def cases() -> Iterator[Row]:
    """One row per case and route."""
    for case in CASES:
        for route, errors in over_seeds(case, SEEDS).items():
            yield {"case": case.label, "route": route, "seeds": SEEDS}, errors


def over_seeds(case: Case, seeds: int) -> dict[str, dict[str, float]]:
    """By route the error of y and of each gradient: root mean square over seeds, of the exact one's."""
    exact: Counter[str] = Counter()
    wrong: dict[str, Counter[str]] = {route: Counter() for route in BOTH}
    for seed in range(seeds):
        of_one, wrong_of_one = squares(case.problem(seed), BOTH)
        exact.update(of_one)
        for route in BOTH:
            wrong[route].update(wrong_of_one[route])
    return {route: relative(exact, wrong[route]) for route in BOTH}


# Sweep: many small cases.

FEW_SEEDS, AGAIN = 8, 12  # seeds of a case, and how many times as many where it comes out worse than plain PyTorch
TOKENS = (2, 3, 5, 8, 9, 16, 20, 33, 48, 60, 100, 300)
CHANNELS = (8, 16, 64, 128)
LOG_SIGMAS = (-1.0, 0.0, 0.5, 1.0, 2.0, 4.0)
MASKS = {"full": FULL, "causal": CAUSAL, "window 3": Mask(True, 3), "window 20": Mask(True, 20)}
OTHERS = {"own": (False, True), "other values": (False, False), "other keys": (True, True), "both": (True, False)}
FEATURES = ("unit_norm", "clusters", "x50", "+50")
CACHES = (2, 3, 5, 12, 16, 33, 60, 300, 2000)  # keys that queries which are decoded see
LEAST = 1e-60  # a sum of squares below it: nothing is exact but 0


def small_cases() -> Iterator[Case]:
    """Every length, mask, source of keys and values, width and bandwidth; then other features; then decoding."""
    for tokens, (mask, others, channels, log_sigma) in product(TOKENS, product(MASKS, OTHERS, CHANNELS, LOG_SIGMAS)):
        if tokens > (MASKS[mask].window or 0):
            yield _small_case(tokens, mask, others, channels, log_sigma=log_sigma)
    for tokens, mask, others, features in product((5, 20, 60, 300), MASKS, OTHERS, FEATURES):
        if tokens > (MASKS[mask].window or 0):
            yield _small_case(tokens, mask, others, 64, features=features)
    for keys, queries, own_values, channels, log_sigma in product(CACHES, (1, 8), (True, False), CHANNELS, LOG_SIGMAS):
        values = "own" if own_values else "other values"
        label = f"decoding {queries} queries, {keys} keys, {values}, D = {channels}, log sigma {log_sigma}"
        yield Case(
            queries, keys=keys, own_values=own_values, head_dim=channels, log_sigma=log_sigma, with_gradients=False,
            label=label,
        )  # fmt: skip


def _small_case(tokens: int, mask: str, others: str, channels: int, **options) -> Case:
    other_keys, own_values = OTHERS[others]
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in options.items())
    return Case(
        tokens, MASKS[mask], keys=tokens if other_keys else None, own_values=own_values, head_dim=channels,
        label=f"{tokens} tokens, {mask}, {others}, D = {channels}, {said}", **options,
    )  # fmt: skip


def ratios(case: Case, seeds: int = FEW_SEEDS) -> dict[str, float]:
    """By output: how many times plain PyTorch's error.

    Left out are outputs that are 0, plain PyTorch's NaN, and what both give exactly.
    """
    sums: dict[str, Counter[str]] = {route: Counter() for route in BOTH}
    for seed in range(seeds):
        exact, wrong = squares(case.problem(seed), BOTH)
        units = {name: 1.0 if name == "dlog_sigma" else size for name, size in exact.items() if size > LEAST}
        for route in BOTH:
            sums[route].update({name: wrong[route][name] / unit for name, unit in units.items()})
    found = {}
    for name, plain in sums["plain"].items():
        ours = sums["cpu"][name]
        if math.isnan(plain) or plain == ours == 0:
            continue
        found[name] = math.inf if plain == 0 or math.isnan(ours) else (ours / plain) ** 0.5
    if seeds < AGAIN * FEW_SEEDS and max(found.values(), default=0.0) > 1:
        return ratios(case, AGAIN * FEW_SEEDS)
    return found


def sweep() -> Iterator[Row]:
    """One row per output: the median and the largest ratio, how many are above 1, and the case of the largest."""
    by_output: dict[str, dict[str, float]] = defaultdict(dict)
    with progress_bar() as bar:
        for case in bar.track(list(small_cases()), description="cases"):
            for name, ratio in ratios(case).items():
                by_output[name][case.label] = ratio
    for name, by_case in by_output.items():
        worst = max(by_case, key=by_case.__getitem__)
        above = sum(ratio > 1 for ratio in by_case.values())
        summary = {"median": median(by_case.values()), "most": by_case[worst], "above_1": above, "worst": worst}
        yield {"output": name, "cases": len(by_case), "seeds": FEW_SEEDS}, summary


# The command.

PARTS = {"routes": routes, "cases": cases, "sweep": sweep}


@dataclass
class ErrorConfig:
    """Measure the errors of the operator's routes, and write them anew into the file of the results."""

    only: tuple[Literal["routes", "cases", "sweep"], ...] = ("routes", "cases", "sweep")
    """Measure only these parts; lines of the others stay."""
    results: Path = FILE
    """File of the JSON lines."""


def records(part: str, path: Path = FILE) -> list[dict]:
    """The lines of a part: settings under "config", errors under "metrics"."""
    return [record for record in read_results(path) if record["config"].get("part") == part]


def main(config: ErrorConfig) -> None:
    if reason := build.obstacle():
        raise UserError(reason)
    torch.set_num_threads(1)  # the order of a parallel reduction would show in the last digit
    measured = []
    for part in config.only:
        for settings, metrics in PARTS[part]():
            print(f"{', '.join(map(str, settings.values()))}: {metrics}", flush=True)
            measured.append(({"part": part} | settings, metrics))
    kept = [record for record in read_results(config.results) if record["config"].get("part") not in config.only]
    with atomic(config.results) as written:
        for record in kept:
            append_line(written, record)
        for settings, metrics in measured:
            append_result(written, "error", settings, metrics, torch.device("cpu"))


if __name__ == "__main__":
    run(main, ErrorConfig)
