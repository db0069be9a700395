"""The tables of the approximations of GKA: errors, signs, times, when one of them wins, and what models learn."""

import math
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from runs.neighbours.approximations.forms import FORMS
from runs.neighbours.approximations.pictures import PICTURE, TOKENS, caption
from runs.neighbours.approximations.rows import APPROXIMATE, EXACT, FUSED, MEAN, SOFTMAX, Approximations
from runs.sections.sources import RESULTS, measured, table

FILE = "neighbours/approximations.jsonl"
NOT_RUN = "not run"
SIZES = (64, 256, 1024)
SIZE_OF_TIMES = 256
TRAINED = {"digits": ("ema_top1", ".2f", "top-1 %"), "language": ("val_bpb", ".4f", "bits per byte")}


def forms() -> str:
    """The forms, where they come from, and their equations."""
    return table(["form", "from", "equation"], [[name, form.source, form.equation] for name, form in FORMS.items()], 3)


def errors(path: Path = RESULTS / FILE) -> str:
    """Relative errors by form and source, a table for every length."""
    results = Approximations.read(path)
    sources = results.values("error", "source")

    def cell(source: str, tokens: int, name: str) -> str:
        sizes = (0,) if name == FUSED else FORMS[name].sizes or [size for size in SIZES if size <= tokens]
        cells = [_number(results.error(source, tokens, name, size)) for size in sizes]
        return NOT_RUN if set(cells) == {NOT_RUN} else " / ".join(cells)

    def one(tokens: int) -> str:
        return table(["", *sources], [[name, *(cell(s, tokens, name) for s in sources)] for name in (FUSED, *FORMS)])

    lengths = sorted(results.values("error", "tokens"))
    return _noted(results, "error", (f"N = {tokens:,}:\n\n{one(tokens)}" for tokens in lengths))


def signs(path: Path = RESULTS / FILE) -> str:
    """The share of rows with a negative and with an undefined sum, of the forms that have some, over all seeds; a table
    for every length.
    """
    results, parts = Approximations.read(path), []
    sources = results.values("error", "source")

    def share(source: str, tokens: int, name: str, size: int) -> tuple[float, float] | None:
        seeds = results.errors(source, tokens, name, size)
        total = sum(metrics["rows"] for metrics in seeds)
        return tuple(sum(m[kind] for m in seeds) / total for kind in ("negative", "undefined")) if total else None

    for tokens in sorted(results.values("error", "tokens")):
        rows = []
        for name, size in ((name, size) for name, form in FORMS.items() for size in form.sizes or SIZES):
            shares = [share(source, tokens, name, size) for source in sources]
            if any(any(pair) for pair in shares if pair):
                cells = [" / ".join(map(_percent, pair)) if pair else NOT_RUN for pair in shares]
                rows.append([name, str(size), *cells])
        if rows:
            parts.append(f"N = {tokens:,}:\n\n{table(['', 'size', *sources], rows)}")
    return _noted(results, "error", parts)


def times(path: Path = RESULTS / FILE) -> str:
    """Milliseconds, in brackets over the exact operator's, and MiB, against N; a table for each mask. Headings say of
    how many samples the milliseconds are the median.
    """
    results = Approximations.read(path)
    lengths, parts = sorted(results.values("time", "tokens")), []
    for causal in sorted(results.values("time", "causal"), reverse=True):
        by_length = [results.times(tokens, causal) for tokens in lengths]
        keys = [(name, 0) for name in (FUSED, SOFTMAX)]
        keys += [(name, 0 if form.sizes else SIZE_OF_TIMES) for name, form in FORMS.items()]
        rows = [[_named(*key), *(_time(timed.get(key)) for timed in by_length)] for key in keys]
        heading = "With a causal mask:" if causal else "Without a mask:"
        headings = [f"N = {n:,}{_samples(timed)}" for n, timed in zip(lengths, by_length)]
        parts.append(f"{heading}\n\n{table(['', *headings], rows)}")
    return _noted(results, "time", parts)


def picture(path: Path = RESULTS / FILE) -> str:
    """The picture as a page shows it, with its caption; `python -m runs.neighbours.approximations --parts picture`."""
    drawn = textwrap.fill(caption(Approximations.read(path)), 120)
    return f"![Error against time at N = {TOKENS:,}](../../results/pictures/{PICTURE})\n\n{drawn}" if drawn else NOT_RUN


