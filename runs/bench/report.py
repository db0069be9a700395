"""The benchmarks' tables: the fastest softmax attention beside GKA, from the result files.

    python -m runs.bench.report                            prints this machine's, of every number of threads
    python -m runs.bench.report --hardware "NVIDIA H200"   prints another machine's
    python -m runs.bench.report --write                    writes the tables of the pages, and their picture
    python -m runs.bench.report --check                    exits with 1 if a page does not say what the result files say

Runs made with --quick count only with --quick. A row of a table has the numbers of threads side by side; each ratio is
of one comparison, whose candidates were timed in turns.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from gka.kinds import KINDS
from runs import frames, pages
from runs.bench.program import BenchConfig, slug
from runs.looks import HEADING, LARGE, LOOKS, save, slide
from runs.table import Row, Table, measured
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.plots import BLUE
from trainkit_gka.progress import console
from trainkit_gka.results import describe_hardware, with_chip

SOFTMAX, GKA = KINDS["softmax"].label, KINDS["gka"].label
FULL, STEP = "forward+backward", "training"
SIZES = {"ti": "Ti", "s": "S", "b": "B"}
PHASES = {FULL: "forward + backward"}
HEADINGS = ["", "phase", "dtype", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up"]
WITH_OFFSETS = "the model above with head offsets (not the paper's)"
PRESET = "the same, the preset beside softmax with the preset's additions"
QUIET_CORES = 0.1  # this much work of other processes disturbs nothing


@dataclass
class BenchReportConfig(BenchConfig):
    """Print the benchmarks' tables of one machine, or write those of the pages."""

    hardware: str = ""
    """Machine to report: its name, or the end of its files' names; empty = this one."""
    write: bool = False
    """Write the tables of the pages, and their picture, and print none."""
    check: bool = False
    """Exit with 1 if a table of the pages is out of date, and print none."""


# Tables


def operator(lines: pd.DataFrame | None = None) -> list[Table]:
    """The bare operator, a table for each machine; sweeps over sizes are left to the files."""
    lines = frames.bench("attention") if lines is None else lines

    def rows(timed: pd.DataFrame) -> list[Row]:
        if timed.case.iloc[0].startswith("sweep"):
            return []
        ours, softmax = timed.family == "gka", timed.family == "softmax"
        dense, single = timed.kernel == "dense mask", timed.kernel == "one by one"
        plain = timed.kernel.str.endswith(" without lengths")
        one_by_one = timed[single | ours].replace({"role": {"other": "baseline"}})
        return [
            *row(label(timed.iloc[0]), timed),
            *row("the same against a dense mask", timed[dense | ours]),
            *row("the same against one sequence at a time", one_by_one),
            *row("the case above without lengths", as_ours(timed[plain | softmax])),
        ]

    return by_machine(lines, HEADINGS, rows)


def models(lines: pd.DataFrame | None = None) -> list[Table]:
    """Whole models, a training step or a forward pass, a table for each machine; decoding has a table of its own."""
    lines = pd.concat([by_size(frames.bench("deit")), frames.bench("gpt")]) if lines is None else lines

    def rows(timed: pd.DataFrame) -> list[Row]:
        if timed.phase.iloc[0].startswith("decode"):
            return []
        flops, preset = flops_ratio(timed), with_additions(timed)
        return [
            *row(label(timed.iloc[0]), timed, both_compiled(timed), flops),
            *row(WITH_OFFSETS, with_offsets(timed), "", flops),
            *row(PRESET, preset, "", flops_ratio(preset)),
        ]

    return by_machine(lines, [*HEADINGS, "both compiled", "FLOPs ratio"], rows)


WAYS = ["float32", "float32, compiled", "bfloat16", "bfloat16, compiled"]
FORMS = {
    "softmax": SOFTMAX,
    "softmax-preset": f"{SOFTMAX}, the preset's additions",
    "gka": GKA,
    "gka-offsets": f"{GKA}, head offsets (not the paper's)",
    "gka-preset": f"{GKA}, the preset (not the paper's)",
}


