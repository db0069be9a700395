"""The loop of every trainer: resume, announce, then step, log, save and evaluate to the end or a signal, and finish.

The trainer (`trainkit_gka.trainer`) computes the steps and evaluations. A checkpoint is written before every
evaluation. On a signal the loop finishes its step, saves and exits; an interrupted evaluation is run again on resume,
logged ones are not. A run that was killed at any moment continues from its newest intact checkpoint.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainkit_gka import signals
from trainkit_gka.checkpoint import Checkpoint, checkpoint_path, load, load_newest
from trainkit_gka.command import command_line, is_under_torchrun, write_note
from trainkit_gka.distributed import Interrupted, Runtime, Stop, running
from trainkit_gka.files import check_writable, locked
from trainkit_gka.plan import show_plan
from trainkit_gka.profiling import Profiler
from trainkit_gka.progress import LOG, RunLog, check_charts, progress_bar, read_events
from trainkit_gka.results import append_result, date_of, describe_hardware, read_results
from trainkit_gka.run_config import RunConfig
from trainkit_gka.trainer import Trainer


def launch(config: RunConfig, make_trainer: Callable[[Any, Runtime, Checkpoint | None], Trainer]) -> None:
    """Train the run of `config` from its newest checkpoint, or the start, to its end, and record its numbers.

    Raises UserError on every process for mistakes that the user can correct, and SystemExit with --stopped-code.
    """
    code = 0
    config.check()
    signals.outlive_readers()
    with running(config.device_type, config.seed) as runtime, contextlib.ExitStack() as cleanup:

        def hold() -> None:
            if not config.dry_run:
                cleanup.enter_context(locked(config.folder, "training in"))
            check_charts(config)
            check_writable(config.results)

        runtime.agree(lambda: hold() if runtime.is_main else None)
        path = find_newest(config, runtime)
        trainer = runtime.agree(lambda: make_trainer(config, runtime, resume(config, path)))
        cleanup.callback(trainer.close)
        profiler = runtime.agree(lambda: Profiler(trainer))
        if config.dry_run:
            show_plan(trainer, runtime.agree(lambda: trainer.check() if runtime.is_main else {}))
            return
        log = runtime.agree(lambda: RunLog(config, trainer.state["step"], runtime.is_main))
        cleanup.callback(log.close)
        runtime.check_same(trainer.data_hashes)
        runtime.broadcast(trainer.model.parameters())
        if runtime.any(log.enabled and finish_record(config.folder, trainer.FINISH_KEYS, trainer.steps) is not None):
            runtime.print(f"{config.folder}: already trained for its {trainer.steps:,} {trainer.STEP}s")
            return
        trainer.prepare()
        announce(trainer, log)
        cleanup.callback(profiler.close)
        stop = Stop()
        with stop.watched(runtime, lambda number: end_late(trainer, number)):
            is_done = train(trainer, log, profiler, stop)
        runtime.agree(log.check)
        if is_done:
            runtime.agree(lambda: finish(trainer, log) if runtime.is_main else None)
        else:
            code = print_stopped(trainer)
    if code:
        sys.exit(code)


def find_newest(config: RunConfig, runtime: Runtime) -> Path | None:
    """The newest intact checkpoint of the run, if there is one. Process 0 compares its checksums, for all."""
    folder = config.folder / "checkpoints"
    newest = runtime.agree(lambda: load_newest(folder) if runtime.is_main else None)
    step = int(runtime.sum(torch.tensor(newest.step if newest else 0, device=runtime.device)))
    return checkpoint_path(folder, step) if step else None


def resume(config: RunConfig, path: Path | None) -> Checkpoint | None:
    """The checkpoint at `path`, which is intact. Raises UserError if the run's settings are not `config`'s."""
    checkpoint = load(path, verify=False) if path else None
    if checkpoint is not None:
        config.check_continues(checkpoint.state["train_config"])
    return checkpoint


def announce(trainer: Trainer, log: RunLog) -> None:
    """Print what will be trained and from which step, and log the start."""
    runtime, step, start = trainer.runtime, trainer.state["step"], trainer.announce()
    if step:
        runtime.print(f"resuming at {trainer.STEP} {step} of {trainer.steps}")
    where = {"world_size": runtime.world_size, "hardware": describe_hardware(runtime.device)}
    log.log("start", step, config=trainer.config.identity(), **where, **start)


def train(trainer: Trainer, log: RunLog, profiler: Profiler, stop: Stop) -> bool:
    """Train to the last step. Returns False if a signal or --stop-after ended it early. The state is saved."""
    config, steps = trainer.config, trainer.steps

    def evaluate() -> bool:
        try:
            for evaluation in trainer.evaluations_due():
                done = log.enabled and log.has(evaluation.event, trainer.state["step"], *evaluation.keys)
                if trainer.runtime.any(log.enabled and not done):
                    with stop.limited():
                        evaluation.run(log, stop, bar)
        except Interrupted:
            return False
        return True

    with progress_bar() as bar:
        task = bar.add_task(config.tag, total=steps, completed=trainer.state["step"], status="")
        usual = math.inf  # seconds of the fastest step so far
        if not evaluate():
            return False
        while trainer.state["step"] < steps:
            began = time.monotonic()
            with profiler.step(trainer.state["step"] + 1), stop.limited(usual if usual < math.inf else 0.0):
                numbers, stopping = trainer.step(stop.requested or log.error is not None)
            usual = min(usual, time.monotonic() - began)
            step = trainer.state["step"]
            stopping = (stopping or step == config.stop_after) and step < steps
            bar.update(task, completed=step, status=trainer.status(numbers))
            if step % config.log_every == 0 or step in (1, steps):
                text, values = trainer.describe(numbers)
                log.log("train", step, text, **values)
                warn(trainer, log)
            if stopping or trainer.evaluations_due() or any(map(trainer.due, trainer.saves_every)):
                trainer.save()
            if stopping or not evaluate():
                return False
    return True


def print_stopped(trainer: Trainer) -> int:
    """Print where training stopped. Returns the exit code, 0 under torchrun, which exits with --stopped-code itself."""
    config, runtime, step = trainer.config, trainer.runtime, trainer.state["step"]
    saved = "saved" if step else "before there was anything to save"
    where = f"{trainer.STEP} {step} of {trainer.steps}"
    runtime.print(f"stopped at {where}, {saved}; continue with: {command_line()}")
    code = 0 if step == config.stop_after else config.stopped_code
    if runtime.is_first_here:
        write_note("", code)
    return 0 if is_under_torchrun() else code


def end_late(trainer: Trainer, number: int) -> None:
    """End this process without saving, in a step or an evaluation that goes on too long after a signal."""
    runtime, step, newest = trainer.runtime, trainer.state["step"], trainer.newest()
    code = trainer.config.stopped_code or 128 + number
    with contextlib.suppress(OSError):
        if runtime.is_first_here:
            write_note("", code)
        if runtime.is_main:
            problem = (
                f"{signals.Stopped(number)} at {trainer.STEP} {step} of {trainer.steps}, which did not end in time"
            )
            lost = step - int(newest.name[5:]) if newest else step
            lost = f"newest checkpoint: {newest or 'none was saved yet'}; {trainer.STEP}s lost: {lost}"
            print(f"{problem}; {lost}; continue with: {command_line()}", file=sys.stderr, flush=True)
    signals.end_with_children(code)


def warn(trainer: Trainer, log: RunLog) -> None:
    """Log the trainer's warnings, each once in a run."""
    if log.enabled and (warnings := trainer.warnings()):
        logged = {record["about"] for record in log.records("warning", "about")}
        for about in warnings.keys() - logged:
            text = f"{trainer.STEP} {trainer.state['step']}: {warnings[about]}"
            log.log("warning", trainer.state["step"], f"warning: {text}", about=about, text=text)


