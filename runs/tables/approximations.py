"""The tables of the approximations of GKA: errors, signs, times, and when one of them wins."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from runs.frames import RESULTS
from runs.neighbours.approximations import measure
from runs.neighbours.approximations.forms import FORMS, MEAN
from runs.neighbours.approximations.measure import FUSED, SOFTMAX
from runs.table import NOT_RUN, Table, measured

FILE = "neighbours/approximations.jsonl"
SIZES = (64, 256, 1024)
SIZE_OF_TIMES = 256


def forms() -> list[Table]:
    """The forms, where they come from, and their equations."""
    rows = ([name, form.source, form.equation] for name, form in FORMS.items())
    return [Table.of(["form", "from", "equation"], rows, words=3)]


def errors(path: Path = RESULTS / FILE) -> list[Table]:
    """Relative errors by form and source, a table for every length."""
    known, tables = measure.errors(path), []
    for tokens, here in known.groupby("tokens"):
        error = here.set_index(["source", "form", "size"]).error.map("{:.2g}".format)

        def cell(source: str, name: str, error: pd.Series = error, tokens: int = tokens) -> str:
            sizes = (0,) if name == FUSED else FORMS[name].sizes or [size for size in SIZES if size <= tokens]
            cells = [error.get((source, name, size), NOT_RUN) for size in sizes]
            return NOT_RUN if set(cells) == {NOT_RUN} else " / ".join(cells)

        sources = known.source.unique()
        rows = [[name, *(cell(source, name) for source in sources)] for name in (FUSED, *FORMS)]
        tables.append(Table.of(["", *sources], rows, title=f"N = {tokens:,}:"))
    return _with_source(tables, path, "error")


def signs(path: Path = RESULTS / FILE) -> list[Table]:
    """The share of rows with a negative and with an undefined sum, of the forms that have some, over all seeds; a table
    for every length.
    """
    known, tables = measure.rows(path, "error"), []
    if known.empty:
        return []
    counted = known[known.form != FUSED]
    sums = counted.groupby(["tokens", "form", "size", "source"])[["negative", "undefined", "rows"]].sum()
    shares = sums[["negative", "undefined"]].div(sums["rows"], axis=0)
    cells = (shares.negative.map(_percent) + " / " + shares.undefined.map(_percent)).unstack().fillna(NOT_RUN)
    wrong = (shares > 0).any(axis=1).unstack().any(axis=1)
    for tokens in sorted(known.tokens.unique()):
        keys = [(tokens, name, size) for name, form in FORMS.items() for size in form.sizes or SIZES]
        shown = cells.loc[[key for key in keys if wrong.get(key)], known.source.unique()]
        rows = [[name, str(size), *row] for (_, name, size), row in zip(shown.index, shown.to_numpy())]
        if rows:
            tables.append(Table.of(["", "size", *shown.columns], rows, title=f"N = {tokens:,}:"))
    return _with_source(tables, path, "error")


def times(path: Path = RESULTS / FILE) -> list[Table]:
    """Milliseconds, in brackets over the exact operator's, and MiB, against N; a table for each mask. Headings say of
    how many samples the milliseconds are the median.
    """
    known = measure.times(path)
    keys = [(name, 0) for name in (FUSED, SOFTMAX)]
    keys += [(name, 0 if form.sizes else SIZE_OF_TIMES) for name, form in FORMS.items()]
    cells = known.assign(cell=[_time(line) for line in known.itertuples()])
    tables = []
    for causal, here in sorted(cells.groupby("causal"), reverse=True):
        shown = here.pivot(index=["form", "size"], columns="tokens", values="cell").reindex(keys).fillna(NOT_RUN)
        samples = here.groupby("tokens").samples.unique()
        headings = [f"N = {tokens:,}{_samples(samples[tokens])}" for tokens in shown.columns]
        rows = [[_named(*key), *row] for key, row in zip(shown.index, shown.to_numpy())]
        tables.append(Table.of(["", *headings], rows, title=f"{'With a causal' if causal else 'Without a'} mask:"))
    return _with_source(tables, path, "time")


def answer(path: Path = RESULTS / FILE) -> list[Table]:
    """For every source and length the least error of what is faster than the exact operator."""
    known, rows = measure.errors_and_times(path), []
    for source, tokens in itertools.product(known.source.unique(), sorted(known.tokens.unique())):
        here = known[(known.source == source) & (known.tokens == tokens)]
        faster = here[(here.over_fused < 1) & here.form.isin(set(FORMS) - {MEAN})].sort_values("error")
        best = ["none", "", "", ""]
        for line in faster.head(1).itertuples():
            best = [_named(line.form, line.size), f"{line.error:.2g}", f"{line.worst_head:.2g}"]
            best.append(f"{line.over_fused:.2f}")
        rows += [[source, f"{tokens:,}", *best, f"{mean:.2g}"] for mean in here[here.form == MEAN].error]
    headings = ["features of", "N", "best of what is faster", "its error", "of its worst head", "its time over exact"]
    return _with_source([Table.of([*headings, "error of the mean"], rows)] if rows else [], path, "time")


def _percent(share: float) -> str:
    return "< 0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def _samples(counts) -> str:
    """Of how many samples the times are, in words; nothing where none were taken."""
    counts = sorted(int(count) for count in counts)
    return f" ({' or '.join(map(str, counts))} sample{'s' * (counts != [1])})" if counts else ""


def _named(form: str, size: float) -> str:
    return f"{form}, {size:,.0f}" if size else form


def _time(line) -> str:
    over = "" if pd.isna(line.over_fused) else f" ({line.over_fused:.2f}x)"
    return f"{line.median_ms:.3g} ms{over}" + ("" if pd.isna(line.peak_mib) else f", {line.peak_mib:.0f} MiB")


def _with_source(tables: list[Table], path: Path, part: str) -> list[Table]:
    """The tables, the last of which says where the rows of their part were measured."""
    if tables:
        tables[-1].sources = [measured(list(measure.rows(path, part).record), FILE)]
    return tables


TABLES: dict[str, Callable[..., list[Table]]] = {
    "approximations-forms": forms,
    "approximations-errors": errors,
    "approximations-signs": signs,
    "approximations-time": times,
    "approximations-answer": answer,
}
