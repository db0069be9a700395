"""The table of the text classifier, from the rows of `python -m runs.examples.text_classifier`."""

from runs import frames
from runs.examples.text_classifier import FILE, TextClassifierConfig, rows_of, table
from runs.table import Table, measured


def text_classifier() -> list[Table]:
    """With the command's own settings."""
    rows = rows_of(frames.RESULTS / FILE, TextClassifierConfig())
    return [table(rows, [measured(list(rows.record), FILE)] if len(rows) else [])]
