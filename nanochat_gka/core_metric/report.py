"""Scores: centring, standard errors, means, the CSV file in nanochat's format, the table beside published figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanochat_gka.core_metric.bundle import CORE_SIZES, CORE_TASKS, PAPER_TASKS
from nanochat_gka.core_metric.published import (
    GPT2_ACCURACY,
    GPT2_MODELS,
    PAPER_CENTERED,
    PAPER_EXAMPLES,
    PAPER_MEAN,
)
from trainkit_gka.files import atomic
from trainkit_gka.progress import console

WIDTHS = (35, 10, 10)  # of the CSV's columns
SHOWN_GPT2 = (0, 3)  # the smallest and the largest
WIDE = 124  # of the table in a file or a pipe
CAPTION = (
    "Centred scores, 0 is guessing; ± is one standard error, n the number of examples. GPT-2 124M and the paper's "
    f"base: full tasks; GPT-2 1.5B: at most 1,000 examples each; the paper's GKA: n = {PAPER_EXAMPLES[1]} (copa 100), "
    "which its digits show and its text does not say."
)


@dataclass(frozen=True)
class Score:
    """A model's result on one task: accuracy 0..1, `baseline` the accuracy of guessing in percent."""

    label: str
    accuracy: float
    baseline: float
    shots: int
    examples: int

    @property
    def centered(self) -> float:
        return centered(self.accuracy, self.baseline)

    @property
    def standard_error(self) -> float:
        return standard_error(self.accuracy, self.baseline, self.examples)


def score_of(label: str, metrics: dict[str, Any]) -> Score:
    """The score in a task's line of a results file."""
    return Score(label, metrics["accuracy"], metrics["baseline"], metrics.get("shots", 0), metrics["examples"])


def centered(accuracy: float, baseline: float) -> float:
    """Accuracy 0..1 moved and stretched so that guessing (baseline, in percent) is 0 and perfection 1."""
    return (accuracy - baseline / 100) / (1 - baseline / 100)


def standard_error(accuracy: float, baseline: float, examples: int) -> float:
    """Standard error of the centred score: sqrt(p (1 - p) / n) of the accuracy, stretched as centring does."""
    return math.sqrt(accuracy * (1 - accuracy) / examples) / (1 - baseline / 100)


def error_of_mean(errors: Sequence[float]) -> float:
    """Standard error of the mean of independent scores with these standard errors."""
    return math.hypot(*errors) / len(errors)


def aggregate(scores: Sequence[Score]) -> tuple[str, float]:
    """Name and value of the mean centred score.

    The name is "CORE" for all examples of exactly CORE's 22 tasks, and says what is missing otherwise.
    """
    value = sum(score.centered for score in scores) / len(scores)
    complete = {score.label for score in scores} == set(CORE_TASKS)
    name = "CORE" if complete else f"mean of {len(scores)} task{'s' if len(scores) > 1 else ''}"
    sampled = [score.examples for score in scores if score.examples < CORE_SIZES.get(score.label, 0)]
    return f"{'CORE estimate' if complete else name} (max {max(sampled)} each)" if sampled else name, value


def paper_score(label: str, model: int, baseline: float) -> Score:
    """The paper's score on one of its tasks, as the accuracy that its digits stand for.

    model: 0 is nanochat_base, 1 is GKA.
    """
    examples = min(PAPER_EXAMPLES[model] or CORE_SIZES[label], CORE_SIZES[label])
    accuracy = PAPER_CENTERED[label][model] * (1 - baseline / 100) + baseline / 100
    return Score(label, round(accuracy * examples) / examples, baseline, 0, examples)


def write_csv(path: Path, scores: Sequence[Score]) -> None:
    """Task, accuracy and centred score as nanochat writes them; the last row is the mean."""
    name, value = aggregate(scores)
    rows = [
        ("Task", "Accuracy", "Centered"),
        *((s.label, f"{s.accuracy:.6f}", f"{s.centered:.6f}") for s in scores),
        (name, "", f"{value:.6f}"),
    ]
    lines = [", ".join(cell.ljust(width) for cell, width in zip(row, WIDTHS)) + "\n" for row in rows]
    with atomic(path) as temporary:
        temporary.write_text("".join(lines))


def show(scores: Sequence[Score], title: str) -> None:
    """Print `table`. A file or a pipe gets its full width, a narrow terminal gets it without GPT-2."""
    output = console if console.is_terminal else Console(width=WIDE)
    output.print(table(scores, title, SHOWN_GPT2 if output.width >= WIDE else ()))


def table(scores: Sequence[Score], title: str, gpt2_models: Sequence[int] = SHOWN_GPT2) -> Table:
    """The scores beside the paper's and GPT-2's. All but our accuracy are centred; ± is of the column before it."""
    layout = dict(box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", caption_justify="left")
    printed = Table(title=escape(title), caption=CAPTION, **layout)
    printed.add_column("task", overflow="fold")
    paper = ("paper: base", "±", f"paper: GKA n={PAPER_EXAMPLES[1]}", "±")
    for heading in ("n", "accuracy", "centred", "±", *(GPT2_MODELS[model] for model in gpt2_models), *paper):
        printed.add_column(heading, justify="right", min_width=5 if heading in ("n", "±") else 7, max_width=8)
    for score in scores:
        numbers = [f"{score.examples:,}", f"{score.accuracy:.4f}", f"{score.centered:.4f}"]
        published = [*_gpt2_cells([score], gpt2_models), *_paper_cells([score])]
        printed.add_row(escape(score.label), *numbers, f"{score.standard_error:.3f}", *published)
    printed.add_section()
    means = [(aggregate(scores)[0], scores)]
    six = [score for score in scores if score.label in PAPER_TASKS]
    if len(six) == len(PAPER_TASKS) < len(scores):
        means.append(("mean of the paper's six", six))
    for name, group in means:
        error = error_of_mean([score.standard_error for score in group])
        published = [*_gpt2_cells(group, gpt2_models), *_paper_cells(group)]
        printed.add_row(name, "", "", f"{aggregate(group)[1]:.4f}", f"{error:.3f}", *published, style="bold")
    return printed


def _gpt2_cells(scores: Sequence[Score], models: Sequence[int]) -> list[str]:
    """The models' mean centred score on these tasks; empty where one is not published."""
    if not all(score.label in GPT2_ACCURACY for score in scores):
        return [""] * len(models)
    centred = [[centered(GPT2_ACCURACY[s.label][model], s.baseline) for s in scores] for model in models]
    return [f"{sum(values) / len(values):.4f}" for values in centred]


def _paper_cells(scores: Sequence[Score]) -> list[str]:
    """The centred score as printed and its standard error, of the paper's base and GKA.

    Of one of the paper's tasks or of all six; empty for others.
    """
    labels = {score.label for score in scores}
    if labels == set(PAPER_TASKS):
        values = PAPER_MEAN
    elif len(scores) == 1 and labels < set(PAPER_TASKS):
        values = PAPER_CENTERED[scores[0].label]
    else:
        return [""] * 4
    cells = []
    for model, value in enumerate(values):
        errors = [paper_score(score.label, model, score.baseline).standard_error for score in scores]
        cells += [f"{value:.4f}", f"{error_of_mean(errors):.3f}"]
    return cells
