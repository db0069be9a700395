"""A model's scores in a file, a line for every task and what it was scored on, so that an evaluation continues."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat_gka.core_metric.bundle import Task
from nanochat_gka.core_metric.report import Score, aggregate, error_of_mean, score_of
from nanochat_gka.core_metric.task_scorer import task_identity
from trainkit_gka.distributed import Runtime
from trainkit_gka.results import append_result, read_results


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with a name.

    step: of its training, None if it was not trained here. limit: tokens of its longest prompt. sha256: of its weights.
    about: a line for the user.
    """

    model: Any
    tokenizer: Any
    name: str
    step: int | None
    sha256: str
    limit: int
    about: str

    @property
    def label(self) -> str:
        """What the names of its files begin with."""
        return self.name if self.step is None else f"{self.name}_step{self.step:06d}"


@dataclass(frozen=True)
class ScoreFile:
    """The JSON-lines file in `folder` of one model's scores.

    max_per_task, max_seq_len: how its tasks are asked now.
    """

    folder: Path
    evaluated: EvaluatedModel
    runtime: Runtime
    max_per_task: int
    max_seq_len: int

    @property
    def path(self) -> Path:
        return self.folder / f"{self.evaluated.label}.jsonl"

    @property
    def csv(self) -> Path:
        """The table of the scores. Its name says which limits the tasks were asked with."""
        cropped = self.max_seq_len < self.evaluated.limit
        suffix = f"_max{self.max_per_task}" if self.max_per_task > 0 else ""
        suffix += f"_len{self.max_seq_len}" if cropped else ""
        return self.folder / f"{self.evaluated.label}{suffix}.csv"

    def identity(self, task: Task) -> dict[str, Any]:
        """What decides a score: the weights, the data, how it is asked. A line with this identity is not made again."""
        return {**self._model(), **task_identity(task), **self._limits()}

    def _model(self) -> dict[str, Any]:
        return {"model": self.evaluated.name, "step": self.evaluated.step, "weights": self.evaluated.sha256}

    def _limits(self) -> dict[str, int]:
        return {"max_per_task": self.max_per_task, "max_seq_len": self.max_seq_len}

    def score(self, task: Task) -> Score | None:
        """The task's score if the file has it. Raises OSError if the task's data cannot be read."""
        identity = self.identity(task)
        lines = [line for line in read_results(self.path, "accuracy", "examples") if line["config"] == identity]
        return self._score(task, lines[-1]["metrics"]) if lines else None

    def add(self, task: Task, metrics: dict[str, Any]) -> Score:
        """Append the metrics of `TaskScorer.measure`, on the main process."""
        if self.runtime.is_main:
            append_result(self.path, "core", self.identity(task), metrics, self.runtime.device, self.runtime.world_size)
        return self._score(task, metrics)

    def _score(self, task: Task, metrics: dict[str, Any]) -> Score:
        return score_of(task.label, {**metrics, "baseline": task.baseline, "shots": task.shots})

    def scores(self, tasks: list[Task]) -> list[Score]:
        """The scores of those tasks that the file has. A task whose data or baseline are missing is left out."""
        scores = []
        for task in tasks:
            with suppress(OSError):
                scores.append(self.score(task))
        return [score for score in scores if score is not None and score.baseline is not None]

    def add_mean(self, scores: list[Score]) -> tuple[str, float]:
        """Name and value of the mean, which also go to the file, once."""
        name, value = aggregate(scores)
        error = error_of_mean([score.standard_error for score in scores])
        config = {**self._model(), **self._limits(), "tasks": [score.label for score in scores]}
        metrics = {"name": name, "centered": value, "standard_error": error}
        if not any((line["config"], line["metrics"]) == (config, metrics) for line in read_results(self.path)):
            append_result(self.path, "core_mean", config, metrics, self.runtime.device, self.runtime.world_size)
        return name, value
