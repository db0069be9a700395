"""Errors of the operator's routes against the float64 oracle: the table of docs/accuracy.md.

    python -m runs.bench.error            measures again, in seconds, and writes the rows and the table
    python -m runs.bench.error --check    exits with 1 if the table does not say what the rows say

A route is an implementation that a CPU can run, plain PyTorch in the paper's formula, or sdpa with constant norms.
Errors are relative Frobenius norms, the worse of full and causal, on inputs as rounded to the dtype. Routes that apply
eps are compared with the oracle at that eps, routes that drop it with the oracle at eps = 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gka import gaussian_attention, testing
from gka.dispatch import IMPLEMENTATIONS
from gka.impl.cpu import build
from gka.masking import Mask
from gka.options import EPS
from runs import frames, pages
from runs.table import Table, measured
from trainkit_gka.cli import UserError, run
from trainkit_gka.files import atomic
from trainkit_gka.results import append_line, append_result

FILE = frames.RESULTS / "error.jsonl"
PART = "routes"  # of the file, which has rows of finished measurements too
MASKS = Mask(), Mask(causal=True)
CONSTANT_NORM = "sdpa constant_norm"
SHAPE = (2, 197, 2, 64)  # DeiT's token count and head size: neither a multiple of a tile
SIGMA_SQUARED = (10.4, 83.2)  # of the heads, as `testing.make_log_sigma` has them
DTYPES = (torch.float32, torch.bfloat16)
KINDS = (*testing.KINDS, "all+10", "all+100")


@dataclass
class ErrorConfig:
    """Measure the errors of the operator's routes, and write them anew into the file of the results."""

    results: Path = FILE
    """File of the JSON lines."""
    check: bool = False
    """Measure nothing; exit with 1 if the table of docs/accuracy.md is out of date."""


def routes() -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Settings and errors of each kind of features, dtype and route; the largest over the masks in every column."""
    for features, dtype in product(KINDS, DTYPES):
        by_route: dict[str, list[dict[str, float]]] = {}
        for problem, names in (each for mask in MASKS for each in problems(features, dtype, mask)):
            behind = problem.behind_front()
            scores = behind.x.double().square().sum(-1) / torch.tensor(SIGMA_SQUARED)
            condition = float(testing.log_sigma_condition(behind))
            sizes = {"max_norm2_over_sigma2": float(scores.max()), "log_sigma_condition": condition}
            exact = testing.oracle(problem).named()
            for name in names:
                result = run_route(name, problem).named()
                off = {output: testing.error(result[output], exact[output]) for output in exact}
                by_route.setdefault(name, []).append(off | sizes)
        for name, of_masks in by_route.items():
            settings = {"features": features, "dtype": str(dtype).removeprefix("torch."), "route": name}
            worst = {column: float(np.max([one[column] for one in of_masks])) for column in of_masks[0]}
            yield settings | {"shape": SHAPE, "sigma_squared": SIGMA_SQUARED}, worst


def problems(features: str, dtype: torch.dtype, mask: Mask) -> Iterator[tuple[testing.Problem, Sequence[str]]]:
    """Problems, and the routes that are compared on each."""
    problem = testing.Problem.seeded(features, SHAPE, dtype, mask=mask, eps=EPS)
    without_eps = replace(problem, eps=0.0)
    yield problem, ("plain", "reference", *fused_on_cpus(applies_eps=True))
    yield without_eps, fused_on_cpus(applies_eps=False)
    if features == "unit_norm":
        # Dropping the constant norm is exact only for what lies before the normalisation: gradients are taken there.
        norm = partial(F.rms_norm, normalized_shape=SHAPE[-1:])
        yield replace(without_eps, x=testing.make_features("normal", SHAPE, dtype), front=norm), (CONSTANT_NORM,)


def fused_on_cpus(applies_eps: bool) -> list[str]:
    """Implementations that are fused on CPUs, and apply eps or drop it."""
    serve = {name: one.SERVES for name, one in IMPLEMENTATIONS.items()}
    return [name for name, one in serve.items() if "cpu" in one.fused_on and one.applies_eps == applies_eps]


def run_route(route: str, problem: testing.Problem) -> testing.Result:
    if route == "plain":
        return testing.plain(problem)
    options: dict[str, Any] = dict(impl="sdpa", constant_norm=True) if route == CONSTANT_NORM else dict(impl=route)
    return testing.run(partial(gaussian_attention, causal=problem.mask.causal, **options), problem)


def records(path: Path = FILE) -> list[dict]:
    """The rows of the routes: settings under "config", errors under "metrics"."""
    return [record for record in frames.records(path) if record["config"].get("part") == PART]


def errors() -> list[Table]:
    """The relative errors of every route, float32 beside bfloat16."""
    rows, of_routes = records(), {}
    for record in rows:
        of_routes.setdefault((record["config"]["features"], record["config"]["route"]), []).append(record["metrics"])
    cells = []
    for names, (single, half) in of_routes.items():
        sizes = [f"{single[name]:.0f}" for name in ("max_norm2_over_sigma2", "log_sigma_condition")]
        off = [one[name] for one in (single, half) for name in ("y", "dx", "dlog_sigma")]
        cells.append([*names, *sizes, *("NaN" if value is None else f"{value:.0e}" for value in off)])
    outputs = [f"{dtype} {name}" for dtype in ("fp32", "bf16") for name in ("y", "dx", "dlogσ")]
    headings = ["features", "route", "max x²/σ²", "cond", *outputs]
    return [Table.of(headings, cells, words=2, sources=[measured(rows, FILE.name)])]


def measure(results: Path) -> None:
    """Measure the routes on one thread, and put their rows in place of those of the file."""
    if reason := build.obstacle():
        raise UserError(reason)
    torch.set_num_threads(1)  # the order of a parallel reduction would show in the last digit
    other_parts = [record for record in frames.records(results) if record["config"].get("part") != PART]
    with atomic(results) as written:
        for record in other_parts:
            append_line(written, record)
        for settings, metrics in routes():
            print(f"{', '.join(map(str, settings.values()))}: {metrics}", flush=True)
            append_result(written, "error", {"part": PART} | settings, metrics, torch.device("cpu"))


def main(config: ErrorConfig) -> None:
    if not config.check:
        measure(config.results)
    if config.results == FILE:
        pages.write({"errors": errors}, ["docs/accuracy.md"], "python -m runs.bench.error", config.check)


if __name__ == "__main__":
    run(main, ErrorConfig)