def training(lines: pd.DataFrame | None = None) -> list[Table]:
    """Tokens per second of GPT training on CPUs, by dtype, eager and compiled, and what the fastest way gains."""
    lines = frames.bench("gpt") if lines is None else lines
    lines = lines[(lines.phase == STEP) & lines.threads.notna() & (lines.computed_in == lines["dtype"])]
    ways = lines["dtype"] + lines.compiled.map({True: ", compiled", False: ""})
    forms = lines.family + lines.form.map(lambda form: f"-{form}" if form else "")
    lines = lines.assign(model=lines.case.str.removesuffix("-bf16"), way=ways, kind=forms)

    def rows(timed: pd.DataFrame) -> list[Row]:
        every = []
        for kind, name in FORMS.items():
            speeds = timed[timed.kind == kind].set_index("way").items_per_second.reindex(WAYS)
            if speeds.notna().any():
                cells = ["" if pd.isna(speed) else f"{speed:,.0f}" for speed in speeds]
                gain = f"{speeds.max() / speeds.iloc[0]:.2f}x" if cells[0] else ""
                every.append([f"{label(timed.iloc[0])}, {name}", f"{timed.threads.iloc[0]:.0f}", *cells, gain])
        return every

    lines = lines.sort_values("model", kind="stable")
    return by_machine(lines, ["", "threads", *WAYS, "gain"], rows, ("model", "threads"), words=1)


DECODERS = {
    "softmax": SOFTMAX,
    "gka": GKA,
    "gka-normalised": f"{GKA}, values normalised (not the paper's)",
    "gka-keys": "the same, keys kept",
}


def decode(lines: pd.DataFrame | None = None) -> list[Table]:
    """Tokens per second of whole models while they generate, and what their caches hold, for each hardware."""
    tables, lines = [], frames.bench("gpt") if lines is None else lines
    headings = ["", "cache, 8 rows", "tokens/s, 1 row", "tokens/s, 8 rows"]
    for _, of_hardware in by(lines[lines.phase.str.startswith("decode")], "hardware"):
        rows = []
        for case, timed in of_hardware.groupby("case"):
            speeds = timed.pivot(index="candidate", columns="phase", values="items_per_second")
            if not DECODERS.keys() <= set(speeds.index) or not {"decode-1", "decode-8"} <= set(speeds.columns):
                continue
            caches = timed[timed.phase == "decode-8"].set_index("candidate").cache_mib
            for kind, name in DECODERS.items():
                rates = [f"{speeds[phase][kind]:,.0f}" for phase in ("decode-1", "decode-8")]
                rows.append([f"{case}, {name}", f"{caches[kind]:.1f} MiB", *rates])
        source = measured(list(of_hardware.record), of_hardware.file.iloc[0])
        tables += [Table.of(headings, rows, sources=[source])] if rows else []
    return tables


# Of attention, decoding and whole models, the hard cases among them.
CASES_OF_ONE_MACHINE = {
    **{"vit-s": (FULL,), "lm-full": ("forward", FULL), "decode-b1-1024": ("forward",)},
    **{"decode-derived-b1-1024": ("forward",), "deit-ti-b8": ("inference", STEP), "d6": (STEP,)},
}


