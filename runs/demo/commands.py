"""Run training commands side by side and follow their logs; an interrupt lets them save first."""

import sys
import time

from runs.demo.outlook import Outlook
from runs.jobs import Job
from trainkit_gka import signals
from trainkit_gka.progress import progress_bar
from trainkit_gka.workers import cores

LOOK_EVERY = 0.2  # seconds between two looks at the running commands


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
