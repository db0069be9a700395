"""A training as a command in the background: how it is started, and how its log is followed."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runs import launch
from trainkit_gka.loop import finish_record
from trainkit_gka.progress import read_events

START_SECONDS = 6.0  # what a command needs before it trains, most of it for importing PyTorch


@dataclass
class Job:
    """A command whose log is followed: `folder` is the run's, `steps` how many it takes, `ranks` its processes.

    seconds: how long it is expected to take with one core of two.
    """

    name: str
    module: str
    flags: list
    folder: Path
    steps: int
    seconds: float = 1.0
    ranks: int = 1
    finish_keys: tuple[str, ...] = ()  # what the record it ends with must have
    environment: dict[str, str] = field(default_factory=dict)  # beside this process's own
    process: subprocess.Popen | None = None
    printed: int = 0  # characters in its output.txt from earlier starts

    def finish(self) -> dict[str, Any] | None:
        """The record a finished run ends with, if it is whole."""
        return finish_record(self.folder, self.finish_keys)

    def progress(self) -> tuple[int, str]:
        """Steps done, and the last loss."""
        records = read_events(self.folder / "log.jsonl")
        losses = [record["loss"] for record in records if isinstance(record.get("loss"), float)]
        return max((record["step"] for record in records), default=0), f"loss {losses[-1]:.3f}" if losses else ""

    def start(self, threads: int) -> None:
        """Start the command with this many threads; what it prints goes to output.txt in its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "output.txt", "a+", errors="replace") as output:
            output.seek(0)
            self.printed = len(output.read())
            words = launch.show(launch.command(self.module, self.flags, self.ranks))
            environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": str(threads)}
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
