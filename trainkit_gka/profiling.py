"""`--profile 10-15`: a trace of these steps on CPU and GPU by torch.profiler, in the format of Chrome."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainkit_gka.cli import UserError
from trainkit_gka.trainer import Trainer


def steps_of(text: str) -> range:
    """The steps of --profile, counted from 1: "10-15" is six steps, "10" one, "" none. Raises UserError."""
    if not text:
        return range(0)
    match = re.fullmatch(r"([1-9]\d*)(?:-(\d+))?", text, re.ASCII)
    steps = range(int(match[1]), int(match[2] or match[1]) + 1) if match else None
    if not steps:
        raise UserError(f"--profile takes the first and the last step, counted from 1, such as 10-15, got {text}")
    return steps


class Profiler:
    """Records the steps of --profile on rank 0, and what happens between them, such as a save.

    Raises UserError for steps that the run does not have.
    """

    def __init__(self, trainer: Trainer):
        self.word, self.folder, self.runtime = trainer.STEP, trainer.folder, trainer.runtime
        flag, done = trainer.config.profile, trainer.state["step"]
        self.steps = steps_of(flag)
        if self.steps and self.steps[-1] > trainer.steps:
            raise UserError(f"--profile {flag}: the run has {trainer.steps} {self.word}s")
        if self.steps and self.steps[-1] <= done:
            self.runtime.print(f"--profile {flag}: nothing to record, {self.word} {done} is done already")
        self.recorded: list[int] = []
        self.profile: torch.profiler.profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The context in which step `number` runs; it records the step if --profile names it."""
        if number not in self.steps or not self.runtime.is_main:
            yield
            return
        if self.profile is None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports a missing GPU as an error
            self.profile = torch.profiler.profile()  # of the CPU, and of the GPU if there is one
            self.profile.start()
        with torch.profiler.record_function(f"{self.word} {number}"):
            yield
        self.recorded.append(number)
        if number == self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the trace and print its path, unless that is done already."""
        profile, self.profile = self.profile, None
        if profile is not None:
            profile.stop()  # waits for the device
        if profile is not None and self.recorded:
            first, last = self.recorded[0], self.recorded[-1]
            path = self.folder / f"profile_{first}-{last}.json"
            profile.export_chrome_trace(str(path))
            self.runtime.print(f"profile of {self.word}s {first} to {last}: {path}; open it in https://ui.perfetto.dev")