def answer(path: Path = RESULTS / FILE) -> str:
    """For every length and source the least error of what is faster than the exact operator."""
    results, rows = Approximations.read(path), []
    for source in results.values("error", "source"):
        for tokens in sorted(results.values("error", "tokens")):
            timed, mean = results.times(tokens, results.is_causal(source)), results.error(source, tokens, MEAN, 0)
            ratios = {key: metrics["over_fused"] for key, metrics in timed.items() if key[0] in FORMS}
            faster = [(results.error(source, tokens, *key), key) for key, ratio in ratios.items() if ratio < 1]
            faster = sorted(pair for pair in faster if pair[0] is not None and pair[1][0] != MEAN)
            if not ratios or mean is None:
                continue
            best = ["none", "", "", ""]
            if faster:
                error, key = faster[0]
                worst = max(metrics["worst_head"] for metrics in results.errors(source, tokens, *key))
                best = [_named(*key), _number(error), _number(worst), f"{ratios[key]:.2f}"]
            rows.append([source, f"{tokens:,}", *best, _number(mean)])
    headings = ["features of", "N", "best of what is faster", "its error", "of its worst head", "its time over exact"]
    headings.append("error of the mean")
    return _noted(results, "time", [table(headings, rows, left=1)] if rows else [])


def trained(path: Path = RESULTS / FILE) -> str:
    """What models reach with the exact operator and with approximations, in the longest trainings of each task and
    shape of model.
    """
    groups: dict[tuple[str, str], list[dict]] = {}
    for record in Approximations.read(path).records:
        if record["config"]["part"] == "training":
            groups.setdefault((record["config"]["task"], shape_of(record["metrics"]["settings"])), []).append(record)
    rows, shown = [], []
    for (task, shape), records in groups.items():
        length = max(record["config"]["length"] for record in records)
        records = [record for record in records if record["config"]["length"] == length]
        key, form, unit = TRAINED["digits" if task == "digits" else "language"]
        cells = []
        for name in (EXACT, *APPROXIMATE):
            values = [r["metrics"][key] for r in records if r["config"]["form"] == name]
            seeds = f" ({len(values)} seed{'s' * (len(values) > 1)})"
            cells.append(", ".join(f"{value:{form}}" for value in values) + seeds if values else NOT_RUN)
        rows.append([task, shape, unit, f"{length:,}", *cells])
        shown += records
    headings = ["", "depth, width", "", "epochs or steps", EXACT, *APPROXIMATE]
    return f"{table(headings, rows, left=3)}\n{measured(shown, FILE)}" if rows else NOT_RUN


def shape_of(settings: dict) -> str:
    """Depth and width of a language model, or of a vision model, whose settings have them as words for timm."""
    words = dict(word.split("=") for word in settings.get("model_kwargs", []))
    return f"{settings.get('depth', words.get('depth'))}, {settings.get('width', words.get('embed_dim'))}"


def _percent(share: float) -> str:
    return "< 0.01%" if 0 < share < 1e-4 else f"{share:.2%}"


def _samples(timed: dict) -> str:
    """Of how many samples the times are, in words; nothing where none were taken."""
    counts = sorted({metrics["samples"] for metrics in timed.values()})
    return f" ({' or '.join(map(str, counts))} sample{'s' * (counts != [1])})" if counts else ""


def _named(form: str, size: int) -> str:
    return f"{form}, {size:,}" if size else form


def _number(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.2g}"


def _time(metrics: dict | None) -> str:
    if metrics is None:
        return NOT_RUN
    ratio, peak = metrics["over_fused"], metrics["peak_mib"]
    over = "" if math.isnan(ratio) else f" ({ratio:.2f}x)"
    return f"{metrics['median_ms']:.3g} ms{over}" + ("" if peak is None else f", {peak:.0f} MiB")


def _noted(results: Approximations, part: str, parts: Iterable[str]) -> str:
    """The parts, and where the rows of their kind were measured."""
    text = "\n\n".join(parts)
    records = [record for record in results.records if record["config"]["part"] == part]
    return f"{text}\n{measured(records, FILE)}" if text else NOT_RUN


TABLES: dict[str, Callable[..., str]] = {
    "approximations-forms": forms,
    "approximations-errors": errors,
    "approximations-signs": signs,
    "approximations-time": times,
    "approximations-picture": picture,
    "approximations-answer": answer,
    "approximations-training": trained,
}