def one_machine() -> list[Table]:
    """Some cases on the CPU with the most measurements: float32, the speed-up in bfloat16, and the FLOPs ratio."""
    lines = pd.concat([frames.bench("attention"), by_size(frames.bench("deit")), frames.bench("gpt")])
    lines = lines[lines.threads.notna()]
    if lines.empty:
        return []
    lines = lines[lines.machine == lines.machine.value_counts().idxmax()]
    cases = zip(lines.case.str.removesuffix("-bf16"), lines.phase)
    lines = lines[[phase in CASES_OF_ONE_MACHINE.get(case, ()) for case, phase in cases]]

    def rows(timed: pd.DataFrame) -> list[Row]:
        every, flops = [], flops_ratio(timed)
        for name, part in ((timed.label.iloc[0], timed), (WITH_OFFSETS, with_offsets(timed))):
            single, half = (row(name, part[part["dtype"] == dtype]) for dtype in ("float32", "bfloat16"))
            every += [[*cells[:2], *cells[3:], half[0][-1] if half else "", flops] for cells in single]
        return every

    headings = ["", "phase", "threads", f"{SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "in bfloat16", "FLOPs ratio"]
    return by_machine(lines.assign(label=lines.apply(label, axis=1)), headings, rows, ("label", "phase"), words=3)


def gpus() -> list[Table]:
    """The operator on each GPU: the fastest attention of torch, its default, and ours, all in bfloat16."""
    lines = frames.bench("attention")

    def rows(timed: pd.DataFrame) -> list[Row]:
        right = timed[timed.status == "ok"]
        default, ours = (right[those].median_ms.min() for those in (right.kernel == "flash", right.role == "ours"))
        beside = "" if pd.isna(default) else f"{default / ours:.2f}x"
        return [[*cells[:2], *cells[4:], beside] for cells in row(label(timed.iloc[0]), timed)]

    headings = ["", "phase", f"fastest {SOFTMAX}, ms", f"{GKA}, ms", "speed-up", "speed-up over torch's default"]
    return by_machine(lines[lines.threads.isna()], headings, rows)


TABLES = {
    **{"speed": one_machine, "gpus": gpus, "operator": operator, "models": models},
    **{"training": training, "decode": decode},
}
PAGES = ("runs/README.md", "gka/impl/triton/README.md", "runs/results/TABLES.md")


# Rows and their cells


def by(lines: pd.DataFrame, *columns: str) -> Iterator[tuple]:
    """The groups of lines, in order of their first line."""
    return iter(lines.groupby(list(columns) if len(columns) > 1 else columns[0], sort=False))


def by_machine(
    lines: pd.DataFrame, headings: Row, rows_of: Callable[[pd.DataFrame], list[Row]],
    comparison: tuple[str, str] = ("case", "phase"), words: int = 4,
) -> list[Table]:  # fmt: skip
    """A table for each machine, with a source for each date, commit and kind of file; none without rows.

    rows_of: rows of the lines that are alike in the columns of `comparison`.
    """
    tables = []
    for machine, of_machine in by(lines, "machine"):
        rows = [one for _, timed in by(of_machine, *comparison) for one in rows_of(timed)]
        records = [
            timed.record.iloc[0]
            for _, compared in by(of_machine, "case", "phase")
            for _, timed in compared.groupby("threads", dropna=False)
        ]
        sources = [measured([one | {"hardware": machine}], f"{one['kind']}_*.jsonl") for one in records]
        about = dict(title=f"{machine}:", sources=list(dict.fromkeys(sources)), words=words)
        tables += [Table.of(headings, rows, **about)] if rows else []
    return tables


def as_ours(timed: pd.DataFrame) -> pd.DataFrame:
    return timed.replace({"role": {"variant": "ours"}})


def with_offsets(timed: pd.DataFrame) -> pd.DataFrame:
    """The lines of a case with GKA with head offsets as ours."""
    plain = (timed.family == "softmax") & (timed.role == "baseline")
    return as_ours(timed[plain | (timed.form == "offsets")])


def with_additions(timed: pd.DataFrame) -> pd.DataFrame:
    """The lines of a case of the preset as ours, and of softmax with the preset's additions as the baseline."""
    return as_ours(timed[timed.form == "preset"]).replace({"role": {"other": "baseline"}})


def row(name: str, timed: pd.DataFrame, *more: str) -> list[Row]:
    """The row of one case and phase, in a list; no row if a side was never right."""
    if not {"baseline", "ours"} <= {*timed.role} or (ratios := frames.ratios(timed)).empty:
        return []
    sides = frames.sides(timed).loc[ratios.index]
    times = []
    for role in ("baseline", "ours"):
        side = sides.xs(role, axis=1, level="role")
        times.append(in_words(side.median_ms, [which(line) for _, line in side.iterrows()]))
    gains = " / ".join(f"{ratio:.2f}x" for ratio in ratios)
    threads = " / ".join(f"{count:.0f}" for count in sides.index if count)
    first = timed.iloc[0]
    return [[name, PHASES.get(first.phase, first.phase), first["dtype"], threads, *times, gains, *more]]


def both_compiled(timed: pd.DataFrame) -> str:
    """The ratios of compiled models alone, where eager ones were timed too."""
    gains = []
    for _, lines in timed.fillna({"threads": 0}).groupby("threads"):
        if not lines.compiled.all():
            gains += [f"{ratio:.2f}x" for ratio in frames.ratios(lines[lines.compiled])]
    return " / ".join(gains)


def flops_ratio(timed: pd.DataFrame) -> str:
    """FLOPs of the softmax model over GKA's, for a token's training or an image's forward pass; empty if unknown."""
    flops = timed.groupby("role").flops.last().dropna()
    return f"{flops.baseline / flops.ours:.2f}x" if {"baseline", "ours"} <= set(flops.index) else ""


def in_words(times: pd.Series, kinds: Row) -> str:
    """Milliseconds with what they are of, once if all are of one."""
    texts = [f"{time:.3g}" if time < 1000 else f"{time:,.0f}" for time in times]
    if len(set(kinds)) == 1:
        return " / ".join(texts) + (f" ({kinds[0]})" if kinds[0] else "")
    return " / ".join(f"{text} ({kind})" if kind else text for text, kind in zip(texts, kinds, strict=True))


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
    order = deit.assign(size=deit["size"].map(list(SIZES).index), phase=deit.phase == STEP)
    return deit.loc[order.sort_values(["size", "phase", "batch"], kind="stable").index]


def label(line: pd.Series) -> str:
    """A case of the operator or of a model in words."""
    if isinstance(line.get("size"), str):
        return f"DeiT-{SIZES[line['size']]}, {line.batch:.0f} {'image' if line.batch == 1 else 'images'}"
    if pd.isna(line.get("head_dim")):
        windows = line.get("window_pattern", "L")
        windows = f", windows {windows}" if isinstance(windows, str) and windows != "L" else ""
        return f"GPT of depth {line.depth:.0f}, {line.batch:.0f} × {line.sequence_len:.0f} tokens{windows}"
    shape = " × ".join(f"{line[key]:.0f}" for key in ("batch", "tokens", "heads", "head_dim"))
    if line.queries < line.tokens:
        return f"decoding, cache {shape}" + (", keys derived from it" if line.get("derived") is True else "")
    if line.causal:
        separate = {"v": ", separate values", "vk": ", separate keys and values"}.get(line.get("apart"), "")
        return f"causal, {shape}" + (f", window {line.window:.0f}" if pd.notna(line.window) else "") + separate
    if pd.notna(line.get("shortest")):
        start = f"{line.shortest:.0f} to" if line.shortest < line.tokens else "all"
        return f"padded, {shape}, lengths {start} {line.tokens:.0f}"
    size = SIZES.get(line.case.split("-")[1]) if line.case.startswith("vit-") else None
    return (f"ViT-{size}, " if size else "") + shape


# The picture of speed-ups

PICTURE = frames.RESULTS / "pictures" / "speed.png"
TITLE = "How many times as fast as softmax attention is GKA (the paper's form)?"
TICKS = [0.7, 1, 1.5, 2, 3, 4]
LEFT_OUT = ("padded", "decode", "sweep")
DRAWN = {
    "the operator, forward + backward": {"attention": FULL},
    "whole models, a training step": {"deit": STEP, "gpt": STEP},
}


def speedups(results: Path | None = None) -> pd.DataFrame:
    """The ratio of the times of softmax's fastest and ours, a row for every case of DRAWN without LEFT_OUT.

    Columns: title, of DRAWN; chip, with a dtype other than float32; threads, 0 on a GPU; ratio.
    """
    rows = []
    for title, benchmark, phase in ((title, *of) for title, phases in DRAWN.items() for of in phases.items()):
        lines = frames.bench(benchmark, results)
        lines = lines[(lines.phase == phase) & ~lines.case.str.startswith(LEFT_OUT)]
        for (_, machine), timed in by(lines, "case", "machine"):
            dtype = timed["dtype"].iloc[0]
            chip = re.sub(r"\(R\)| Processor| family 6", "", machine).replace(" held to", ",")
            chip += "" if dtype == "float32" else f", {dtype}"
            rows += [[title, chip, int(threads), ratio] for threads, ratio in frames.ratios(timed).items()]
    return pd.DataFrame(rows, columns=["title", "chip", "threads", "ratio"])


def draw_speedups(frame: pd.DataFrame, path: Path) -> Path:
    """The picture of `speedups`: a row for every chip, a dot for each case and number of threads; GPUs are squares."""
    figure, axis, words = slide(["median"])
    rows: list[str] = []
    for title, part in by(frame, "title"):
        heading = dict(fontsize=LARGE, va="center", backgroundcolor="white")
        axis.text(0.02, len(rows), title, transform=axis.get_yaxis_transform(), **heading)
        rows.append("")
        for chip, timed in by(part, "chip"):
            look = dict(color=LOOKS[GKA].colour, marker="o") if timed.threads.all() else dict(color=BLUE, marker="s")
            axis.plot(timed.ratio, [len(rows)] * len(timed), linestyle="none", markersize=8, alpha=0.5, **look)
            median = f"{timed.ratio.median():.1f}×"
            words.text(0, len(rows), median, fontsize=LARGE, va="center", ha="center")
            rows.append(chip)
    axis.axvline(1, color="grey", linewidth=1.5)
    axis.set(xscale="log", ylim=(len(rows) - 0.4, -0.6))
    axis.set_xticks(TICKS, [f"{tick:g}×" for tick in TICKS])
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xlabel(f"time of {SOFTMAX} / time of {GKA}: left of 1× {SOFTMAX} is faster")
    return save(figure, TITLE, path, HEADING)


# One machine in the terminal


def show(hardware: str, config: BenchReportConfig) -> None:
    """Print everything of one machine, given by its name or its slug. Raises UserError if it has nothing."""
    wanted, found = slug(with_chip(hardware)), False
    for name, builders in {"attention": [operator], "deit": [models], "gpt": [models, training, decode]}.items():
        lines = frames.bench(name, config.results, config.quick)
        lines = lines[(lines.machine.map(slug) == wanted) | (lines.hardware.map(with_chip).map(slug) == wanted)]
        if lines.empty:
            continue
        found, lines = True, by_size(lines) if name == "deit" else lines
        for table in (table for builder in builders for table in builder(lines)):
            table.show()
        used = lines.elsewhere.fillna(0).groupby(lines.group).max()
        if disturbed := int((used > QUIET_CORES).sum()):
            comparisons = f"{disturbed} of these {len(used)} comparisons"
            console.print(f"other processes used up to {used.max():.1f} cores during {comparisons}: measure again")
    if not found:
        quick = "" if config.quick else " (runs made with --quick count only with --quick)"
        raise UserError(f"{config.results} has no benchmark of {hardware}{quick}; runs.bench.attention makes one")


def main(config: BenchReportConfig) -> None:
    if config.write or config.check:
        pages.write(TABLES, PAGES, "python -m runs.bench.report --write", config.check)
        if not config.check:
            draw_speedups(speedups(), PICTURE)
        return
    here = re.sub(r", \d+ threads?$", "", describe_hardware(setup(config.device_type).device))
    show(config.hardware or here, config)


if __name__ == "__main__":
    run(main, BenchReportConfig)
