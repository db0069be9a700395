"""How many times plain PyTorch's error the CPU kernel makes in float32, in thousands of small cases: a table in
gka/README.md.

    python -m runs.bench.error_sweep                        rewrite runs/results/error_sweep.jsonl
    python -m runs.bench.error_sweep --results FILE.jsonl   rewrite another file

Against the float64 oracle. An error of y, dx, dkeys and dvalues is relative to what is exact of one seed, and the root
mean square is over seeds, so that no seed decides: with a narrow kernel one close pair of tokens may be nearly all that
there is. dlog_sigma is a sum whose terms cancel, in one seed more than in another, and is taken as it is. Where the
kernel's error is the larger one over a few seeds, the case is measured again over many. Long rows are in
`error_over_seeds`. Takes some eight minutes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch

from gka.impl.cpu import build
from gka.masking import Mask
from runs.bench.error_over_seeds import CAUSAL, FULL, ROOT, ROUTES, Case, squares
from trainkit_gka.cli import UserError, run
from trainkit_gka.progress import progress_bar
from trainkit_gka.results import append_result

RESULTS = ROOT / "runs/results/error_sweep.jsonl"
SEEDS, AGAIN = 8, 12  # seeds of a case, and how many times as many where it comes out worse than plain PyTorch
TOKENS = (2, 3, 5, 8, 9, 16, 20, 33, 48, 60, 100, 300)
CHANNELS = (8, 16, 64, 128)
LOG_SIGMAS = (-1.0, 0.0, 0.5, 1.0, 2.0, 4.0)
MASKS = {"full": FULL, "causal": CAUSAL, "window 3": Mask(True, 3), "window 20": Mask(True, 20)}
OTHERS = {"own": (False, True), "other values": (False, False), "other keys": (True, True), "both": (True, False)}
FEATURES = ("unit_norm", "clusters", "x50", "+50")
CACHES = (2, 3, 5, 12, 16, 33, 60, 300, 2000)  # keys that queries which are decoded see
LEAST = 1e-60  # a sum of squares below it: nothing is exact but 0


@dataclass
class ErrorSweepConfig:
    """Compare the errors of the CPU kernel with plain PyTorch's in many small cases, and rewrite their summary."""

    results: Path = RESULTS
    """File of the JSON lines: one for each output."""
    seeds: int = SEEDS
    """Seeds of each case."""


def cases() -> Iterator[Case]:
    """Every length, mask, source of keys and values, width and bandwidth; then other features; then decoding."""
    for tokens, (mask, others, channels, log_sigma) in product(TOKENS, product(MASKS, OTHERS, CHANNELS, LOG_SIGMAS)):
        if tokens > (MASKS[mask].window or 0):
            yield _case(tokens, mask, others, channels, log_sigma=log_sigma)
    for tokens, mask, others, features in product((5, 20, 60, 300), MASKS, OTHERS, FEATURES):
        if tokens > (MASKS[mask].window or 0):
            yield _case(tokens, mask, others, 64, features=features)
    for keys, queries, own_values, channels, log_sigma in product(CACHES, (1, 8), (True, False), CHANNELS, LOG_SIGMAS):
        values = "own" if own_values else "other values"
        label = f"decoding {queries} queries, {keys} keys, {values}, D = {channels}, log sigma {log_sigma}"
        yield Case(
            queries, keys=keys, own_values=own_values, head_dim=channels, log_sigma=log_sigma, with_gradients=False,
            label=label,
        )  # fmt: skip


def _case(tokens: int, mask: str, others: str, channels: int, **options) -> Case:
    other_keys, own_values = OTHERS[others]
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in options.items())
    return Case(
        tokens, MASKS[mask], keys=tokens if other_keys else None, own_values=own_values, head_dim=channels,
        label=f"{tokens} tokens, {mask}, {others}, D = {channels}, {said}", **options,
    )  # fmt: skip


def ratios(case: Case, seeds: int) -> dict[str, float]:
    """By output: how many times plain PyTorch's error.

    Left out are outputs that are 0, plain PyTorch's NaN, and what both give exactly.
    """
    sums: dict[str, Counter[str]] = {route: Counter() for route in ROUTES}
    for exact, wrong in squares(case, seeds):
        units = {name: 1.0 if name == "dlog_sigma" else size for name, size in exact.items() if size > LEAST}
        for route in ROUTES:
            sums[route].update({name: wrong[route][name] / unit for name, unit in units.items()})
    found = {}
    for name, plain in sums["plain"].items():
        ours = sums["cpu"][name]
        if math.isnan(plain) or plain == ours == 0:
            continue
        found[name] = math.inf if plain == 0 or math.isnan(ours) else (ours / plain) ** 0.5
    if seeds < AGAIN * SEEDS and max(found.values(), default=0.0) > 1:
        return ratios(case, AGAIN * SEEDS)
    return found


def main(config: ErrorSweepConfig) -> None:
    if reason := build.obstacle():
        raise UserError(reason)
    if config.seeds < 1:
        raise UserError("--seeds must be 1 or more")
    torch.set_num_threads(1)  # the order of a parallel reduction would show in the last digit
    found: dict[str, dict[str, float]] = defaultdict(dict)
    with progress_bar() as bar:
        for case in bar.track(list(cases()), description="cases"):
            for name, ratio in ratios(case, config.seeds).items():
                found[name][case.label] = ratio
    config.results.unlink(missing_ok=True)
    for name, by_case in found.items():
        worst = max(by_case, key=by_case.__getitem__)
        above = sum(ratio > 1 for ratio in by_case.values())
        summary = {"median": median(by_case.values()), "most": by_case[worst], "above_1": above, "worst": worst}
        settings = {"output": name, "cases": len(by_case), "seeds": config.seeds}
        append_result(config.results, "error_sweep", settings, summary, torch.device("cpu"))
        print(f"{name}: {summary}")


if __name__ == "__main__":
    run(main, ErrorSweepConfig)
