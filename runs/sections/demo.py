"""The demo's tables: its language models beside the paper's, and its vision models."""

from runs.demo.report import COLUMNS
from runs.demo.vision import HEADINGS, cells
from runs.paper import published
from runs.sections.sources import language_records, measured, table, vision_records


def language() -> str:
    """The last demo's models (of an older demo those that are the same today), then the paper's as printed."""
    records = language_records()
    rows = [
        [f"**{label}**", *(form.format(record["metrics"][key]) for key, (_, form) in COLUMNS.items())]
        for label, record in records.items()
    ]
    for label, printed in published.LANGUAGE.items():
        cells = [f"*{printed[key]}*" if key in printed else "" for key in COLUMNS]
        rows.append([f"*paper, depth 20: {label}*", *cells])
    headings = ["", *(heading for heading, _ in COLUMNS.values())]
    return "\n".join([table(headings, rows), measured(list(records.values())[-1], "demo.jsonl")])


def vision() -> str:
    """The micro-ViTs on digits: the mean over seeds and half their range."""
    records = vision_records()
    rows = [[f"**{label}**", *cells([run["metrics"] for run in runs])] for label, runs in records.items()]
    newest = list(records.values())[-1][-1]
    return "\n".join([table(["", *HEADINGS], rows), measured(newest, "demo_vision.jsonl")])
