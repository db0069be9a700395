"""The table of the text classifier, from the rows of `python -m runs.examples.text_classifier`."""

from runs import frames
from runs.examples.text_classifier import FILE, TextClassifierConfig, records_of, table
from runs.table import Table, measured


def text_classifier() -> list[Table]:
    """With the command's own settings."""
    records = records_of(frames.RESULTS / FILE, TextClassifierConfig())
    return [table(records, [measured(records, FILE)] if records else [])]
