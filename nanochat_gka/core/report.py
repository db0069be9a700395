"""Scores: centring, their mean, the CSV file in nanochat's format, and the table beside published figures."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gka.runtime.files import atomic
from gka.runtime.progress import console
from nanochat_gka.core.bundle import CORE_TASKS, PAPER_TASKS
from nanochat_gka.core.published import GPT2_ACCURACY, GPT2_CORE, GPT2_MODELS, PAPER_CENTERED, PAPER_MEAN

WIDTHS = (35, 10, 10)  # of the CSV's columns
SHOWN_GPT2 = (0, 3)  # the smallest and the largest
WIDE = 120  # of the table in a file or a pipe


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


def centered(accuracy: float, baseline: float) -> float:
    """Accuracy 0..1 moved and stretched so that guessing (baseline, in percent) is 0 and perfection 1."""
    return (accuracy - baseline / 100) / (1 - baseline / 100)


def aggregate(scores: Sequence[Score]) -> tuple[str, float]:
    """Name and value of the mean centred score: "CORE" if these are exactly CORE's 22 tasks."""
    value = sum(score.centered for score in scores) / len(scores)
    return "CORE" if {score.label for score in scores} == set(CORE_TASKS) else f"mean of {len(scores)} tasks", value


def write_csv(path: Path, scores: Sequence[Score]) -> None:
    """Task, accuracy and centred score as nanochat writes them; the last row is the mean."""
    name, value = aggregate(scores)
    rows = [("Task", "Accuracy", "Centered"), *((s.label, f"{s.accuracy:.6f}", f"{s.centered:.6f}") for s in scores), (name, "", f"{value:.6f}")]
    with atomic(path) as temporary:
        temporary.write_text("".join(", ".join(cell.ljust(width) for cell, width in zip(row, WIDTHS)) + "\n" for row in rows))


def show(scores: Sequence[Score], title: str) -> None:
    """Print `table`; in full width where there is no terminal."""
    (console if console.is_terminal else Console(width=WIDE)).print(table(scores, title))


def table(scores: Sequence[Score], title: str) -> Table:
    """The scores beside the paper's and GPT-2's; centred, but for our accuracy."""
    headings = [*(GPT2_MODELS[i] for i in SHOWN_GPT2), "paper: base", "paper: GKA"]
    caption = "Centred scores; 0 is guessing. n: examples. GPT-2 and the paper were scored on the full tasks."
    shown = Table(title=escape(title), title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("task", overflow="fold")
    for heading in ("n", "accuracy", "centred", *headings):
        shown.add_column(heading, justify="right", style="dim" if heading in headings else None, min_width=6, max_width=8)
    for score in scores:
        gpt2 = [f"{centered(GPT2_ACCURACY[score.label][i], score.baseline):.4f}" if score.label in GPT2_ACCURACY else "" for i in SHOWN_GPT2]
        paper = [f"{value:.4f}" for value in PAPER_CENTERED.get(score.label, ())] or ["", ""]
        shown.add_row(escape(score.label), f"{score.examples:,}", f"{score.accuracy:.4f}", f"{score.centered:.4f}", *gpt2, *paper)
    shown.add_section()
    means = [(aggregate(scores), {score.label for score in scores})]
    six = [score for score in scores if score.label in PAPER_TASKS]
    if len(six) == len(PAPER_TASKS) < len(scores):
        means.append((("mean of the paper's six", aggregate(six)[1]), set(PAPER_TASKS)))
    for (name, value), labels in means:
        gpt2 = [f"{_gpt2_mean(labels, scores, i):.4f}" if labels <= set(GPT2_ACCURACY) else "" for i in SHOWN_GPT2]
        paper = [f"{value:.4f}" for value in PAPER_MEAN] if labels == set(PAPER_TASKS) else ["", ""]
        shown.add_row(name, "", "", f"{value:.4f}", *gpt2, *paper, style="bold")
    return shown


def _gpt2_mean(labels: set[str], scores: Sequence[Score], model: int) -> float:
    if labels == set(CORE_TASKS):
        return GPT2_CORE[model]
    chosen = [score for score in scores if score.label in labels]
    return sum(centered(GPT2_ACCURACY[score.label][model], score.baseline) for score in chosen) / len(chosen)
