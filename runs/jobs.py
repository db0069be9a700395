"""Commands: one in the foreground, or several side by side whose logs are followed."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit_gka import signals
from trainkit_gka.command import OUR_TORCHRUN, as_typed
from trainkit_gka.loop import finish_record
from trainkit_gka.progress import console, progress_bar, read_events
from trainkit_gka.workers import cores

START_SECONDS = 6.0  # what a command needs before it trains, most of it for importing PyTorch
POLL_SECONDS, LINE_SECONDS = 0.2, 15.0  # between looks at the logs; between lines where there is no terminal


def start(module: str, flags: Sequence[Any], ranks: int = 1, **options: Any) -> subprocess.Popen:
    """Start a module in `ranks` processes, and print the command as one would type it. options: of Popen."""
    torchrun = ["-m", OUR_TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), "-m", "--"] if ranks > 1 else ["-m"]
    words = [*torchrun, module, *map(str, flags)]
    typed = shlex.join([as_typed(sys.executable), *words])
    console.print(f"\n$ {typed}", style="bold", highlight=False, markup=False, soft_wrap=True)
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


@dataclass
class Job:
    """A command in the background whose log is followed.

    folder: of its log and its output. steps: how many it takes. seconds: how long it should take with one core of two.
    finish_keys: what the record at the end of its log must have. environment: further variables.
    """

    name: str
    module: str
    flags: list
    folder: Path
    steps: int
    seconds: float = 1.0
    ranks: int = 1
    finish_keys: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    previous_output: int = 0  # characters that earlier starts printed

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
        output = (self.folder / "output.txt").read_text(errors="replace")
        return output[self.previous_output :].strip().splitlines()

    def start(self, threads: int) -> None:
        """Start the command with this many threads; what it prints goes to output.txt in its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": str(threads)}
        with open(self.folder / "output.txt", "a+", errors="replace") as output:
            output.seek(0)
            self.previous_output = len(output.read())
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            self.process = start(self.module, self.flags, self.ranks, env=environment, **streams)


def run_side_by_side(jobs: list[Job], at_once: int) -> None:
    """Run the jobs, `at_once` together with the cores shared among them.

    Leaves with the last line of the first failure, its file and its exit code. Ctrl-C and other signals let all save
    first.
    """
    threads, printed = max(1, cores() // at_once), time.monotonic()
    waiting, running = list(jobs), []
    total = sum(job.seconds for job in jobs)
    with progress_bar() as bar, signals.passed_on(lambda: [job.process for job in running]):
        tasks = {job.name: bar.add_task(job.name, total=job.steps, status="") for job in jobs}
        all_jobs = bar.add_task("all of it", total=total, status="")
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    waiting[0].start(threads)
                    running.append(waiting.pop(0))
                time.sleep(POLL_SECONDS)
                done, lines = total - sum(job.seconds for job in [*waiting, *running]), []
                for job in list(running):
                    step, status = job.progress()
                    if job.process.poll() is not None:
                        running.remove(job)
                        if job.process.returncode:
                            leave_with(job, running)
                        step = job.steps
                    done += job.seconds * min(1.0, step / job.steps)
                    bar.update(tasks[job.name], completed=step, status=status)
                    lines.append(f"{job.name}: step {step:,} of {job.steps:,}")
                bar.update(all_jobs, completed=done)
                if not console.is_terminal and time.monotonic() - printed > LINE_SECONDS:
                    printed = time.monotonic()
                    console.print(f"  {', '.join(lines)}; {done / total:.0%} in all", highlight=False, markup=False)
        except (KeyboardInterrupt, signals.Stopped):
            for job in running:  # they have the signal too
                job.process.wait()
            raise


def end(jobs: Iterable[Job]) -> None:
    """Ask the jobs that still run to end, and wait: they save first."""
    jobs = list(jobs)
    for job in jobs:
        job.process.terminate()
    for job in jobs:
        job.process.wait()


def leave_with(failed: Job, running: list[Job]) -> None:
    """End the jobs that still run, and leave with the failed job's last line and exit code."""
    end(running)
    code = failed.process.returncode
    message = f"error: {failed.name} ended with exit code {code}; what it printed is in {failed.folder / 'output.txt'}"
    print(*failed.printed()[-1:], message, sep="\n", file=sys.stderr)
    sys.exit(code if code > 0 else 128 - code)  # a signal's, as in a shell
