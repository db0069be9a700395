"""The tables of the approximations of GKA: errors, signs, times, when one of them wins, and what models learn."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from runs.neighbours.approximations.forms import FORMS
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
    """The share of rows with a negative and with an undefined sum, of the forms that have some, over all seeds."""
    results, rows = Approximations.read(path), []
    sources = results.values("error", "source")
    tokens = min(results.values("error", "tokens"), default=0)

    def share(source: str, name: str, size: int) -> tuple[float, float] | None:
        seeds = results.errors(source, tokens, name, size)
        total = sum(metrics["rows"] for metrics in seeds)
        return tuple(sum(m[kind] for m in seeds) / total for kind in ("negative", "undefined")) if total else None

    for name in FORMS:
        for size in FORMS[name].sizes or SIZES:
            shares = [share(source, name, size) for source in sources]
            if any(any(pair) for pair in shares if pair):
                cells = [f"{pair[0]:.2%} / {pair[1]:.2%}" if pair else NOT_RUN for pair in shares]
                rows.append([name, str(size), *cells])
    return _noted(results, "error", [f"N = {tokens:,}:\n\n{table(['', 'size', *sources], rows)}"] if rows else [])


def times(path: Path = RESULTS / FILE) -> str:
    """Milliseconds, in brackets over the exact operator's, and MiB, against N; a table for each mask."""
    results = Approximations.read(path)
    lengths, parts = sorted(results.values("time", "tokens")), []
    for causal in sorted(results.values("time", "causal"), reverse=True):
        by_length = [results.times(tokens, causal) for tokens in lengths]
        keys = [(name, 0) for name in (FUSED, SOFTMAX)]
        keys += [(name, 0 if form.sizes else SIZE_OF_TIMES) for name, form in FORMS.items()]
        rows = [[_named(*key), *(_time(timed.get(key)) for timed in by_length)] for key in keys]
        heading = "With a causal mask:" if causal else "Without a mask:"
        parts.append(f"{heading}\n\n{table(['', *(f'N = {n:,}' for n in lengths)], rows)}")
    return _noted(results, "time", parts)


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
            best = [_named(*faster[0][1]), _number(faster[0][0]), f"{ratios[faster[0][1]]:.2f}"] if faster else ["none"]
            rows.append([source, f"{tokens:,}", *best, *[""] * (3 - len(best)), _number(mean)])
    headings = ["features of", "N", "best of what is faster", "its error", "its time over exact", "error of the mean"]
    return _noted(results, "time", [table(headings, rows, left=1)] if rows else [])


def trained(path: Path = RESULTS / FILE) -> str:
    """What models reach with the exact operator and with approximations, in the longest trainings of each task."""
    results, rows = Approximations.read(path), []
    records = [record for record in results.records if record["config"]["part"] == "training"]
    for task in dict.fromkeys(r["config"]["task"] for r in records):
        length = max(r["config"]["length"] for r in records if r["config"]["task"] == task)
        key, form, unit = TRAINED["digits" if task == "digits" else "language"]
        cells = []
        for name in (EXACT, *APPROXIMATE):
            case = dict(task=task, length=length, form=name)
            values = [r["metrics"][key] for r in records if case.items() <= r["config"].items()]
            seeds = f" ({len(values)} seed{'s' * (len(values) > 1)})"
            cells.append(", ".join(f"{value:{form}}" for value in values) + seeds if values else NOT_RUN)
        rows.append([task, unit, f"{length:,}", *cells])
    headings = ["", "", "epochs or steps", EXACT, *APPROXIMATE]
    return _noted(results, "training", [table(headings, rows, left=2)] if rows else [])


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
    """The parts, and where the newest row of their kind was measured."""
    text = "\n\n".join(parts)
    records = [record for record in results.records if record["config"]["part"] == part]
    return f"{text}\n{measured(records[-1], FILE)}" if text else NOT_RUN


TABLES: dict[str, Callable[..., str]] = {
    "approximations-forms": forms,
    "approximations-errors": errors,
    "approximations-signs": signs,
    "approximations-time": times,
    "approximations-answer": answer,
    "approximations-training": trained,
}
