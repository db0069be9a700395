"""Commands: one in the foreground, or several side by side whose logs are followed."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit_gka import signals
from trainkit_gka.command import LAUNCHER, OUR_TORCHRUN, as_typed
from trainkit_gka.loop import finish_record
from trainkit_gka.progress import console, progress_bar, read_events
from trainkit_gka.workers import cores

START_SECONDS = 6.0  # what a command needs before it trains, most of it for importing PyTorch
POLL_SECONDS = 0.2  # between looks at the logs
OUTPUT = "output.txt"  # in the folder of a job


def start(module: str, flags: Sequence[Any], ranks: int = 1, **options: Any) -> subprocess.Popen:
    """Start a module in `ranks` processes, and print the command as one would type it. options: of Popen."""
    torchrun = ["-m", OUR_TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), "-m", "--"] if ranks > 1 else ["-m"]
    words = [*torchrun, module, *map(str, flags)]
    typed = shlex.join([as_typed(sys.executable), *words])
    console.print(f"\n$ {typed}", style="bold", highlight=False, markup=False, soft_wrap=True)
    options["env"] = {**options.get("env", os.environ), LAUNCHER: str(os.getpid())}
    return subprocess.Popen([sys.executable, *words], **options)


def run(module: str, flags: Sequence[Any]) -> None:
    """Run one command and leave with its exit code if it fails. Ctrl-C and other signals let it save first."""
    process = start(module, flags)
    with signals.passed_on(lambda: [process]):
        try:
            code = process.wait()
        except (KeyboardInterrupt, signals.Stopped):
            process.wait()
            raise
    if code:
        sys.exit(code)


@dataclass(eq=False)
class Job:
    """A command in the background whose log is followed.

    folder: of its log and its output. steps: how many it takes. cost: its work, in a unit that all jobs share.
    finish_keys: what the record at the end of its log must have. environment: further variables.
    """

    name: str
    module: str
    flags: list
    folder: Path
    steps: int
    cost: float = 1.0
    ranks: int = 1
    finish_keys: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None

    def finish(self) -> dict[str, Any] | None:
        """The record at the end of a finished run's log."""
        return finish_record(self.folder, self.finish_keys)

    def progress(self) -> tuple[int, str]:
        """Steps done, and the last loss."""
        records = read_events(self.folder / "log.jsonl")
        losses = [record["loss"] for record in records if isinstance(record.get("loss"), float)]
        return max((record["step"] for record in records), default=0), f"loss {losses[-1]:.3f}" if losses else ""

    def printed(self) -> list[str]:
        """The lines that the newest start printed."""
        return (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace").strip().splitlines()

    def start(self, threads: int) -> None:
        """Start the command with this many threads; what it prints goes to OUTPUT in its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": str(threads)}
        with open(self.folder / OUTPUT, "wb") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            self.process = start(self.module, self.flags, self.ranks, env=environment, **streams)


class SideBySide:
    """Runs jobs, `at_once` together with the cores shared among them. Ctrl-C and other signals let all save first."""

    LINE_SECONDS = 15.0  # between lines where there is no terminal

    def __init__(self, jobs: list[Any], at_once: int):
        self.jobs, self.at_once = jobs, at_once
        self.running: list[Any] = []

    def remaining(self) -> list[Any]:
        """The jobs that have not ended."""
        return [job for job in self.jobs if job.process is None or job in self.running]

    def may_start(self, job: Any) -> bool:
        """Whether a remaining job that does not run may start now."""
        return True

    def ended(self, job: Any) -> None:
        """Called when a job has ended: leaves with the last line, the file and the exit code of one that failed."""
        if code := job.process.returncode:
            message = f"error: {job.name} ended with exit code {code}; what it printed is in {job.folder / OUTPUT}"
            print(*job.printed()[-1:], message, sep="\n", file=sys.stderr)
            sys.exit(code if code > 0 else 128 - code)  # a signal's, as in a shell

    def run(self) -> None:
        """Run until nothing remains."""
        tasks: dict[Any, Any] = {}
        total, printed = sum(job.cost for job in self.jobs), time.monotonic()
        with progress_bar() as bar, signals.passed_on(lambda: [job.process for job in self.running]):
            all_jobs = bar.add_task("all of it", total=100, status="")
            try:
                while remaining := self._look():
                    cost, lines = sum(job.cost for job in remaining), []
                    for job in tasks.keys() - self.running:
                        bar.remove_task(tasks.pop(job))
                    for job in self.running:
                        step, status = job.progress()
                        if job not in tasks:
                            tasks[job] = bar.add_task(job.name, total=job.steps, status="")
                        bar.update(tasks[job], completed=step, status=status)
                        cost -= job.cost * min(1.0, step / job.steps)
                        lines.append(f"{job.name}: step {step:,} of {job.steps:,}")
                    bar.update(all_jobs, completed=100 * (1 - cost / total))
                    if not console.is_terminal and time.monotonic() - printed > self.LINE_SECONDS:
                        printed = time.monotonic()
                        text = f"  {', '.join(lines)}; {1 - cost / total:.0%} in all"
                        console.print(text, highlight=False, markup=False)
                    time.sleep(POLL_SECONDS)
            except BaseException as error:
                for job in self.running if not isinstance(error, signals.Stopped) else ():  # they have that signal
                    job.process.terminate()
                for job in self.running:
                    job.process.wait()
                raise

    def _look(self) -> list[Any]:
        """Take out the jobs that have ended, and start others. Returns those that remain."""
        for job in [job for job in self.running if job.process.poll() is not None]:
            self.running.remove(job)
            self.ended(job)
        remaining = self.remaining()
        for job in remaining:
            if len(self.running) < self.at_once and job not in self.running and self.may_start(job):
                job.start(max(1, cores() // self.at_once))
                self.running.append(job)
        return remaining
