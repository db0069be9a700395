"""Relative error of every operator route a CPU can run, against the float64 oracle: the table in gka/README.md.

    python -m runs.bench.operator_error

For each kind of features and dtype: y, dx and dlog_sigma, relative Frobenius norm, the worse of full and causal, on
inputs as rounded to the dtype. Routes that apply eps are compared with the oracle at that eps, routes that drop it with
the oracle at eps = 0. Rewrites runs/results/operator_error.jsonl (one run, one line per kind, dtype and route) and
prints it as markdown; `python -m runs.tables` puts it into the page. Takes seconds.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from gka import gaussian_attention, testing
from gka.masking import Mask
from trainkit.cli import run
from trainkit.progress import read_lines
from trainkit.results import append_result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "runs/results/operator_error.jsonl"
SHAPE = (2, 197, 2, 64)  # DeiT's token count and head size: neither a multiple of a tile
# One per head; not powers of two, or x / sigma^2 would be exact.
SIGMA_SQUARED = (1.3 * math.sqrt(SHAPE[-1]), 1.3 * SHAPE[-1])
DTYPES = (torch.float32, torch.bfloat16)
MASKS = (Mask(causal=False), Mask(causal=True))
KINDS = (*testing.KINDS, "all+10", "all+100")
ROUTES = ("plain", "reference", "sdpa", "sdpa constant_norm")
NAMES = ("y", "dx", "dlog_sigma")


def measure(kind: str, dtype: torch.dtype, route: str, mask: Mask) -> dict[str, float]:
    """The errors of one route, with what the error model needs to explain them."""
    log_sigma = 0.5 * torch.log(torch.tensor(SIGMA_SQUARED))
    x = testing.make_features(kind, SHAPE, dtype)
    grad_y = testing.make_features("normal", SHAPE, dtype, seed=2)

    arguments = x, log_sigma, None, grad_y
    attend = partial(gaussian_attention, causal=mask.causal)
    if route == "plain":
        got, want = testing.plain(*arguments, mask), testing.oracle(*arguments, mask)
    elif route == "reference":
        got, want = testing.run(partial(attend, impl="reference"), *arguments), testing.oracle(*arguments, mask)
    elif route == "sdpa":
        got, want = testing.run(partial(attend, impl="sdpa"), *arguments), testing.oracle(*arguments, mask, eps=0.0)
    else:
        # Dropping the constant norm is exact only for what lies before the normalisation: gradients are taken there.
        norm = partial(F.rms_norm, normalized_shape=SHAPE[-1:])
        x = testing.make_features("normal", SHAPE, dtype)
        arguments = x, log_sigma, None, grad_y
        got = testing.run(partial(attend, constant_norm=True, impl="sdpa"), *arguments, front=norm)
        want = testing.oracle(*arguments, mask, eps=0.0, front=norm)
        x = norm(x)
    largest = (x.double().square().sum(-1) / torch.tensor(SIGMA_SQUARED)).max().item()
    return {
        **{name: testing.error(getattr(got, name), getattr(want, name)) for name in NAMES},
        "max_norm2_over_sigma2": largest,
        "log_sigma_condition": testing.log_sigma_condition(x, log_sigma, None, grad_y, mask),
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
    titles = ["features", "max x²/σ²", "cond", "route"]
    titles += [f"{dtype} {name}" for dtype in ("fp32", "bf16") for name in ("y", "dx", "dlogσ")]
    lines = [f"| {' | '.join(titles)} |", "|---|---:|---:|---|" + "---:|" * 6]
    paired: dict[tuple[str, str], list[dict]] = {}
    for row in measured:
        paired.setdefault((row["kind"], row["route"]), []).append(row)
    for (kind, route), (single, half) in paired.items():
        errors = ["NaN" if row[name] is None else f"{row[name]:.0e}" for row in (single, half) for name in NAMES]
        sizes = [f"{single[name]:.0f}" for name in ("max_norm2_over_sigma2", "log_sigma_condition")]
        lines.append(f"| {' | '.join((kind, *sizes, route, *errors))} |")
    return "\n".join(lines)


@dataclass
class ErrorConfig:
    """Measure the relative errors of the operator's routes on a CPU, rewrite runs/results/operator_error.jsonl and
    print its table."""


def main(config: ErrorConfig) -> None:
    torch.set_num_threads(1)  # the order of a parallel reduction would show in the last digit
    RESULTS.unlink(missing_ok=True)
    settings = {"shape": SHAPE, "sigma_squared": SIGMA_SQUARED}
    for row in rows():
        append_result(RESULTS, "operator_error", settings, row, torch.device("cpu"))
    print(markdown([record["metrics"] for record in read_lines(RESULTS)]))


if __name__ == "__main__":
    run(main, ErrorConfig)
