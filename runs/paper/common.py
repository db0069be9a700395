"""What the experiments share: the settings of the Makefile as flags, and how a trainer is started."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from runs import launch
from trainkit_gka import cli
from trainkit_gka.cli import Count

Config = TypeVar("Config", bound="Experiment")


@dataclass
class Experiment:
    """The flags that every experiment has. What follows `--` goes to the command that it starts."""

    base: Path = Path("out")
    """Folder of all outputs: runs go to BASE/runs, their numbers to BASE/results.jsonl."""
    ngpu: Count = 1
    """Processes on this machine, one for each GPU."""
    torchrun: str = ""
    """Flags for torchrun beside the number of processes (the Makefile's NNODES, RDZV and RESTARTS)."""

    def command(self, module: str, flags: list[Any]) -> list[str]:
        """The words after `python` that run `module` in these processes."""
        return launch.command(module, flags, self.ngpu, self.torchrun)


@dataclass
class Training(Experiment):
    """The flags of the experiments that train."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Log to Weights & Biases."""


def run(main: Callable[[Config, list[str]], None], config_class: type[Config]) -> None:
    """Parse the command line and call `main` with the flags and what follows `--`."""
    own, extra = split(sys.argv[1:])
    cli.run(lambda config: main(config, extra), config_class, own)


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first `--`."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def become(words: list[str]) -> None:
    """Show the command and let it take this process's place, so that signals and the exit code are its own."""
    shown = launch.show(words)
    sys.stdout.flush()
    os.execv(shown[0], shown)
