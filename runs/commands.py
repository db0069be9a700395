"""Run the project's own commands, one after another or side by side, showing each; an interrupt lets them save first."""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gka.runtime.progress import console, progress_bar, read_events


def _command(module: str, flags, ranks: int = 1) -> list[str]:
    """The command line, shown as one would type it."""
    words = [module, *map(str, flags)]
    launcher = ["-m"] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    console.print(f"\n$ {shlex.join(['python', *launcher, *words])}", style="bold", highlight=False, markup=False)
    return [sys.executable, *launcher, *words]


def run(module: str, *flags, ranks: int = 1) -> None:
    """Run one command; leave with its exit code if it fails. Ctrl-C lets it save first."""
    process = subprocess.Popen(_command(module, flags, ranks))
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    if code:
        sys.exit(code)


@dataclass
class Job:
    """A command whose training log is followed. `folder`: the run's."""

    name: str
    module: str
    flags: list
    folder: Path
    process: subprocess.Popen | None = None
    printed: int = 0  # characters in its output.txt from earlier starts

    def steps(self) -> int:
        return max((record["step"] for record in read_events(self.folder / "log.jsonl")), default=0)


def run_side_by_side(jobs: list[Job], at_once: int, total_steps: int) -> None:
    """Run the jobs, `at_once` together with the cores shared among them; what each prints goes to its folder's output.txt.

    Leaves with the last line of the first failure, its file and its exit code. Ctrl-C lets all save first.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // at_once))
    waiting, running = list(jobs), []
    with progress_bar() as bar:
        tasks = {job.name: bar.add_task(job.name, total=total_steps, status="") for job in jobs}
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.pop(0)
                    job.folder.mkdir(parents=True, exist_ok=True)
                    with open(job.folder / "output.txt", "a+", errors="replace") as output:
                        output.seek(0)
                        job.printed = len(output.read())
                        job.process = subprocess.Popen(_command(job.module, job.flags), stdout=output, stderr=subprocess.STDOUT,
                                                       env={**os.environ, "OMP_NUM_THREADS": threads})  # fmt: skip
                    running.append(job)
                time.sleep(0.2)
                for job in list(running):
                    bar.update(tasks[job.name], completed=job.steps())
                    if job.process.poll() is not None:
                        running.remove(job)
                        if job.process.returncode:
                            _fail(job, running)
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
    print(*last, f"error: {job.name} ended with exit code {code}; what it printed is in {output}", sep="\n", file=sys.stderr)
    sys.exit(code if code > 0 else 128 - code)  # of a signal, as a shell has it
