"""The demo's tables: its language models beside the paper's, and its vision models."""

import itertools
from typing import Any

from runs import frames
from runs.demo.language import VARIANTS, run_tag
from runs.demo.report import COLUMNS
from runs.demo.vision import HEADINGS, cells
from runs.paper import published
from runs.table import Table, measured


def language_records() -> dict[str, dict[str, Any]]:
    """Label -> the record of its run, for the models that today's demo trains."""
    trained = {one["config"]["model_tag"]: one for one in frames.records(frames.RESULTS / "demo.jsonl", *COLUMNS)}
    tags = {variant.label: run_tag(name) for name, variant in VARIANTS.items()}
    return {label: trained[tag] for label, tag in tags.items() if tag in trained}


def vision_records() -> dict[str, list[dict[str, Any]]]:
    """Label -> the records of its runs, a seed each."""
    by_label: dict[str, list[dict[str, Any]]] = {}
    for record in frames.records(frames.RESULTS / "demo_vision.jsonl", "parameters", "flops", "top1", "ema_top1"):
        by_label.setdefault(record["label"], []).append(record)
    return by_label


def language() -> list[Table]:
    """The last demo's models (of an older demo those that are the same today), then the paper's as printed."""
    records = language_records()
    rows = [
        [f"**{label}**", *(form.format(record["metrics"][key]) for key, (_, form) in COLUMNS.items())]
        for label, record in records.items()
    ]
    for label, printed in published.LANGUAGE.items():
        shown = [f"*{printed[key]}*" if key in printed else "" for key in COLUMNS]
        rows.append([f"*paper, depth 20: {label}*", *shown])
    headings = ["", *(heading for heading, _ in COLUMNS.values())]
    return [Table.of(headings, rows, sources=[measured(list(records.values()), "demo.jsonl")])]


def vision() -> list[Table]:
    """The micro-ViTs on digits: the mean over seeds and half their range."""
    records = vision_records()
    rows = [[f"**{label}**", *cells([run["metrics"] for run in runs])] for label, runs in records.items()]
    sources = [measured([*itertools.chain(*records.values())], "demo_vision.jsonl")]
    return [Table.of(["", *HEADINGS], rows, sources=sources)]
