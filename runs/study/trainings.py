"""Train trials, some at a time, until none is left or a signal comes; every outcome becomes a row."""

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator

from runs.jobs import Job
from runs.study.ledger import Ledger
from trainkit_gka import signals
from trainkit_gka.progress import console, progress_bar

LOOK_EVERY = 0.3  # seconds between two looks at the running trainings
MOST_STARTS = 3  # of a training that a signal ended, such as the system's when memory is short


class Trainings:
    """Trainings that run side by side, each with `threads` threads."""

    def __init__(self, study: Ledger, at_once: int, threads: int, device_type: str):
        self.study, self.at_once, self.threads, self.device_type = study, at_once, threads, device_type
        self.running: dict[object, Job] = {}
        self.starts: Counter = Counter()
        self.recorded = 0  # rows of finished trials by this object
        self.failed: set = set()  # here, where they are not tried again
        self.stopping = False

    def run(self, only=None) -> bool:
        """Train what is left, or one trial. Returns False if a signal ended it; trainings have saved then."""
        with stop_on_signals(self._stop), progress_bar() as bar:
            whole, tasks = bar.add_task("study", total=None, status=""), {}
            while waiting := self._look(only):
                for trial in list(tasks):
                    if trial not in self.running:
                        bar.remove_task(tasks.pop(trial))
                for trial, job in self.running.items():
                    if trial not in tasks:
                        tasks[trial] = bar.add_task(trial.label, total=job.steps, status="")
                    step, status = job.progress()
                    bar.update(tasks[trial], completed=step, status=status)
                bar.update(whole, completed=self.recorded, total=self.recorded + waiting, status=f"{waiting} left")
                time.sleep(LOOK_EVERY)
        return not self.stopping

    def _look(self, only) -> int:
        """Record what has ended, start what is next. Returns how many trials are left or run; 0 ends it all."""
        for trial, job in list(self.running.items()):
            if job.process.poll() is not None:
                del self.running[trial]
                self._ended(trial, job)
        if self.stopping:
            return len(self.running)
        left = [trial for trial in self.study.left() if only in (None, trial) and trial not in self.failed]
        for trial in left:
            if len(self.running) >= self.at_once:
                break
            if trial not in self.running and not self.study.is_busy(trial) and not self.study.collect(trial):
                self._start(trial)
        return len(left)

    def _start(self, trial) -> None:
        job = self.study.job(trial, self.device_type)
        console.print(f"\n{trial.label}: about {self.study.pace().seconds(trial) / 60:.1f} min", highlight=False)
        job.start(self.threads)
        self.running[trial] = job
        self.starts[trial] += 1

    def _ended(self, trial, job: Job) -> None:
        if self.study.collect(trial):
            self.recorded += 1
            console.print(f"{trial.label}: {self.study.said(trial)}", highlight=False)
            return
        code = job.process.returncode
        ended_by_signal = code <= 0  # a trainer that is asked to stop saves and leaves with 0
        if self.stopping or (ended_by_signal and self.starts[trial] < MOST_STARTS):
            return
        if self.study.is_busy(trial):  # another runner's training began at the same time, and got the folder
            return
        printed = (job.folder / "output.txt").read_text(errors="replace")[job.printed :].strip().splitlines()
        reason = printed[-1] if printed else "nothing was printed"
        self.study.fail(trial, code, reason.removeprefix("error: "))
        self.failed.add(trial)
        console.print(f"{trial.label}: failed with exit code {code}: {reason}", highlight=False, markup=False)

    def _stop(self) -> None:
        self.stopping = True
        for job in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                job.process.terminate()


@contextlib.contextmanager
def stop_on_signals(stop) -> Iterator[None]:
    """Call `stop` on a signal that ends a command, or Ctrl-C, in the block, once; the second Ctrl-C interrupts."""

    def handle(number, frame):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    before = {number: signal.signal(number, handle) for number in (*signals.ending(), signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
