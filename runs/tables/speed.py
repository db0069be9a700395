"""The tables of speed: softmax attention's fastest beside GKA, of the operator and of whole models.

A row has the numbers of threads side by side; each ratio is of one comparison, which was timed in turns.
"""

from collections.abc import Iterator

import pandas as pd

from gka.kinds import KINDS
from runs import frames
from runs.table import Row, Table, measured

SOFTMAX, GKA = KINDS["softmax"].label, KINDS["gka"].label
PHASES = {"forward+backward": "forward + backward"}
SIZES = {"ti": "Ti", "s": "S", "b": "B"}
HEADINGS = ["", "phase", "dtype", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up"]
WAYS = ["float32", "float32, compiled", "bfloat16", "bfloat16, compiled"]
FORMS = {"": GKA, "offsets": f"{GKA}, head offsets (not the paper's)"}
WITH_OFFSETS = "the same with head offsets (not the paper's)"


def operator() -> list[Table]:
    """The bare operator; sweeps over sizes are left to the files."""
    tables = []
    for _, of_machine in by(frames.bench("attention"), "machine"):
        rows = []
        for _, timed in by(of_machine[~of_machine.case.str.startswith("sweep")], "case", "phase"):
            rows += row(label(timed.iloc[0]), timed)
            dense = timed.kernel == "dense mask"
            if dense.any():
                rows += row("the same against a dense mask", timed[dense | (timed.family == "gka")])
            alone, plain = timed.kernel == "one by one", timed.kernel.str.endswith(" without lengths")
            if alone.any():
                others = timed[alone | (timed.family == "gka")].replace({"role": {"other": "baseline"}})
                rows += row("the same against one sequence at a time", others)
            if plain.any():
                others = timed[plain | (timed.family == "softmax")].replace({"role": {"variant": "ours"}})
                rows += row("the same without lengths", others)
        tables += table(HEADINGS, rows, of_machine)
    return tables


def models() -> list[Table]:
    """Vision transformers and language models, a training step or a forward pass; decoding has a table of its own."""
    tables = []
    for _, of_machine in by(pd.concat([by_size(frames.bench("deit")), frames.bench("gpt")]), "machine"):
        rows = []
        for _, timed in by(of_machine[~of_machine.phase.str.startswith("decode")], "case", "phase"):
            ratio = flops_ratio(timed)
            shown = f"{ratio:.2f}x" if ratio else ""
            rows += row(label(timed.iloc[0]), timed, both_compiled(timed), shown)
            rows += row(WITH_OFFSETS, with_offsets(timed), "", shown)
        tables += table([*HEADINGS, "both compiled", "FLOPs ratio"], rows, of_machine)
    return tables


def training() -> list[Table]:
    """Tokens per second of GPT training on CPUs, by dtype, eager and compiled, and what the fastest way gains."""
    tables, lines = [], frames.bench("gpt")
    lines = lines[(lines.phase == "training") & lines.threads.notna()]
    ways = lines.dtype + lines.compiled.map({True: ", compiled", False: ""})
    lines = lines.assign(model=lines.case.str.removesuffix("-bf16"), way=ways, label=lines.form.map(FORMS))
    lines.loc[lines.family == "softmax", "label"] = SOFTMAX
    for _, of_machine in by(lines.sort_values("model", kind="stable"), "machine"):
        rows = []
        own = of_machine[of_machine.computed_in == of_machine.dtype]
        for (_, threads), timed in by(own, "model", "threads"):
            for name in (SOFTMAX, *FORMS.values()):
                speeds = timed[timed.label == name].set_index("way").items_per_second.reindex(WAYS)
                if speeds.notna().any():
                    said = ["" if pd.isna(speed) else f"{speed:,.0f}" for speed in speeds]
                    gain = f"{speeds.max() / speeds.iloc[0]:.2f}x" if said[0] else ""
                    rows.append([f"{label(timed.iloc[0])}, {name}", f"{threads:.0f}", *said, gain])
        tables += table(["", "threads", *WAYS, "gain"], rows, of_machine, words=1)
    return tables


def by(lines: pd.DataFrame, *columns: str) -> Iterator[tuple]:
    """The groups of lines, in order of their first line."""
    return iter(lines.groupby(list(columns) if len(columns) > 1 else columns[0], sort=False))


def with_offsets(timed: pd.DataFrame) -> pd.DataFrame:
    """The lines of a case with head offsets as ours."""
    return timed[(timed.family == "softmax") | (timed.form == "offsets")].replace({"role": {"variant": "ours"}})


def row(name: str, timed: pd.DataFrame, *more: str) -> list[Row]:
    """The row of one case and phase, in a list; no row if a side was never right."""
    ratios = frames.ratios(timed)
    if ratios.empty:
        return []
    pair = frames.sides(timed).loc[ratios.index]
    sides = [pair.xs(role, axis=1, level="role") for role in ("baseline", "ours")]
    times = [
        in_words([milliseconds(ms) for ms in side.median_ms], [which(line) for _, line in side.iterrows()])
        for side in sides
    ]
    gains = " / ".join(f"{ratio:.2f}x" for ratio in ratios)
    threads = " / ".join(f"{count:.0f}" for count in pair.index if count)
    first = timed.iloc[0]
    return [[name, PHASES.get(first.phase, first.phase), first["dtype"], threads, *times, gains, *more]]


def both_compiled(timed: pd.DataFrame) -> str:
    """The ratios of what is compiled alone, where there is something else beside it."""
    gains = []
    for _, lines in by(timed.fillna({"threads": 0}).sort_values("threads", kind="stable"), "threads"):
        if not lines.compiled.all():
            gains += [f"{ratio:.2f}x" for ratio in frames.ratios(lines[lines.compiled])]
    return " / ".join(gains)


def table(headings: Row, rows: list[Row], lines: pd.DataFrame, words: int = 4) -> list[Table]:
    """A table of one machine, with a source for each date, commit and kind of file; none without rows."""
    sources = []
    for _, timed in by(lines, "case", "phase"):
        for _, comparison in timed.groupby("threads", dropna=False):
            first = comparison.iloc[0]
            record = first.record | {"hardware": first.machine}
            sources.append(measured(record, f"{record['kind']}_*.jsonl"))
    title = f"{lines.machine.iloc[0]}:" if rows else ""
    return [Table.of(headings, rows, title=title, sources=list(dict.fromkeys(sources)), words=words)] if rows else []


# Cells


def flops_ratio(timed: pd.DataFrame) -> float | None:
    """FLOPs of the softmax model over GKA's, for a token's training or an image's forward pass."""
    flops = timed.groupby("role").flops.last()
    known = {"baseline", "ours"} <= set(flops.dropna().index)
    return flops.baseline / flops.ours if known else None


def milliseconds(time: float) -> str:
    return f"{time:.3g}" if time < 1000 else f"{time:,.0f}"


def in_words(times: Row, kinds: Row) -> str:
    """Times with what they are of, which is said once if it is one."""
    if len(set(kinds)) == 1:
        return " / ".join(times) + (f" ({kinds[0]})" if kinds[0] else "")
    return " / ".join(f"{time} ({kind})" if kind else time for time, kind in zip(times, kinds, strict=True))


def which(line: pd.Series) -> str:
    """What tells a line, named by its threads, from the others of its side; the kernel of ours is one on a CPU."""
    words = ["eager"] if line.eager else []
    if line.family == "softmax":
        words = ([line.kernel] if line.kernel not in ("", "sdpa") else []) + words
        words += [line.computed_in] if line["dtype"] == "bfloat16" and line.name else []
    return ", ".join(words)


def by_size(deit: pd.DataFrame) -> pd.DataFrame:
    """Small models come first, inference before training."""
    if deit.empty:
        return deit
    order = deit.assign(size=deit["size"].map(list(SIZES).index), phase=deit.phase == "training")
    return deit.loc[order.sort_values(["size", "phase", "batch"], kind="stable").index]


def label(line: pd.Series) -> str:
    """A case of the operator or of a model in words. line: of a frame, or the settings of a measurement."""
    return _operator(line) if pd.notna(line.get("head_dim")) else _model(line)


def _operator(line: pd.Series) -> str:
    """With batch × tokens × heads × channels."""
    shape = " × ".join(f"{line[key]:.0f}" for key in ("batch", "tokens", "heads", "head_dim"))
    if line.queries < line.tokens:
        return f"decoding, cache {shape}" + (", keys derived from it" if line.get("derived") is True else "")
    if line.causal:
        return f"causal, {shape}" + (f", window {line.window:.0f}" if pd.notna(line.window) else "")
    if pd.notna(line.get("shortest")):
        start = f"{line.shortest:.0f} to" if line.shortest < line.tokens else "all"
        return f"padded, {shape}, lengths {start} {line.tokens:.0f}"
    size = SIZES.get(line.case.split("-")[1]) if line.case.startswith("vit-") else None
    return (f"ViT-{size}, " if size else "") + shape


def _model(line: pd.Series) -> str:
    if isinstance(line.get("size"), str):
        return f"DeiT-{SIZES[line['size']]}, {line.batch:.0f} {'image' if line.batch == 1 else 'images'}"
    windows = line.get("window_pattern", "L")
    windows = f", windows {windows}" if isinstance(windows, str) and windows != "L" else ""
    return f"GPT of depth {line.depth:.0f}, {line.batch:.0f} × {line.sequence_len:.0f} tokens{windows}"
