"""What the commands of the study share: their flags, the list of what is left, and training it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from runs.study.ledger import Ledger
from runs.study.trainings import Trainings
from trainkit_gka.cli import Bounds, UserError
from trainkit_gka.progress import clock_text, console
from trainkit_gka.workers import cores


@dataclass(kw_only=True)
class RunnerConfig:
    """Flags of a command that trains trials and records each. Subclasses add the groups and the data."""

    runs: Path = Path("out/study")
    """Folder of the runs."""
    results: Path = Path("runs/results/study")
    """Folder of the results, a file of JSON lines for each corpus or set of images."""
    only: str = ""
    """Key of one trial to train."""
    list: bool = False
    """Show what is left and how long it takes, and train nothing."""
    retry_failed: bool = False
    """Train trials again that failed."""
    at_once: Annotated[int, Bounds(1)] = 2
    """Trainings side by side."""
    threads: Annotated[int, Bounds(0)] = 0
    """Threads of each training; 0 shares the cores among them."""
    nice: Annotated[int, Bounds(0, 19)] = 19
    """How far other programs go first."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto takes CUDA if there is one."""


def chosen_groups(config: RunnerConfig, groups: dict) -> list[str]:
    """The names of the groups to look at. Raises UserError for others."""
    unknown = [name for name in config.groups if name not in (*groups, "all")]
    if unknown:
        raise UserError(f"--groups {unknown[0]}: the groups are {', '.join(groups)}, or all")
    return list(groups) if config.only or "all" in config.groups else config.groups


def show_left(study: Ledger) -> None:
    """Every group with its question and what it needs; then every trial that is left."""
    pace, over, failed = study.pace(), study.rows().keys(), study.failed().keys()
    total, known = 0.0, {trial for trials in study.trials().values() for trial in trials}
    for name, trials in study.trials(assumed_rate=study.DONE.rates[1]).items():
        left = [trial for trial in trials if study.key(trial) not in over | failed]
        seconds = sum(map(pace.seconds, left))
        total += seconds
        broken = sum(study.key(trial) in failed for trial in trials)
        counts = f"{len(left)} of {len(trials)} left" + (f", {broken} failed" if broken else "")
        line = f"{name}: {counts}, {clock_text(seconds)} of one training at a time. {study.GROUPS[name].__doc__}"
        console.print(line, style="bold", highlight=False, markup=False)
        for trial in left:
            key = study.key(trial) if trial in known else "(rate unknown)  "
            line = f"  {key}  {clock_text(pace.seconds(trial))}  {trial.label}"
            console.print(line, highlight=False, markup=False)
    measured = "from the speed of finished trials" if pace.measured else "by a guess, for no trial is finished yet"
    console.print(f"all: {clock_text(total)} of one training at a time, {measured}.", highlight=False)


def find(study: Ledger, key: str):
    """The known trial with a key. Raises UserError if there is none."""
    for trials in study.trials().values():
        for trial in trials:
            if study.key(trial) == key:
                return trial
    raise UserError(f"--only {key} is not the key of a trial that is known by now; --list shows them")


def train_left(study: Ledger, config: RunnerConfig) -> None:
    """Do what the flags say. Leaves with 130 if a signal ended it."""
    if config.list:
        show_left(study)
        return
    os.nice(config.nice)
    threads = config.threads or max(1, cores() // config.at_once)
    trainings = Trainings(study, config.at_once, threads, config.device_type)
    only = find(study, config.only) if config.only else None
    if not trainings.run(only):
        console.print("stopped; every training has saved. The same command continues.", highlight=False)
        sys.exit(130)
    failed = study.failed()
    console.print(f"{len(study.rows())} trials are finished, {len(failed)} failed.", highlight=False)
