"""Tables 1 to 8 of the paper beside ours: as printed, as counted and measured here, and the difference.

    python -m runs.comparison.tables                              on the terminal, without what was not run
    python -m runs.comparison.tables --all                        the differences too, and what was not run
    python -m runs.comparison.tables --format latex --only 2 6    two of them for a LaTeX document with booktabs

Ours are the cost models' counts and finished runs of the very configuration (runs/comparison/measured.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from runs.comparison import language_tables, vision_tables
from runs.comparison.measured import Sources
from runs.paper.cells import HEADINGS
from runs.table import NOT_RUN, WIDE, Table
from trainkit_gka.cli import UserError, run
from trainkit_gka.files import check_named

_, _, OURS, DIFFERENCE = HEADINGS
BUILDERS: dict[int, Callable[[Sources], Table]] = {
    1: vision_tables.related_methods,
    2: vision_tables.main_results,
    3: vision_tables.efficiency,
    4: vision_tables.runtime,
    5: vision_tables.ablation,
    6: language_tables.bpb,
    7: language_tables.core_subset,
    8: language_tables.compute,
}
MAIN = (2, 3, 6, 8)  # come first; what the others need was mostly not run
LONG = (1, 4)  # have a row for every measure: as columns they do not fit
TERMINAL = 80  # letters of a line
PREAMBLES = {
    "latex": "% Needs \\usepackage{booktabs}, \\usepackage{graphicx} and \\usepackage[T1]{fontenc}.",
    "html": '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>The paper\'s tables beside ours</title>',
}


@dataclass
class PaperTablesConfig:
    """Print the paper's tables with ours beside them, from the cost models and the result files."""

    base: Path = Path("out")
    """Folder of all outputs: finished runs are read from BASE/runs, BASE/results.jsonl and BASE/core."""
    format: Literal["terminal", "markdown", "latex", "html"] = "terminal"
    """How the tables are written."""
    only: list[int] = field(default_factory=list)
    """Numbers of the tables to print, in this order; empty = all, 2, 3, 6 and 8 first."""
    all: bool = False
    """On the terminal, also the rows that were not run and those of the differences."""

    def check(self) -> None:
        """Raises UserError for the number of a table that the paper does not have, and for a BASE that is not there."""
        check_named(self.base, PaperTablesConfig.base, "the outputs of runs")
        for number in self.only:
            if number not in BUILDERS:
                raise UserError(f"--only takes numbers from 1 to {len(BUILDERS)}, got {number}")


def by_measure(table: Table) -> Table:
    """The same as the paper lays it out, a column for each measure; paper, ours and difference are rows.

    Rows in which nothing stands are left out.
    """
    about, measure, *sources = table.headings
    long = table.frame.melt([about, measure], var_name="")
    wide = long.pivot_table("value", [about, ""], measure, aggfunc="first", sort=False).fillna("")
    order = [(name, source) for name in table.frame[about].unique() for source in sources]
    wide = wide.reindex(order)
    shown = wide[(wide != "").any(axis=1)].reset_index()
    return replace(table, frame=shown)


def on_terminal(table: Table, number: int, everything: bool) -> Table:
    """The table in the paper's layout; unless `everything`, without differences and what was not run."""
    shown = table if number in LONG else by_measure(table)
    if everything:
        return shown
    frame = shown.frame
    if number in LONG:
        frame = frame[frame[OURS] != NOT_RUN].drop(columns=DIFFERENCE)
    else:
        kept = frame.iloc[:, 2:].replace(NOT_RUN, "").ne("").any(axis=1)
        frame = frame[kept & (frame.iloc[:, 1] != DIFFERENCE)].replace(NOT_RUN, "–")
    notes = [note.replace(f'"{NOT_RUN}"', '"–"') for note in shown.notes]
    return replace(shown, frame=frame, notes=notes)


def main(config: PaperTablesConfig) -> None:
    config.check()
    if config.format in PREAMBLES:
        print(PREAMBLES[config.format])
    for number in config.only or sorted(BUILDERS, key=lambda number: (number not in MAIN, number)):
        table = BUILDERS[number](Sources(config.base))
        if config.format == "terminal":
            on_terminal(table, number, config.all).show(WIDE if config.all else TERMINAL)
        elif config.format == "latex":
            print(by_measure(table).latex())
        else:
            print({"markdown": table.markdown, "html": table.html}[config.format]())


if __name__ == "__main__":
    run(main, PaperTablesConfig)
