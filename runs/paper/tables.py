"""Tables 1 to 8 of the paper beside ours: as printed, as counted and measured here, and the difference.

    python -m runs.paper.tables                              all of them on the terminal
    python -m runs.paper.tables --format latex --only 2 6    two of them for a LaTeX document with booktabs

Ours are the cost models' counts and finished runs of the very configuration (runs/paper/measured.py).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runs.paper import formats, published
from runs.paper.comparison import BUILDERS, Sources
from trainkit_gka.cli import UserError, run
from trainkit_gka.files import check_named

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


def main(config: PaperTablesConfig) -> None:
    config.check()
    labels = {table["number"]: table["label"] for table in published.TABLES.values()}
    if config.format in PREAMBLES:
        print(PREAMBLES[config.format])
    for number in config.only or sorted(BUILDERS):
        table = BUILDERS[number](Sources(config.base))
        if config.format == "terminal":
            formats.terminal(table)
        elif config.format == "latex":
            print(formats.latex(table, labels[number]))
        else:
            print({"markdown": formats.markdown, "html": formats.html}[config.format](table))


if __name__ == "__main__":
    run(main, PaperTablesConfig)
