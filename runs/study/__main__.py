"""Train the cells of the study that are not finished, some at a time, in the background of everything else.

make study                                  (python -m runs.study)
make study ARGS="--list"                    what is left, and how long it takes
make study CORPUS=../text ARGS="--groups rates seeds"
"""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from runs.study.cells import Cell
from runs.study.data import load
from runs.study.grid import GROUPS, RATES
from runs.study.pace import Pace
from runs.study.rows import Study
from runs.study.trainings import Trainings
from trainkit import cli
from trainkit.cli import Bounds, UserError
from trainkit.progress import clock_text, console
from trainkit.workers import cores

DEFAULT_GROUPS = ("rates", "seeds", "precision", "depth-4")


@dataclass
class StudyConfig:
    """Train softmax attention and GKA side by side, every side at its own best learning rate, and record each run.

    A finished run is not trained again. SIGTERM or Ctrl-C lets the trainings save; the same command continues them.
    """

    data: Path = Path("out/packed/builtin-4096-512")
    """Folder of packed rows (make study packs those of CORPUS)."""
    runs: Path = Path("out/study")
    """Folder of the runs."""
    results: Path = Path("runs/results/study")
    """Folder of the results, a file of JSON lines for each corpus."""
    groups: list[str] = field(default_factory=lambda: list(DEFAULT_GROUPS))
    """Groups of cells to train, in this order; all takes every group."""
    only: str = ""
    """Key of one cell to train."""
    list: bool = False
    """Show what is left and how long it takes, and train nothing."""
    retry_failed: bool = False
    """Train cells again that failed."""
    at_once: Annotated[int, Bounds(1)] = 2
    """Trainings side by side."""
    threads: Annotated[int, Bounds(0)] = 0
    """Threads of each training; 0 shares the cores among them."""
    nice: Annotated[int, Bounds(0, 19)] = 19
    """How far other programs go first."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on; auto takes CUDA if there is one."""


def show_left(study: Study) -> None:
    """Every group with its question and what it needs; then every cell that is left."""
    pace, over, failed = Pace(study), study.rows().keys(), study.failed().keys()
    total, known = 0.0, {cell for cells in study.cells().values() for cell in cells}
    for name, cells in study.cells(assumed_rate=RATES[1]).items():
        left = [cell for cell in cells if study.key(cell) not in over | failed]
        seconds = sum(map(pace.seconds, left))
        total += seconds
        broken = sum(study.key(cell) in failed for cell in cells)
        counts = f"{len(left)} of {len(cells)} left" + (f", {broken} failed" if broken else "")
        line = f"{name}: {counts}, {clock_text(seconds)} of one training at a time. {GROUPS[name].__doc__}"
        console.print(line, style="bold", highlight=False, markup=False)
        for cell in left:
            key = study.key(cell) if cell in known else "(rate unknown)  "
            line = f"  {key}  {clock_text(pace.seconds(cell))}  {cell.label}"
            console.print(line, highlight=False, markup=False)
    measured = "from the speed of finished cells" if pace.measured else "by a guess, for no cell is finished yet"
    console.print(f"all: {clock_text(total)} of one training at a time, {measured}.", highlight=False)


def find(study: Study, key: str) -> Cell:
    """The known cell with a key. Raises UserError if there is none."""
    for cells in study.cells().values():
        for cell in cells:
            if study.key(cell) == key:
                return cell
    raise UserError(f"--only {key} is not the key of a cell that is known by now; --list shows them")


def main(config: StudyConfig) -> None:
    unknown = [name for name in config.groups if name not in (*GROUPS, "all")]
    if unknown:
        raise UserError(f"--groups {unknown[0]}: the groups are {', '.join(GROUPS)}, or all")
    text = load(config.data)
    groups = list(GROUPS) if config.only or "all" in config.groups else config.groups
    places = {"results": config.results / f"{text.name}.jsonl", "runs": config.runs / text.name}
    study = Study(text, **places, groups=groups, retry_failed=config.retry_failed)
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
    console.print(f"{len(study.rows())} cells are finished, {len(failed)} failed.", highlight=False)


if __name__ == "__main__":
    cli.run(main, StudyConfig)
