"""What tests, benchmarks and tuning share: seeded features, the float64 oracle with all gradients, plain PyTorch, and
the error budget.

    check(partial(gaussian_attention, impl="sdpa"), Problem.seeded("normal", (2, 197, 3, 64)))

raises if the output or a gradient is further from float64 than the budget allows; `judge` returns the reason. A route
is called as route(x, log_sigma, keys=keys, values=values), like `gaussian_attention`.

The budget of a fast path is derived, never tuned: twice the error that plain PyTorch makes in the same dtype on the
same inputs, plus what one unit in the last place of the exponents and of dot products is worth (docs/accuracy.md, Error
model). Everything is measured against float64 of the same rounded inputs.
"""

from gka.testing.budget import (
    check,
    coarse_floors,
    disagreement,
    error,
    exponent_ulp,
    floors,
    judge,
    log_sigma_condition,
    output_floor,
)
from gka.testing.problem import KINDS, Problem, make_features, make_log_sigma
from gka.testing.results import Result, oracle, plain, plain_attention, run

__all__ = [
    "KINDS",
    "Problem",
    "Result",
    "check",
    "coarse_floors",
    "disagreement",
    "error",
    "exponent_ulp",
    "floors",
    "judge",
    "log_sigma_condition",
    "make_features",
    "make_log_sigma",
    "oracle",
    "output_floor",
    "plain",
    "plain_attention",
    "run",
]