def finish(trainer: Trainer, log: RunLog) -> None:
    """Append the run's numbers and warnings to the results, and log the end. On rank 0."""
    config, (summary, words) = trainer.config, trainer.summary(log)
    summary["warnings"] = [record["text"] for record in log.records("warning", "text")]
    if not is_recorded(trainer, log):
        device, world_size = trainer.runtime.device, trainer.runtime.world_size
        append_result(config.results, trainer.KIND, config.record(), summary, device, world_size)
    log.log("finish", trainer.steps, **summary)
    print(f"{config.folder}: finished, {words}", *(f"warning: {text}" for text in summary["warnings"]), sep="\n")


def is_recorded(trainer: Trainer, log: RunLog) -> bool:
    """Whether the results have this run's line already, as after a kill between that line and the finish record."""
    config, starts = trainer.config, log.records("start")
    if starts[-1]["step"] < trainer.steps:  # this process has trained
        return False
    begun = date_of(starts[0]["time"])
    return any(
        (line.get("kind"), line["config"]) == (trainer.KIND, config.record()) and line.get("date", "") >= begun
        for line in read_results(config.results, *trainer.FINISH_KEYS)
    )


def finish_record(folder: Path, keys: tuple[str, ...], step: int | None = None) -> dict[str, Any] | None:
    """The finish record of the run in `folder` if it has all `keys`, and is of `step` unless that is None."""
    records = read_events(folder / LOG, "finish", *keys)
    return next((record for record in records if step in (None, record["step"])), None)
