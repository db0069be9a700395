"""Tables 1 to 8 of the paper beside ours: as printed, as counted and measured here, and the difference.

    python -m runs.comparison.tables                              all of them on the terminal
    python -m runs.comparison.tables --format latex --only 2 6    two of them for a LaTeX document with booktabs

Ours are the cost models' counts and finished runs of the very configuration (runs/comparison/measured.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from runs.comparison import language_tables, vision_tables
from runs.comparison.measured import Sources
from runs.table import Table
from trainkit_gka.cli import UserError, run
from trainkit_gka.files import check_named

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
    """Numbers of the tables to print; empty = all."""

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


def main(config: PaperTablesConfig) -> None:
    config.check()
    if config.format in PREAMBLES:
        print(PREAMBLES[config.format])
    for number in config.only or sorted(BUILDERS):
        table = BUILDERS[number](Sources(config.base))
        if config.format == "terminal":
            table.show()
        elif config.format == "latex":
            print(by_measure(table).latex())
        else:
            print({"markdown": table.markdown, "html": table.html}[config.format]())


if __name__ == "__main__":
    run(main, PaperTablesConfig)
