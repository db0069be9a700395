"""Scores: centring, standard errors, means, the table beside published figures."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanochat_gka.core_metric import published
from nanochat_gka.core_metric.published import CORE_SIZES, CORE_TASKS, GPT2_ACCURACY, PAPER_EXAMPLES, PAPER_TASKS
from trainkit_gka.progress import console

SMALLEST_AND_LARGEST = (0, 3)  # of the GPT-2 models
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
    examples: int

    @property
    def centered(self) -> float:
        return centered(self.accuracy, self.baseline)

    @property
    def standard_error(self) -> float:
        """Of the centred score: sqrt(p (1 - p) / n) of the accuracy, stretched as centring does."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.examples) / (1 - self.baseline / 100)


def score_of(label: str, metrics: dict[str, Any]) -> Score:
    """The score in a task's line of a results file."""
    return Score(label, metrics["accuracy"], metrics["baseline"], metrics["examples"])


def centered(accuracy: float, baseline: float) -> float:
    """Accuracy 0..1 moved and stretched so that guessing (baseline, in percent) is 0 and perfection 1."""
    return (accuracy - baseline / 100) / (1 - baseline / 100)


def aggregate(scores: Sequence[Score]) -> tuple[str, float, float]:
    """Name, value and standard error of the mean centred score.

    The name is "CORE" for all examples of exactly CORE's 22 tasks, and says what is missing otherwise.
    """
    value = sum(score.centered for score in scores) / len(scores)
    error = math.hypot(*(score.standard_error for score in scores)) / len(scores)
    complete = {score.label for score in scores} == set(CORE_TASKS)
    name = "CORE" if complete else f"mean of {len(scores)} task{'s' if len(scores) > 1 else ''}"
    if sampled := [score.examples for score in scores if score.examples < CORE_SIZES.get(score.label, 0)]:
        name = f"{'CORE estimate' if complete else name} (max {max(sampled)} each)"
    return name, value, error


def paper_score(label: str, model: int, baseline: float) -> Score:
    """The paper's score on one of its tasks, as the accuracy that its digits stand for. model: 0 the base, 1 GKA."""
    examples = min(PAPER_EXAMPLES[model] or CORE_SIZES[label], CORE_SIZES[label])
    accuracy = published.PAPER_CENTERED[label][model] * (1 - baseline / 100) + baseline / 100
    return Score(label, round(accuracy * examples) / examples, baseline, examples)


def show(scores: Sequence[Score], title: str) -> None:
    """Print the scores beside the paper's and GPT-2's. All but our accuracy are centred; ± is of the column before it.

    A file or a pipe gets the full width, a narrow terminal gets the table without GPT-2.
    """
    output = console if console.is_terminal else Console(width=WIDE)
    gpt2 = SMALLEST_AND_LARGEST if output.width >= WIDE else ()
    layout = dict(title_justify="left", caption_justify="left")
    table = Table(title=escape(title), caption=CAPTION, box=box.SIMPLE, padding=(0, 1, 0, 0), **layout)
    table.add_column("task", overflow="fold")
    paper = ("paper: base", "±", f"paper: GKA n={PAPER_EXAMPLES[1]}", "±")
    for heading in ("n", "accuracy", "centred", "±", *(published.GPT2_MODELS[model] for model in gpt2), *paper):
        table.add_column(heading, justify="right", min_width=5 if heading in ("n", "±") else 7, max_width=8)
    for score in scores:
        table.add_row(escape(score.label), f"{score.examples:,}", f"{score.accuracy:.4f}", *_cells([score], gpt2))
    table.add_section()
    means = {aggregate(scores)[0]: scores}
    six = [score for score in scores if score.label in PAPER_TASKS]
    if len(six) == len(PAPER_TASKS) < len(scores):
        means["mean of the paper's six"] = six
    for name, group in means.items():
        table.add_row(name, "", "", *_cells(group, gpt2), style="bold")
    output.print(table)


def _cells(scores: Sequence[Score], gpt2_models: Sequence[int]) -> list[str]:
    """The mean of these tasks and its error: ours, GPT-2's without error, the paper's as printed; empty where not."""
    (_, value, error), labels = aggregate(scores), {score.label for score in scores}
    gpt2, paper = [""] * len(gpt2_models), [""] * 4
    if labels <= GPT2_ACCURACY.keys():
        theirs = [[dataclasses.replace(s, accuracy=GPT2_ACCURACY[s.label][m]) for s in scores] for m in gpt2_models]
        gpt2 = [f"{aggregate(group)[1]:.4f}" for group in theirs]
    if labels <= set(PAPER_TASKS) and len(labels) in (1, len(PAPER_TASKS)):
        printed = published.PAPER_CENTERED[scores[0].label] if len(scores) == 1 else published.PAPER_MEAN
        errors = [aggregate([paper_score(s.label, model, s.baseline) for s in scores])[2] for model in range(2)]
        paper = [cell for mean, error in zip(printed, errors) for cell in (f"{mean:.4f}", f"{error:.3f}")]
    return [f"{value:.4f}", f"{error:.3f}", *gpt2, *paper]
