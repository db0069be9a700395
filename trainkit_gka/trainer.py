"""What the loop asks of a trainer: its steps, its evaluations and its state, in the order in which the loop does."""

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
from trainkit_gka.progress import RunLog
from trainkit_gka.run_config import RunConfig


@dataclass(frozen=True)
class Evaluation:
    """What a run does between its steps and writes into its log, such as scoring validation data.

    event, keys: of the record that `run` logs. If the log has one of this step with all keys, as after a kill, it is
    not done again. every: steps between two; -1 does it after the last step alone, as all do. run: called with the log,
    `stop` and the progress bar on every process; it raises Interrupted, on every process, when a signal comes to any
    (see `Runtime.rounds`). at_start: whether it is done before the first step too.
    """

    event: str
    every: int
    run: Callable[[RunLog, Stop, Progress], None]
    keys: tuple[str, ...] = ()
    at_start: bool = False


@dataclass(frozen=True)
class Kept:
    """What a checkpoint keeps beside the progress.

    tensors: by file. about: JSON. files: of which it takes copies, by the copy's name.
    """

    tensors: dict[str, Tensors]
    about: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


class Trainer(ABC):
    """A run that `trainkit_gka.loop` trains. Everything is called on every process unless its docstring says otherwise.

    A subclass is built with its flags, where it runs, and the checkpoint that it continues from, if there is one. Its
    constructor may raise UserError, but must not wait for other processes. It sets
        model: the weights; the loop gives every process those of rank 0
        steps: the length of the run
        state: the progress that a checkpoint keeps, JSON; state["step"] counts the steps that are done
        evaluations: in the order in which they are done; `announce` may still add some
        saves_every: numbers of steps; a checkpoint is written at their multiples, before evaluations and at the end
    """

    KIND: ClassVar[str]  # of the line that a finished run adds to the results
    STEP: ClassVar[str] = "step"  # the word for one in messages
    LOWER: ClassVar[str]  # the advice for a run that diverged
    FINISH_KEYS: ClassVar[tuple[str, ...]]  # of `summary`: a record of the end that lacks one does not count
    NOT_IN_BEST: ClassVar[tuple[str, ...] | None] = None  # tensors that a checkpoint of the best weights, if any, lacks

    model: torch.nn.Module
    steps: int

    def __init__(self, config: RunConfig, runtime: Runtime):
        self.config, self.runtime, self.folder = config, runtime, config.folder
        self.state: dict[str, Any] = {"step": 0}
        self.evaluations: list[Evaluation] = []
        self.saves_every = [config.save_every]

    # In run order

    @abstractmethod
    def announce(self) -> dict[str, Any]:
        """Print what will be trained and prepare what takes all processes. Returns what the log's start record adds."""

    @abstractmethod
    def step(self, asked_to_stop: bool) -> tuple[dict[str, float], bool]:
        """Train one step. Returns its numbers, and whether any process was asked to stop.

        Raises `self.diverged` instead of touching the weights with a loss or a gradient that is not finite.
        """

    @abstractmethod
    def status(self, numbers: dict[str, float]) -> str:
        """A few words for the progress bar about a step with these numbers."""

    @abstractmethod
    def describe(self, numbers: dict[str, float]) -> tuple[str, dict[str, Any]]:
        """The printed line and the log's record of a step with these numbers."""

    @abstractmethod
    def kept(self) -> Kept:
        """What a checkpoint keeps. Waiting for other processes is fine here."""

    @abstractmethod
    def summary(self, log: RunLog) -> tuple[dict[str, Any], str]:
        """The numbers of the finished run, and the most important ones in words. On rank 0.

        Raises UserError if the run has no result.
        """

    # What most trainers need not change

    def identity(self) -> dict[str, str]:
        """What must be the same for every process beside the progress: by its name, a hash or a few words."""
        return {}

    def warnings(self) -> dict[str, str]:
        """What is wrong with the weights though their numbers are finite: a line for each, by what it is about."""
        return {}

    def work(self) -> tuple[str, int, float | None]:
        """What training counts, such as tokens; how many of them a step takes; the training FLOPs of one, if known."""
        return f"{self.STEP}s", 1, None

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End what training started, such as worker processes, however training ended."""

    # What subclasses share

    def due(self, every: int) -> bool:
        """Whether this is the last step or one of every `every` (-1: never)."""
        step = self.state["step"]
        return step == self.steps or (every > 0 and step % every == 0)

    def evaluations_due(self) -> list[Evaluation]:
        """Those that belong to the step that is done."""
        started = self.state["step"] > 0
        return [one for one in self.evaluations if (self.due(one.every) if started else one.at_start)]

    def save(
        self,
        folder: str = "checkpoints",
        leave_out: tuple[str, ...] = (),
        keep: int | None = None,
        again: bool = False,
    ) -> None:
        """Write a checkpoint into `folder` of the run, without the tensors in `leave_out`.

        again: also in the place of an intact one of this step. Raises UserError for weights that are not finite, before
        they take the place of some that are.
        """
        if not self.is_finite():
            raise self.diverged("the weights are not finite", consequence="they were not saved")
        kept = self.kept()
        tensors = {name: group for name, group in kept.tensors.items() if name not in leave_out}
        if self.runtime.is_main:
            state = {"train_config": self.config.identity(), "progress": self.state, **kept.about}
            keep = keep or self.config.keep
            checkpoint.save(self.folder / folder, self.state["step"], tensors, state, kept.files, keep, again)
        self.runtime.barrier()

    def is_finite(self) -> bool:
        """Whether every weight is; once one is not, it stays so."""
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def diverged(self, reason: str, details: str = "", consequence: str = "") -> UserError:
        """The error that ends a run whose numbers are not finite, with the weights' state and the last checkpoint."""
        if not consequence:
            ruined = f"an earlier {self.STEP} has ruined the weights"
            consequence = "the weights were not touched" if self.is_finite() else ruined
        saved = sorted((self.folder / "checkpoints").glob("step_*"))
        return UserError(
            f"{reason} at {self.STEP} {self.state['step']}{details}; {consequence}. Last checkpoint: "
            f"{saved[-1] if saved else 'none was saved yet'}. Start a new --model-tag with {self.LOWER}"
        )
