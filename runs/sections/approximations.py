"""The tables of the approximations of GKA: errors, signs, times, when one of them wins, and what models learn."""

import itertools
import math
import textwrap
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from runs.neighbours.approximations import measure
from runs.neighbours.approximations.forms import FORMS, MEAN
from runs.neighbours.approximations.measure import FUSED, SOFTMAX
from runs.neighbours.approximations.picture import PICTURE, TOKENS, caption, points
from runs.neighbours.approximations.training import APPROXIMATE, EXACT
from runs.neighbours.rows import frame
from runs.sections.sources import RESULTS, measured, table

FILE = "neighbours/approximations.jsonl"
NOT_RUN = "not run"
SIZES = (64, 256, 1024)
SIZE_OF_TIMES = 256


def forms() -> str:
    """The forms, where they come from, and their equations."""
    return table(["form", "from", "equation"], [[name, form.source, form.equation] for name, form in FORMS.items()], 3)


def errors(path: Path = RESULTS / FILE) -> str:
    """Relative errors by form and source, a table for every length."""
    known = measure.errors(path)
    sources, error = known.source.unique(), known.set_index(["source", "tokens", "form", "size"]).error

    def cell(source: str, tokens: int, name: str) -> str:
        sizes = (0,) if name == FUSED else FORMS[name].sizes or [size for size in SIZES if size <= tokens]
        cells = [_number(error.get((source, tokens, name, size))) for size in sizes]
        return NOT_RUN if set(cells) == {NOT_RUN} else " / ".join(cells)

    def one(tokens: int) -> str:
        rows = [[name, *(cell(source, tokens, name) for source in sources)] for name in (FUSED, *FORMS)]
        return f"N = {tokens:,}:\n\n{table(['', *sources], rows)}"

    return _noted(path, "error", [one(tokens) for tokens in sorted(known.tokens.unique())])


def signs(path: Path = RESULTS / FILE) -> str:
    """The share of rows with a negative and with an undefined sum, of the forms that have some, over all seeds; a table
    for every length.
    """
    known, parts = frame(path, part="error"), []
    if known.empty:
        return NOT_RUN
    sources, counted = known.source.unique(), known[known.form != FUSED]
    sums = counted.groupby(["tokens", "form", "size", "source"])[["negative", "undefined", "rows"]].sum()
    shares = sums[["negative", "undefined"]].div(sums["rows"], axis=0)
    cells = shares.negative.map(_percent) + " / " + shares.undefined.map(_percent)
    for tokens in sorted(known.tokens.unique()):
        keys = [(tokens, name, size) for name, form in FORMS.items() for size in form.sizes or SIZES]
        wrong = [key for key in keys if key in shares.index and shares.loc[key].to_numpy().any()]
        rows = [[key[1], str(key[2]), *(cells.get((*key, source), NOT_RUN) for source in sources)] for key in wrong]
        if rows:
            parts.append(f"N = {tokens:,}:\n\n{table(['', 'size', *sources], rows)}")
    return _noted(path, "error", parts)


def times(path: Path = RESULTS / FILE) -> str:
    """Milliseconds, in brackets over the exact operator's, and MiB, against N; a table for each mask. Headings say of
    how many samples the milliseconds are the median.
    """
    known, parts = measure.times(path), []
    keys = [(name, 0) for name in (FUSED, SOFTMAX)]
    keys += [(name, 0 if form.sizes else SIZE_OF_TIMES) for name, form in FORMS.items()]
    for causal in sorted(known.causal.unique(), reverse=True):
        headings, columns = [], []
        for tokens in sorted(known.tokens.unique()):
            here = known[(known.tokens == tokens) & (known.causal == causal)].set_index(["form", "size"])
            headings.append(f"N = {tokens:,}{_samples(here)}")
            columns.append([_time(here.loc[key]) if key in here.index else NOT_RUN for key in keys])
        rows = [[_named(*key), *cells] for key, *cells in zip(keys, *columns)]
        parts.append(f"{'With a causal' if causal else 'Without a'} mask:\n\n{table(['', *headings], rows)}")
    return _noted(path, "time", parts)


