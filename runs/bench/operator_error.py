"""Relative error of every operator route a CPU can run, against the float64 oracle: the table in gka/README.md.

    python -m runs.bench.operator_error                        rewrite runs/results/operator_error.jsonl
    python -m runs.bench.operator_error --results FILE.jsonl   rewrite another file

For each kind of features and dtype: y, dx and dlog_sigma, relative Frobenius norm, the worse of full and causal, on
inputs as rounded to the dtype. Routes that apply eps are compared with the oracle at that eps, routes that drop it with
the oracle at eps = 0. The file gets one line for each kind, dtype and route, and is printed as markdown;
`python -m runs.tables` puts it into the page. Takes seconds.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from gka import gaussian_attention, testing
from gka.api import EPS
from gka.masking import Mask
from trainkit_gka.cli import run
from trainkit_gka.progress import read_lines
from trainkit_gka.results import append_result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "runs/results/operator_error.jsonl"
SHAPE = (2, 197, 2, 64)  # DeiT's token count and head size: neither a multiple of a tile
SIGMA_SQUARED = (10.4, 83.2)  # of the heads, as `testing.make_log_sigma` has them
DTYPES = (torch.float32, torch.bfloat16)
MASKS = (Mask(causal=False), Mask(causal=True))
KINDS = (*testing.KINDS, "all+10", "all+100")
ROUTES = ("plain", "reference", "cpu", "sdpa", "sdpa constant_norm")
NAMES = ("y", "dx", "dlog_sigma")


@dataclass
class OperatorErrorConfig:
    """Measure the error of every operator route that a CPU can run, and rewrite the file of the results."""

    results: Path = RESULTS
    """File of the JSON lines: one for each kind of features, dtype and route."""


def measure(kind: str, dtype: torch.dtype, route: str, mask: Mask) -> dict[str, float]:
    """The errors of one route, with what the error model needs to explain them."""
    attend = partial(gaussian_attention, causal=mask.causal)
    applied = 0.0 if route.startswith("sdpa") else EPS
    problem = testing.Problem.seeded(kind, SHAPE, dtype, mask=mask, eps=applied)
    if route == "plain":
        got = testing.plain(problem)
    elif route != "sdpa constant_norm":
        got = testing.run(partial(attend, impl=route), problem)
    else:
        # Dropping the constant norm is exact only for what lies before the normalisation: gradients are taken there.
        norm = partial(F.rms_norm, normalized_shape=SHAPE[-1:])
        problem = replace(problem, x=testing.make_features("normal", SHAPE, dtype), front=norm)
        got = testing.run(partial(attend, constant_norm=True, impl="sdpa"), problem)
    want, seen = testing.oracle(problem), problem.behind_front()
    largest = (seen.x.double().square().sum(-1) / torch.tensor(SIGMA_SQUARED)).max().item()
    return {
        **{name: testing.error(getattr(got, name), getattr(want, name)) for name in NAMES},
        "max_norm2_over_sigma2": largest,
        "log_sigma_condition": testing.log_sigma_condition(seen),
    }


def rows():
    """One dict per kind, dtype and route; the worse of the masks in every column."""
    for kind in KINDS:
        for dtype in DTYPES:
            for route in ROUTES:
                if route == "sdpa constant_norm" and kind != "unit_norm":
                    continue
                measured = [measure(kind, dtype, route, mask) for mask in MASKS]
                worst = {name: max(m[name] for m in measured) for name in measured[0]}
                yield {"kind": kind, "dtype": str(dtype).removeprefix("torch."), "route": route, **worst}


def markdown(measured: list[dict]) -> str:
    """The table of gka/README.md: a line per kind and route, float32 beside bfloat16."""
    titles = [
        "features",
        "max x²/σ²",
        "cond",
        "route",
        *(f"{dtype} {name}" for dtype in ("fp32", "bf16") for name in ("y", "dx", "dlogσ")),
    ]
    lines = [f"| {' | '.join(titles)} |", "|---|---:|---:|---|" + "---:|" * 6]
    paired: dict[tuple[str, str], list[dict]] = {}
    for row in measured:
        paired.setdefault((row["kind"], row["route"]), []).append(row)
    for (kind, route), (single, half) in paired.items():
        errors = ["NaN" if row[name] is None else f"{row[name]:.0e}" for row in (single, half) for name in NAMES]
        sizes = [f"{single[name]:.0f}" for name in ("max_norm2_over_sigma2", "log_sigma_condition")]
        lines.append(f"| {' | '.join((kind, *sizes, route, *errors))} |")
    return "\n".join(lines)


def main(config: OperatorErrorConfig) -> None:
    torch.set_num_threads(1)  # the order of a parallel reduction would show in the last digit
    settings = {"shape": SHAPE, "sigma_squared": SIGMA_SQUARED}
    measured = list(rows())
    config.results.unlink(missing_ok=True)
    for row in measured:
        append_result(config.results, "operator_error", settings, row, torch.device("cpu"))
    print(markdown([record["metrics"] for record in read_lines(config.results)]))


if __name__ == "__main__":
    run(main, OperatorErrorConfig)
