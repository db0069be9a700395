"""Every table of the paper as printed, read from published.json: label, section, columns, rows and contradictions.

CORE's scores are also in nanochat_gka/core_metric/published.py, because eval_core prints them and the trainers never
import from `runs`. A test compares the two.
"""

import json
from pathlib import Path
from typing import Any

from gka.kinds import KINDS

FILE = Path(__file__).with_name("published.json")
TABLES: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["tables"]
SIZE_NAMES = {"ti": "tiny", "s": "small", "b": "base"}
PAPER_NAMES = {"softmax": "DeiT"} | {name: kind.label for name, kind in KINDS.items() if name != "softmax"}


def rows(table: str) -> dict[str, dict[str, str]]:
    """Row -> column -> the figure as printed; empty cells are left out."""
    return TABLES[table]["rows"]


# The language models, with the names that the trainer's records use; parameters as "896M".
LANGUAGE = {
    model: {**compute, "parameters": compute["parameters"] + "M", **rows("bpb")[model]}
    for model, compute in rows("compute").items()
}
# The vision models: the comparison's rows, and VLT's of the ablation beside those of its size.
VISION = {name: row for name, row in rows("main_results").items() if name.endswith("-Ti")}
VISION |= {"VLT-Ti": rows("ablation")["VLT-Ti"]} | rows("main_results")
