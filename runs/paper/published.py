"""Every table of the paper as printed, read from published.json: label, section, columns, rows and contradictions.

CORE's scores are also in nanochat_gka/core_metric/published.py, because eval_core prints them and the trainers never
import from `runs`. A test compares the two.
"""

import json
from pathlib import Path
from typing import Any

from runs.paper.cells import HEADINGS
from runs.table import NOT_RUN, Row, Table

TABLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())["tables"]


def rows(table: str) -> dict[str, dict[str, str]]:
    """Row -> column -> the figure as printed; empty cells are left out."""
    return TABLES[table]["rows"]


def notes(table: str) -> list[str]:
    """What a reader of the table has to know: contradictions, and what a figure is of."""
    return TABLES[table]["notes"]


def table(name: str, rows: list[Row], remarks: Row, commands: Row, about: str = "Model", words: int = 2) -> Table:
    """A published table beside ours, with its own title and notes.

    rows: model or method, measure, paper, ours, difference. commands: those that fill what was not run. about: heading
    of the first column.
    """
    published = TABLES[name]
    notes = [" ".join([*published["notes"], *remarks])]
    if commands:
        filled_by = ", ".join(f"`{command}`" for command in dict.fromkeys(commands))
        notes.append(f'Cells with "{NOT_RUN}" are filled by {filled_by}.')
    title = f"Table {published['number']} of the paper, beside ours. {published['caption']}"
    return Table.of([about, *HEADINGS], rows, title=title, notes=notes, words=words, label=published["label"])


# The language models, with the names that the trainer's records use; parameters as "896M".
LANGUAGE = {
    model: {**compute, "parameters": compute["parameters"] + "M", **rows("bpb")[model]}
    for model, compute in rows("compute").items()
}
# The vision models: the comparison's rows, and VLT's of the ablation beside those of its size.
VISION = {name: row for name, row in rows("main_results").items() if name.endswith("-Ti")}
VISION |= {"VLT-Ti": rows("ablation")["VLT-Ti"]} | rows("main_results")
