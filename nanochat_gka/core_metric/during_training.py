"""CORE of a model while it trains: the bundle is read and checked before step 1, the model scored between steps."""

import time
from pathlib import Path
from typing import Any

from rich.progress import Progress

from nanochat_gka.core_metric.bundle import read_tasks
from nanochat_gka.core_metric.questions import shuffled
from nanochat_gka.core_metric.report import aggregate, error_of_mean, score_of
from nanochat_gka.core_metric.task_scorer import TaskScorer, check_enough, task_identity
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Stop
from trainkit_gka.progress import RunLog

TASK_KEYS = ("asked", "accuracy", "baseline", "examples")


class CoreMetric:
    """All tasks of a bundle, at most max_per_task examples of each (-1 = all).

    Raises UserError for a bundle with anything wrong in it.
    """

    def __init__(self, scorer: TaskScorer, bundle: Path, max_per_task: int):
        self.scorer, self.runtime = scorer, scorer.runtime
        tasks = read_tasks(bundle)
        check_enough(tasks, max_per_task, "--core-metric-max-per-task")
        self.tasks = [(task, shuffled(task.examples(), max_per_task)) for task in tasks]
        limits = {"max_per_task": max_per_task, "max_seq_len": scorer.max_seq_len}
        self.identities = {task.label: {**task_identity(task), **limits} for task in tasks}

    def score(self, log: RunLog, step: int, stop: Stop, bar: Progress) -> None:
        """Score the model and log it as event "core". Raises Interrupted if a signal comes first.

        Tasks that are in the log by then are not scored again.
        """
        started = time.perf_counter()
        for task, examples in self.tasks:
            if self.runtime.any(log.enabled and task.label in self._known(log, step)):
                continue
            try:
                metrics = self.scorer.measure(task, examples, bar, stop)
            except UserError as error:  # this task has no score; the run goes on
                self.runtime.print(f"warning: {error}; the mean of step {step} leaves it out")
                continue
            log.log("core_task", step, chart=False, asked=self.identities[task.label], **metrics)
        if log.enabled:
            self._report(log, step, time.perf_counter() - started)

    def _known(self, log: RunLog, step: int) -> dict[str, dict[str, Any]]:
        """The log's lines of this step's tasks, asked as they are asked now, by label."""
        lines = [line for line in log.records("core_task", *TASK_KEYS) if line["step"] == step]
        return {line["asked"]["task"]: line for line in lines if line["asked"] in self.identities.values()}

    def _report(self, log: RunLog, step: int, seconds: float) -> None:
        scores = [score_of(label, line) for label, line in self._known(log, step).items()]
        if not scores:
            text = f"step {step:05d} | no task of CORE could be scored"
            log.log("core", step, text, name="no task", metric=None, standard_error=None)
            return
        (name, value), error = aggregate(scores), error_of_mean([score.standard_error for score in scores])
        text = f"step {step:05d} | {name} {value:.4f} ± {error:.4f} | {seconds:.0f} s"
        by_task = {score.label: score.centered for score in scores}
        log.log("core", step, text, name=name, metric=value, standard_error=error, centered=by_task)
