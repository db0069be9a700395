"""Write the measured tables of the READMEs from the result files, so that no number is typed by hand.

    python -m runs.tables            rewrites the pages
    python -m runs.tables --check    exits with 1 if a page does not say what the result files say

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`, in any of PAGES; NAME is a key of TABLES.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from runs import pages
from runs.pages import ROOT
from runs.table import NOT_RUN, Table
from runs.tables import (
    benchmarks,
    errors,
    machine,
    paper,
    speed,
)
from trainkit_gka.cli import UserError, run

PAGES = (
    "docs/accuracy.md",
    "gka/impl/triton/README.md",
    "deit_gka/README.md",
    "runs/README.md",
    "runs/results/TABLES.md",
)
TABLES: dict[str, Callable[[], list[Table]]] = {
    "speed": machine.one_machine,
    "gpus": machine.gpus,
    "operator": speed.operator,
    "models": speed.models,
    "training": speed.training,
    "decode": benchmarks.decode,
    "errors": errors.errors,
    "cpu-errors": errors.cpu_errors,
    **paper.TABLES,
}
BLOCK = re.compile(r"<!-- table:(\S+) -->\n(?:.*?\n)??<!-- /table -->", re.DOTALL)


@dataclass
class TablesConfig:
    """Write the measured tables into the READMEs, from the files in runs/results."""

    check: bool = False
    """Write nothing; exit with 1 if a page is out of date."""


def block(name: str, page: str) -> str:
    """The text of the tables of one name. Raises UserError if there are none of that name."""
    if name not in TABLES:
        raise UserError(f"{page} has a block table:{name}; known are {', '.join(TABLES)}")
    return "\n\n".join(table.markdown() for table in TABLES[name]()) or NOT_RUN


def render(page: str, text: str) -> str:
    """The page's text with every block filled."""

    def filled(match: re.Match[str]) -> str:
        return f"<!-- table:{match[1]} -->\n{block(match[1], page)}\n<!-- /table -->"

    return BLOCK.sub(filled, text)


def main(config: TablesConfig) -> None:
    rendered = {page: render(page, (ROOT / page).read_text()) for page in PAGES}
    pages.update(rendered, "python -m runs.tables", config.check)


if __name__ == "__main__":
    run(main, TablesConfig)
