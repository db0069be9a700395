"""What the numbers a user gives may be: a table of rules for each command, checked in one loop."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gka.runtime.cli import UserError

# Names, what must hold (NaN must fail it, so it says what is allowed), and the same in words.
Rules = Iterable[tuple[str, Callable[[Any], bool], str]]


def check_bounds(values: Mapping[str, Any], rules: Rules) -> None:
    """values: by the flags' names. Raises UserError naming the first that breaks its rule."""
    for names, holds, rule in rules:
        for name in names.split():
            if not holds(values[name]):
                raise UserError(f"--{name.replace('_', '-')} must be {rule}; got {values[name]}")


def between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


def below(low: float, high: float) -> Callable[[Any], bool]:
    """At least `low` and below `high`."""
    return lambda value: low <= value < high


def positive(value: float) -> bool:
    return 0 < value < math.inf


def at_least(low: int, *, off: int | None = None) -> Callable[[Any], bool]:
    """A count from `low` on; `off` is allowed too."""
    return lambda value: value >= low or (off is not None and value == off)


LOADING: Rules = (("num_workers", between(-1, 1024), "0 to 1024, or -1 for automatic"),)
MODEL: Rules = (
    ("depth", between(1, 1000), "between 1 and 1000"),
    ("embed_dim num_heads patch_size img_size num_classes", at_least(1), "at least 1"),
    ("mlp_ratio sigma_squared", positive, "positive and finite"),
    ("drop_rate drop_path_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate", below(0, 1), "at least 0 and below 1"),
)


def check_model_arguments(kwargs: Mapping[str, Any]) -> None:
    """Raises UserError for numbers no model can be built with, of the arguments most timm models share; timm refuses the others itself."""
    for names, holds, rule in MODEL:
        for name in names.split():
            if isinstance(value := kwargs.get(name), (int, float)) and not holds(value):
                raise UserError(f"--model-kwargs {name} must be {rule}; got {value}")
    for name, value in kwargs.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--model-kwargs {name} must be finite; got {value}")
