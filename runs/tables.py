"""Write the measured tables of the READMEs from the result files, so that no number is typed by hand.

    python -m runs.tables            rewrites the pages
    python -m runs.tables --check    exits with 1 if a page does not say what the result files say

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`, in any of PAGES; NAME is a key of SECTIONS.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runs import pages
from runs.sections import (
    approximations,
    benchmarks,
    core,
    demo,
    models,
    neighbours,
    speed,
    study,
    study_equal,
    study_heads,
    study_next,
    study_settings,
    study_speed,
    study_vision,
    summary,
)
from trainkit_gka.cli import UserError, run

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "gka/README.md",
    "nanochat_gka/README.md",
    "deit_gka/README.md",
    "runs/README.md",
    "runs/study/README.md",
    "runs/study/TABLES.md",
    "runs/neighbours/README.md",
    "runs/neighbours/approximations/README.md",
)
SECTIONS: dict[str, Callable[[], str]] = {
    "results": summary.results,  # the front page's
    "demo": demo.language,
    "vision": demo.vision,
    "sizes": models.sizes,
    "operator": speed.operator,
    "models": speed.models,
    "training": speed.training,
    "onnx": speed.onnx,
    "decode": benchmarks.decode,
    "scorer": benchmarks.scorer,
    "errors": benchmarks.errors,
    "cpu-errors": benchmarks.cpu_errors,
    "core": core.core,
    **study.TABLES,
    **study_equal.TABLES,
    **study_heads.TABLES,
    **study_settings.TABLES,
    **study_speed.TABLES,
    **study_vision.TABLES,
    **study_next.TABLES,
    **neighbours.TABLES,
    **approximations.TABLES,
}
BLOCK = re.compile(r"<!-- table:(\S+) -->\n(?:.*?\n)??<!-- /table -->", re.DOTALL)


@dataclass
class TablesConfig:
    """Write the measured tables into the READMEs, from the files in runs/results."""

    check: bool = False
    """Write nothing; exit with 1 if a page is out of date."""


def section(name: str, page: str) -> str:
    """The text of one table. Raises UserError if there is no such table or its result files are incomplete."""
    if name not in SECTIONS:
        raise UserError(f"{page} has a block table:{name}; the tables are {', '.join(SECTIONS)}")
    try:
        return SECTIONS[name]()
    except (KeyError, IndexError, StopIteration, TypeError) as error:
        again = "measure them again, or git checkout runs/results"
        raise UserError(f"the results behind the table {name} of {page} are incomplete ({error!r}); {again}") from error


def render(page: str, text: str) -> str:
    """The page's text with every block filled."""
    return BLOCK.sub(lambda match: f"<!-- table:{match[1]} -->\n{section(match[1], page)}\n<!-- /table -->", text)


def main(config: TablesConfig) -> None:
    rendered = {page: render(page, (ROOT / page).read_text()) for page in PAGES}
    pages.update(ROOT, rendered, "python -m runs.tables", config.check)


if __name__ == "__main__":
    run(main, TablesConfig)
