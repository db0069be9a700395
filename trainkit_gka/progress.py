"""Reports of a run, on rank 0: a progress bar, JSON lines on disk, and charts in Weights & Biases or TensorBoard."""

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console

from trainkit_gka import extras
from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.files import atomic
from trainkit_gka.run_config import RunConfig

LOG = "log.jsonl"  # in a run's folder
console = Console(stderr=False, soft_wrap=True)


def progress_bar(on: Console = console, **kwargs) -> progress.Progress:
    """A rich progress bar: description, count, elapsed and remaining time, and the field `status`.

    Invisible without a terminal, and on ranks other than 0.
    """
    parts = [progress.SpinnerColumn(), "{task.description}", progress.BarColumn(bar_width=None)]
    parts += [progress.MofNCompleteColumn(), "{task.fields[status]}", progress.TimeElapsedColumn()]
    hidden = not on.is_terminal or os.environ.get("RANK", "0") != "0"
    return progress.Progress(*parts, "left", progress.TimeRemainingColumn(), console=on, disable=hidden, **kwargs)


class RunLog:
    """`log(event, step, **values)` writes one JSON line, and optionally charts and a printed line.

    The lines are appended to the file LOG in the folder of `config`. resume_step: lines of later steps, which will run
    again, are deleted first, so that the file reads as one run. enabled: False on the ranks but 0, whose log does
    nothing. Raises UserError if --wandb or --tensorboard cannot be had.
    """

    def __init__(self, config: RunConfig, resume_step: int = 0, enabled: bool = True):
        self.enabled = enabled
        self.error: OSError | None = None  # of writing a line; the loop stops for it
        self.wandb = None
        self.tensorboard = None
        self.path = config.folder / LOG
        if not enabled:
            return
        # A checkpoint is written after its step's lines; at step 0 everything runs again.
        lines = [line for line in read_events(self.path) if resume_step and line["step"] <= resume_step]
        with atomic(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        self.file = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives as long as the run)
        if config.wandb != "disabled":
            self.wandb = _start_wandb(config)
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = resume_step + 1 if resume_step else 0  # drop what a killed process wrote after the checkpoint
            self.tensorboard = SummaryWriter(str(config.folder / "tensorboard"), purge_step=purge_step)

    def log(self, event: str, step: int, show: str | None = None, chart: bool = True, **values) -> None:
        """Record `values` at `step`, also in the charts if `chart`, and print the line `show`."""
        if not self.enabled:
            return
        record = {"event": event, "step": step, "time": round(time.time(), 3), **finite(values)}
        try:
            self.file.write(json.dumps(record) + "\n")
        except OSError as error:
            self.error = self.error or error
        if chart and (self.wandb or self.tensorboard):
            numbers = {f"{event}/{name}": value for name, value in _scalars(values)}
            if self.wandb:
                self.wandb.log(numbers, step=step)
            if self.tensorboard:
                for name, value in numbers.items():
                    self.tensorboard.add_scalar(name, value, step)
                self.tensorboard.flush()  # so that a killed run's charts reach its checkpoint
        if show:
            console.print(show, highlight=False, markup=False)

    def records(self, event: str, *keys: str) -> list[dict[str, Any]]:
        """The records of `event` that have all `keys`, including those of processes before a resume."""
        return read_events(self.path, event, *keys)

    def has(self, event: str, step: int, *keys: str) -> bool:
        """Whether `records` has one of this step."""
        return any(record["step"] == step for record in self.records(event, *keys))

    def check(self) -> None:
        """Raises OSError if a line could not be written."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Flush and close everything. May be called twice."""
        if not self.enabled:
            return
        with contextlib.suppress(OSError):  # of lines for which there is no room: `error` has been noticed
            self.file.close()
        if self.wandb:
            self.wandb.finish()
        if self.tensorboard:
            self.tensorboard.close()


