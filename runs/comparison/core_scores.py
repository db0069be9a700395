"""The paper's CORE scores as whole numbers of right answers: which numbers of examples fit, and their errors."""

import math

from nanochat_gka.core_metric.bundle import CORE_SIZES, PAPER_TASKS
from nanochat_gka.core_metric.published import PAPER_CENTERED
from nanochat_gka.core_metric.report import Score, centered, error_of_mean, paper_score

# Accuracy of guessing in percent, as the bundle's eval_meta_data.csv has it.
GUESSING = {
    "hellaswag_zeroshot": 25.0,
    "copa": 50.0,
    "openbook_qa": 25.0,
    "lambada_openai": 0.0,
    "winograd": 50.0,
    "winogrande": 50.0,
}
BASE, GKA = 0, 1  # columns of the table
CAPS = range(20, max(CORE_SIZES[task] for task in PAPER_TASKS) + 1)


def printed(task: str, model: int) -> Score:
    """A cell of the table, as the accuracy that its digits stand for."""
    return paper_score(task, model, GUESSING[task])


def fits(task: str, model: int, cap: int) -> bool:
    """Whether some whole number of right answers out of min(cap, the task's size) prints the cell's four digits."""
    examples, wanted, baseline = min(cap, CORE_SIZES[task]), PAPER_CENTERED[task][model], GUESSING[task]
    right = round((wanted * (1 - baseline / 100) + baseline / 100) * examples)
    near = range(max(0, right - 1), min(examples, right + 1) + 1)
    return any(round(centered(count / examples, baseline), 4) == wanted for count in near)


def fitting_caps(model: int) -> list[int]:
    """The caps on examples that fit all six cells of a column; the last one stands for the full tasks."""
    return [cap for cap in CAPS if all(fits(task, model, cap) for task in PAPER_TASKS)]


def difference(base: Score, gka: Score) -> tuple[float, float]:
    """GKA - base of the centred scores, and its standard error from the examples that each was asked."""
    return gka.centered - base.centered, math.hypot(base.standard_error, gka.standard_error)


def mean_difference(base: list[Score], gka: list[Score]) -> tuple[float, float]:
    """GKA - base of the means over the tasks, and its standard error."""
    pairs = [difference(one, other) for one, other in zip(base, gka)]
    return sum(value for value, _ in pairs) / len(pairs), error_of_mean([error for _, error in pairs])
