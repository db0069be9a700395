"""The interface between the loop and a trainer: steps, evaluations and state, in the order of the loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.progress import Progress

from trainkit_gka import checkpoint
from trainkit_gka.checkpoint import Tensors
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime, Stop
from trainkit_gka.progress import Pace, RunLog
from trainkit_gka.run_config import RunConfig


@dataclass(frozen=True)
class Evaluation:
    """An evaluation between steps whose result goes into the log, such as scoring validation data.

    event, keys: of the record that `run` logs. Skipped if the log has a record of this step with all keys, as after a
    kill. every: period in steps; -1 = only after the last step, after which every evaluation runs. run: called on every
    process with the log, `stop` and the progress bar; raises Interrupted on every process when a signal comes to any
    (see `Runtime.rounds`). at_start: also before the first step.
    """

    event: str
    every: int
    run: Callable[[RunLog, Stop, Progress], None]
    keys: tuple[str, ...] = ()
    at_start: bool = False


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint beside the progress.

    tensors: groups by file name. about: JSON for state.json. files: copied into the checkpoint, by the copy's name.
    """

    tensors: dict[str, Tensors]
    about: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


class Trainer(ABC):
    """A run that `trainkit_gka.loop` trains. Methods are called on every process unless their docstring says otherwise.

    The constructor of a subclass takes its flags, the Runtime, and the checkpoint to continue from or None. It may
    raise UserError, but must not wait for other processes. It sets
        model: the weights; the loop copies those of rank 0 to every process
        steps: the length of the run
        state: the progress, JSON that checkpoints save; state["step"] counts the steps that are done
        evaluations: run in this order
        saves_every: periods in steps; a checkpoint is written at their multiples, before evaluations and at the end
        pace: `step` calls its `step`, which says whether to count the time of this one
    """

    KIND: ClassVar[str]  # of the line that a finished run adds to the results
    STEP: ClassVar[str] = "step"  # the word for a step in messages
    LOWER: ClassVar[str]  # the advice for a run that diverged
    FINISH_KEYS: ClassVar[tuple[str, ...]]  # of `summary`: a finish record that lacks one does not count
    NOT_IN_BEST: ClassVar[tuple[str, ...] | None] = None  # tensors that the best checkpoint lacks; None: there is none

    STEPS_NOT_TIMED: ClassVar[int] = 3  # the first of every process: they compile, start workers and fill caches

    model: torch.nn.Module
    steps: int

    def __init__(self, config: RunConfig, runtime: Runtime):
        self.config, self.runtime, self.folder = config, runtime, config.folder
        self.state: dict[str, Any] = {"step": 0}
        self.evaluations: list[Evaluation] = []
        self.saves_every = [config.save_every]
        self.pace = Pace(self.STEPS_NOT_TIMED)

    # In run order

    @abstractmethod
    def announce(self) -> dict[str, Any]:
        """Print what will be trained. Returns values for the log's start record."""

    @abstractmethod
    def step(self, asked_to_stop: bool) -> tuple[dict[str, float], bool]:
        """Train one step. Returns its numbers, and whether any process was asked to stop.

        Raises `self.diverged` before it would update the weights from a loss or a gradient that is not finite.
        """

    @abstractmethod
    def status(self, numbers: dict[str, float]) -> str:
        """The progress bar's text for a step with these numbers."""

    @abstractmethod
    def describe(self, numbers: dict[str, float]) -> tuple[str, dict[str, Any]]:
        """The printed line and the log's record of a step with these numbers."""

    @abstractmethod
    def contents(self) -> Contents:
        """The contents of a checkpoint now. May wait for other processes."""

    @abstractmethod
    def summary(self, log: RunLog) -> tuple[dict[str, Any], str]:
        """The numbers of the finished run, and the most important ones as text. On rank 0.

        Raises UserError if the run has no result.
        """

    # Defaults that most trainers keep

    def prepare(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Prepare what takes all processes, such as data that one of them fetches, before `announce`."""

    def check(self) -> dict[str, str]:
        """For --dry-run, on rank 0: check what `prepare` would open, and write nothing. Returns lines of the plan."""
        return {}

    def data_hashes(self) -> dict[str, str]:
        """Names of data and their hashes, which must be the same on every process."""
        return {}

    def warnings(self) -> dict[str, str]:
        """Warnings about weights that are finite but suspicious: a line of text by its subject, each logged once."""
        return {}

    def work(self) -> tuple[str, int, float | None]:
        """The unit that training counts, such as tokens; units per step; training FLOPs per unit, None if not known."""
        return f"{self.STEP}s", 1, None

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End worker processes and the like, however training ended."""

    # For subclasses

    def due(self, every: int) -> bool:
        """Whether this is the last step or one of every `every` (-1: never)."""
        step = self.state["step"]
        return step == self.steps or (every > 0 and step % every == 0)

    def evaluations_due(self) -> list[Evaluation]:
        """The evaluations that are due after the step that was just done."""
        started = self.state["step"] > 0
        return [one for one in self.evaluations if (self.due(one.every) if started else one.at_start)]

    def save(
        self, folder: str = "checkpoints", leave_out: tuple[str, ...] = (), keep: int | None = None, again: bool = False
    ) -> None:
        """Write a checkpoint into `folder` of the run, without the tensors in `leave_out`.

        again: overwrite an intact checkpoint of this step. Raises UserError, and writes nothing, if the weights are not
        finite or the disk takes no more, on every process.
        """
        if not self.is_finite():
            raise self.diverged("the weights are not finite", consequence="they were not saved")
        contents = self.contents()
        tensors = {name: group for name, group in contents.tensors.items() if name not in leave_out}
        state = {"train_config": self.config.identity(), "progress": self.state, **contents.about}
        place = self.folder / folder, self.state["step"]

        def write() -> None:
            if self.runtime.is_main:
                checkpoint.save(*place, tensors, state, contents.files, keep or self.config.keep, again)

        self.runtime.agree(write)  # which waits for it

    def is_finite(self) -> bool:
        """Whether every weight is finite."""
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def diverged(self, reason: str, details: str = "", consequence: str = "") -> UserError:
        """The error that ends a run whose numbers are not finite; it says which checkpoint is the last."""
        if not consequence:
            untouched, ruined = "the weights were not touched", f"an earlier {self.STEP} has ruined the weights"
            consequence = untouched if self.is_finite() else ruined
        last = f"Last checkpoint: {self.newest() or 'none was saved yet'}. Start a new --model-tag with {self.LOWER}"
        return UserError(f"{reason} at {self.STEP} {self.state['step']}{details}; {consequence}. {last}")

    def newest(self) -> Path | None:
        """The newest checkpoint, intact or not."""
        return next(iter(checkpoint.newest_first(self.folder / "checkpoints")), None)
