"""Errors of the CPU kernel in float32 beside plain PyTorch's, over seeds: a table in gka/README.md.

    python -m runs.bench.error_over_seeds                        rewrite runs/results/error_over_seeds.jsonl
    python -m runs.bench.error_over_seeds --results FILE.jsonl   rewrite another file

Against the float64 oracle: the root mean square of the error over seeds, of the root mean square of what is exact. One
seed shows chance, of dlog_sigma by a factor of ten. The file gets one line for each case and route; `python -m
runs.tables` puts it into the page. Takes about a minute.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.impl.cpu import build
from gka.masking import Mask
from trainkit_gka.cli import UserError, run
from trainkit_gka.results import append_result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "runs/results/error_over_seeds.jsonl"
SEEDS, HEADS = 16, 2
ROUTES = ("plain", "cpu")
FULL, CAUSAL = Mask(), Mask(causal=True)


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
        """Of one sequence and two heads."""

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


@dataclass
class ErrorOverSeedsConfig:
    """Measure the errors of the CPU kernel beside plain PyTorch's over seeds, and rewrite the file of the results."""

    results: Path = RESULTS
    """File of the JSON lines: one for each case and route."""


def measure(case: Case, seeds: int = SEEDS) -> dict[str, dict[str, float]]:
    """The error of y and of each gradient, of every route: root mean square over seeds, of the exact one's."""
    exact: Counter[str] = Counter()
    wrong: dict[str, Counter[str]] = {route: Counter() for route in ROUTES}
    for of_one, wrong_of_one in squares(case, seeds):
        exact.update(of_one)
        for route in ROUTES:
            wrong[route].update(wrong_of_one[route])
    return {route: {name: (total[name] / exact[name]) ** 0.5 for name in exact} for route, total in wrong.items()}


def squares(case: Case, seeds: int) -> Iterator[tuple[dict[str, float], dict[str, dict[str, float]]]]:
    """For each seed the sum of squares of what is exact, and of every route's errors, by name."""
    attend = partial(gaussian_attention, causal=case.mask.causal, window=case.mask.window, impl="cpu", eps=EPS)
    for seed in range(seeds):
        problem = case.problem(seed)
        want = testing.oracle(problem).named()
        wrong = {}
        for route in ROUTES:
            got = (testing.plain(problem) if route == "plain" else testing.run(attend, problem)).named()
            wrong[route] = {name: (got[name] - want[name]).square().sum().item() for name in want}
        yield {name: tensor.square().sum().item() for name, tensor in want.items()}, wrong


def main(config: ErrorOverSeedsConfig) -> None:
    if reason := build.obstacle():
        raise UserError(reason)
    torch.set_num_threads(1)  # the order of a parallel reduction would show in the last digit
    measured = {}
    for case in CASES:
        measured[case.label] = measure(case)
        for route, errors in measured[case.label].items():
            print(f"{case.label}, {route}:", ", ".join(f"{n} {e:.1e}" for n, e in errors.items()), flush=True)
    config.results.unlink(missing_ok=True)
    for label, by_route in measured.items():
        for route, errors in by_route.items():
            settings = {"case": label, "route": route, "seeds": SEEDS}
            append_result(config.results, "error_over_seeds", settings, errors, torch.device("cpu"))


if __name__ == "__main__":
    run(main, ErrorOverSeedsConfig)
