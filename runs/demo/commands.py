"""Run the project's own commands, one after another or side by side, showing each; an interrupt lets them save first."""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs.demo.outlook import Outlook
from trainkit.loop import finish_record
from trainkit.progress import console, progress_bar, read_events
from trainkit.workers import cores

LOOK_EVERY = 0.2  # seconds between two looks at the running commands
START_SECONDS = 6.0  # a command needs until it trains, most of them for importing PyTorch


def _command(module: str, flags, ranks: int = 1) -> list[str]:
    """The command line, shown as one would type it."""
    words = [module, *map(str, flags)]
    launcher = (
        ["-m"] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    )
    console.print(f"\n$ {shlex.join(['python', *launcher, *words])}", style="bold", highlight=False, markup=False)
    return [sys.executable, *launcher, *words]


def run(module: str, *flags) -> None:
    """Run one command; leave with its exit code if it fails. Ctrl-C lets it save first."""
    process = subprocess.Popen(_command(module, flags))
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if code:
        sys.exit(code)


@dataclass
class Job:
    """A training command whose log is followed: `folder` is the run's, `steps` how many it takes, `ranks` its processes.

    seconds: how long it is expected to take with one core of two, as `Outlook` wants it.
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
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "output.txt", "a+", errors="replace") as output:
            output.seek(0)
            self.printed = len(output.read())
            self.process = subprocess.Popen(_command(self.module, self.flags, self.ranks), stdout=output,
                                            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": str(threads)})  # fmt: skip


def expected_seconds(jobs: list[Job], at_once: int) -> float:
    """How long `run_side_by_side` should take."""
    return sum(job.seconds for job in jobs) / max(1, min(at_once, len(jobs)))


def run_side_by_side(jobs: list[Job], at_once: int, outlook: Outlook) -> None:
    """Run the jobs, `at_once` together with the cores shared among them; what each prints goes to its folder's output.txt.

    Leaves with the last line of the first failure, its file and its exit code. Ctrl-C lets all save first.
    """
    threads = max(1, cores() // at_once)
    waiting, running, total = list(jobs), [], sum(job.seconds for job in jobs)
    with progress_bar() as bar:
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
        except KeyboardInterrupt:
            for job in running:  # the terminal's Ctrl-C has reached them too
                job.process.wait()
            raise


def _fail(job: Job, others: list[Job]) -> None:
    for other in others:
        other.process.terminate()  # they save and leave
    for other in others:
        other.process.wait()
    output, code = job.folder / "output.txt", job.process.returncode
    last = output.read_text(errors="replace")[job.printed :].splitlines()[-1:]
    print(
        *last,
        f"error: {job.name} ended with exit code {code}; what it printed is in {output}",
        sep="\n",
        file=sys.stderr,
    )
    sys.exit(code if code > 0 else 128 - code)  # of a signal, as a shell has it
