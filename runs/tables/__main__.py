"""Write the measured tables of the READMEs from the result files, so that no number is typed by hand.

    python -m runs.tables            rewrites the pages
    python -m runs.tables --check    exits with 1 if a page does not say what the result files say

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`, in any of PAGES; NAME is a key of TABLES. A sentence
stands between `<!-- text:NAME -->` and `<!-- /text -->`; NAME is a key of SENTENCES.
"""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from runs import pages
from runs.pages import ROOT
from runs.table import NOT_RUN, Table
from runs.tables import (
    benchmarks,
    core,
    demo,
    errors,
    examples,
    log,
    machine,
    models,
    serves,
    speed,
    study,
    study_equal,
    study_heads,
    study_next,
    study_settings,
    study_speed,
    study_vision,
)
from runs.tables.sentences import SENTENCES
from trainkit_gka.cli import UserError, run

PAGES = (
    "README.md",
    "gka/README.md",
    "docs/accuracy.md",
    "gka/impl/triton/README.md",
    "nanochat_gka/README.md",
    "deit_gka/README.md",
    "runs/README.md",
    "runs/results/TABLES.md",
    "runs/log/README.md",
    "runs/study/README.md",
    "runs/study/METHOD.md",
    "runs/study/TABLES.md",
)
TABLES: dict[str, Callable[[], list[Table]]] = {
    "demo": demo.language,
    "vision": demo.vision,
    "speed": machine.one_machine,
    "gpus": machine.gpus,
    "sizes": models.sizes,
    "serves": serves.serves,
    "operator": speed.operator,
    "models": speed.models,
    "training": speed.training,
    "onnx": speed.onnx,
    "decode": benchmarks.decode,
    "scorer": benchmarks.scorer,
    "errors": errors.errors,
    "cpu-errors": errors.cpu_errors,
    "core": core.core,
    "text-classifier": examples.text_classifier,
    "log-research": log.research,
    "log-engineering": log.engineering,
    **study.TABLES,
    **study_equal.TABLES,
    **study_heads.TABLES,
    **study_settings.TABLES,
    **study_speed.TABLES,
    **study_vision.TABLES,
    **study_next.TABLES,
}
BLOCK = re.compile(r"<!-- (table|text):(\S+) -->\n(?:.*?\n)??<!-- /\1 -->", re.DOTALL)
WIDTH = 120  # letters of a line of prose


@dataclass
class TablesConfig:
    """Write the measured tables into the READMEs, from the files in runs/results."""

    check: bool = False
    """Write nothing; exit with 1 if a page is out of date."""


def block(kind: str, name: str, page: str) -> str:
    """The text of the tables, or of the sentences, of one name. Raises UserError if there are none of that name."""
    known = TABLES if kind == "table" else SENTENCES
    if name not in known:
        raise UserError(f"{page} has a block {kind}:{name}; known are {', '.join(known)}")
    if kind == "text":
        paragraphs = SENTENCES[name]().split("\n\n")
        return "\n\n".join(textwrap.fill(p, WIDTH, break_long_words=False, break_on_hyphens=False) for p in paragraphs)
    return "\n\n".join(table.markdown() for table in TABLES[name]()) or NOT_RUN


def render(page: str, text: str) -> str:
    """The page's text with every block filled."""

    def filled(match: re.Match[str]) -> str:
        kind, name = match.groups()
        return f"<!-- {kind}:{name} -->\n{block(kind, name, page)}\n<!-- /{kind} -->"

    return BLOCK.sub(filled, text)


def main(config: TablesConfig) -> None:
    rendered = {page: render(page, (ROOT / page).read_text()) for page in PAGES}
    pages.update(rendered, "python -m runs.tables", config.check)


if __name__ == "__main__":
    run(main, TablesConfig)
