"""Command lines of the project's modules: one process, or torchrun for several; shown as one would type them."""

import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from runs import commands
from trainkit_gka import signals
from trainkit_gka.command import as_typed
from trainkit_gka.progress import console


def command(module: str, flags: Iterable[Any], ranks: int = 1) -> list[str]:
    """The words after `python` that run `module`, with `ranks` processes on this machine."""
    return [*commands.launch(module, ranks), *map(str, flags)]


def show(words: Sequence[str]) -> list[str]:
    """Print the command as one would type it; returns it with this interpreter before it."""
    typed = shlex.join([as_typed(sys.executable), *words])
    console.print(f"\n$ {typed}", style="bold", highlight=False, markup=False, soft_wrap=True)
    return [sys.executable, *words]


def run(words: Sequence[str]) -> None:
    """Show and run one command; leave with its exit code if it fails. Ctrl-C and other signals let it save first."""
    process = subprocess.Popen(show(words))
    with signals.passed_on(lambda: [process]):
        try:
            code = process.wait()
        except (KeyboardInterrupt, signals.Stopped):
            process.wait()
            raise
    if code:
        sys.exit(code)
