"""The commands of the installed package, such as gka-train-lm: each runs its module, as `python -m` does."""

import importlib
import runpy
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path

from trainkit_gka import interrupted
from trainkit_gka.extras import MissingExtra

GROUP = "gka.commands"  # pyproject.toml: the module of each command


def main() -> None:
    """Run the module of the command by which this process was started. Exits with 2 if an extra is missing."""
    signal.signal(signal.SIGINT, interrupted)
    (command,) = entry_points(group=GROUP, name=Path(sys.argv[0]).stem)
    try:
        importlib.import_module(command.value.partition(".")[0])
    except MissingExtra as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    runpy.run_module(command.value, run_name="__main__", alter_sys=True)