def picture(path: Path = RESULTS / FILE) -> str:
    """The picture as a page shows it, with its caption; `python -m runs.neighbours.approximations --parts picture`."""
    drawn = textwrap.fill(caption(points(path)), 120)
    return f"![Error against time at N = {TOKENS:,}](../../results/pictures/{PICTURE})\n\n{drawn}" if drawn else NOT_RUN


def answer(path: Path = RESULTS / FILE) -> str:
    """For every source and length the least error of what is faster than the exact operator."""
    known, rows = measure.errors_and_times(path), []
    for source, tokens in itertools.product(known.source.unique(), sorted(known.tokens.unique())):
        here = known[(known.source == source) & (known.tokens == tokens)]
        faster = here[(here.over_fused < 1) & here.form.isin(set(FORMS) - {MEAN})].sort_values("error")
        best = ["none", "", "", ""]
        for line in faster.head(1).itertuples():
            best = [_named(line.form, line.size), _number(line.error)]
            best += [_number(line.worst_head), f"{line.over_fused:.2f}"]
        rows += [[source, f"{tokens:,}", *best, _number(mean)] for mean in here[here.form == MEAN].error]
    headings = ["features of", "N", "best of what is faster", "its error", "of its worst head", "its time over exact"]
    headings.append("error of the mean")
    return _noted(path, "time", [table(headings, rows)] if rows else [])


def trained(path: Path = RESULTS / FILE) -> str:
    """What models reach with the exact operator and with approximations, in the longest trainings of each task and
    shape of model.
    """
    known, rows = frame(path, part="training"), []
    if known.empty:
        return NOT_RUN
    known["shape"] = known.settings.map(shape_of)
    known = known[known.length == known.groupby(["task", "shape"]).length.transform("max")]
    for (task, shape), here in known.groupby(["task", "shape"], sort=False):
        key, form, unit = ("ema_top1", ".2f", "top-1 %") if task == "digits" else ("val_bpb", ".4f", "bits per byte")
        cells = []
        for name in (EXACT, *APPROXIMATE):
            values = [f"{value:{form}}" for value in here[here.form == name][key]]
            cells.append(f"{', '.join(values)} ({len(values)} seed{'s' * (len(values) > 1)})" if values else NOT_RUN)
        rows.append([task, shape, unit, f"{here.length.iloc[0]:,}", *cells])
    headings = ["", "depth, width", "", "epochs or steps", EXACT, *APPROXIMATE]
    return f"{table(headings, rows, left=3)}\n{measured(known.to_dict('records'), FILE)}"


def shape_of(settings: dict) -> str:
    """Depth and width of a language model, or of a vision model, whose settings have them as words for timm."""
    words = dict(word.split("=") for word in settings.get("model_kwargs", []))
    return f"{settings.get('depth', words.get('depth'))}, {settings.get('width', words.get('embed_dim'))}"


def _percent(share: float) -> str:
    return "< 0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def _samples(timed: pd.DataFrame) -> str:
    """Of how many samples the times are, in words; nothing where none were taken."""
    counts = sorted(timed.samples.unique())
    return f" ({' or '.join(map(str, counts))} sample{'s' * (counts != [1])})" if counts else ""


def _named(form: str, size: int) -> str:
    return f"{form}, {size:,}" if size else form


def _number(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.2g}"


def _time(line: pd.Series) -> str:
    over = "" if math.isnan(line.over_fused) else f" ({line.over_fused:.2f}x)"
    return f"{line.median_ms:.3g} ms{over}" + ("" if pd.isna(line.peak_mib) else f", {line.peak_mib:.0f} MiB")


def _noted(path: Path, part: str, parts: list[str]) -> str:
    """The parts, and where the rows of their kind were measured."""
    text, known = "\n\n".join(parts), frame(path, part=part)
    return f"{text}\n{measured(known.to_dict('records'), FILE)}" if text else NOT_RUN


TABLES: dict[str, Callable[..., str]] = {
    "approximations-forms": forms,
    "approximations-errors": errors,
    "approximations-signs": signs,
    "approximations-time": times,
    "approximations-picture": picture,
    "approximations-answer": answer,
    "approximations-training": trained,
}
