"""Run training commands side by side and follow their logs; an interrupt lets them save first."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import launch
from runs.demo.outlook import Outlook
from trainkit_gka import signals
from trainkit_gka.loop import finish_record
from trainkit_gka.progress import progress_bar, read_events
from trainkit_gka.workers import cores

LOOK_EVERY = 0.2  # seconds between two looks at the running commands
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
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)


def expected_seconds(jobs: list[Job], at_once: int) -> float:
    """How long `run_side_by_side` should take."""
    return sum(job.seconds for job in jobs) / max(1, min(at_once, len(jobs)))


def run_side_by_side(jobs: list[Job], at_once: int, outlook: Outlook) -> None:
    """Run the jobs, `at_once` together with the cores shared among them.

    Leaves with the last line of the first failure, its file and its exit code. Ctrl-C and other signals let all save
    first.
    """
    threads = max(1, cores() // at_once)
    waiting, total = list(jobs), sum(job.seconds for job in jobs)
    running: list[Job] = []
    with progress_bar() as bar, signals.passed_on(lambda: [job.process for job in running]):
        tasks = {job.name: bar.add_task(job.name, total=job.steps, status="") for job in jobs}
        whole = bar.add_task("all of it", total=1, status="")
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    waiting[0].start(threads)
                    running.append(waiting.pop(0))
                time.sleep(LOOK_EVERY)
                seen = {job.name: job.progress() for job in running}
                for job in list(running):
                    step, status = seen[job.name]
                    bar.update(tasks[job.name], completed=step, status=status)
                    if job.process.poll() is not None:
                        running.remove(job)
                        bar.update(tasks[job.name], completed=job.steps)
                        if job.process.returncode:
                            _fail(job, running)
                parts = {job.name: min(1.0, seen[job.name][0] / job.steps) for job in running}
                done = sum(job.seconds * parts.get(job.name, 1.0) for job in jobs if job not in waiting)
                outlook.advance(done / total)
                bar.update(whole, completed=done / total, status=outlook.sentence())
                outlook.say(", ".join(f"{job.name}: step {seen[job.name][0]:,} of {job.steps:,}" for job in running))
        except (KeyboardInterrupt, signals.Stopped):
            for job in running:  # a signal has reached them too
                job.process.wait()
            raise


def _fail(job: Job, running: list[Job]) -> None:
    """End the jobs that still run, which save first, and leave with the failed job's last line and exit code."""
    for other in running:
        other.process.terminate()
    for other in running:
        other.process.wait()
    output, code = job.folder / "output.txt", job.process.returncode
    last = output.read_text(errors="replace")[job.printed :].splitlines()[-1:]
    print(
        *last,
        f"error: {job.name} ended with exit code {code}; what it printed is in {output}",
        sep="\n",
        file=sys.stderr,
    )
    sys.exit(code if code > 0 else 128 - code)  # a signal's, as in a shell