def check_charts(config: RunConfig) -> None:
    """Raises UserError if a package that --wandb or --tensorboard needs is missing, or a home for wandb's settings."""
    homeless = "there is neither $HOME nor an account: set HOME" if os.path.expanduser("~") == "~" else ""
    if config.wandb != "disabled" and (reason := extras.missing("wandb", "wandb") or homeless):
        raise UserError(f"--wandb {config.wandb}: {reason}, or leave --wandb disabled")
    if config.tensorboard and (reason := extras.missing("tensorboard", "tensorboard")):
        raise UserError(f"--tensorboard: {reason}, or leave the flag out")


def finite(value: Any) -> Any:
    """`value` with every float that JSON cannot hold (NaN, infinity) replaced by None, at any depth."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(values: dict[str, Any]):
    """(name, number) pairs for a chart: nested dicts as outer/inner, lists as their mean, minimum and maximum."""
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(item, (int, float)) for item in value):
            value = {"mean": sum(value) / len(value), "min": min(value), "max": max(value)}
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", number) for inner, number in _scalars(value))
        elif isinstance(value, (int, float)):
            yield name, value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON-lines file. Other lines, such as a last one cut short by a kill, are skipped."""
    records, path = [], Path(path)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_events(path: Path, event: str = "", *keys: str) -> list[dict[str, Any]]:
    """The records of a run's log that have a step, are of `event` ("" = any) and have all `keys`.

    Other lines (written by hand, by another version, or cut short) are skipped, as if their event had not happened.
    """
    lines = [line for line in read_lines(path) if isinstance(line.get("event"), str) and type(line.get("step")) is int]
    return [line for line in lines if event in ("", line["event"]) and line.keys() >= set(keys)]


class Pace:
    """Estimates the time of the remaining steps from the time per step so far, evaluations included.

    The first `skip` steps of this process do not count: they compile and fill caches.
    """

    def __init__(self, skip: int, clock: Callable[[], float] = time.perf_counter):
        self.skip, self.clock, self.steps, self.began = skip, clock, 0, 0.0

    def step(self) -> bool:
        """Count a finished step. Returns whether it counts for the time."""
        self.steps += 1
        if self.steps == self.skip:
            self.began = self.clock()
        return self.steps > self.skip

    def seconds_for(self, steps: int) -> float | None:
        """Seconds for `steps` more steps; None before any step is timed."""
        timed = self.steps - self.skip
        return steps * (self.clock() - self.began) / timed if timed > 0 else None


def clock_text(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def rate(value: float | None, unit: str) -> str:
    """A speed as text, such as "1,234 img/s"; empty for None."""
    return "" if value is None else f"{value:,.0f} {unit}" if value >= 9.95 else f"{value:.2g} {unit}"


def _start_wandb(config: RunConfig):
    """Start a wandb run without a prompt, or continue the one whose id is in the run's folder.

    WANDB_RUN_ID, WANDB_PROJECT and WANDB_RESUME have precedence. Raises UserError for "online" without a key.
    """
    import wandb

    mode, file, variables = config.wandb, config.folder / "wandb_id", os.environ
    try:
        if mode == "online" and not wandb.login(prompt=False):
            raise UserError(
                "--wandb online needs the key of an account: set WANDB_API_KEY, or run wandb login once; "
                "--wandb offline needs none"
            )
        saved = file.read_text(encoding="utf-8").strip() if file.exists() else secrets.token_hex(4)
        run_id = variables.get("WANDB_RUN_ID") or saved
        place = {"project": variables.get("WANDB_PROJECT", "gka"), "name": config.tag, "dir": str(config.folder)}
        resume = variables.get("WANDB_RESUME", "allow")
        run = wandb.init(**place, mode=mode, config=config.identity(), id=run_id, resume=resume)
        with atomic(file) as temporary:
            temporary.write_text(f"{run_id}\n", encoding="utf-8")
        return run
    except wandb.errors.Error as error:
        advice = "--wandb offline needs no account (wandb sync sends it later)"
        raise UserError(f"--wandb {mode}: {reason_of(error)}; {advice}") from None
