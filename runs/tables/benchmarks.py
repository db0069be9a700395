"""The benchmarks' other tables: text generation and the CORE scorer (speed: speed.py; errors: errors.py)."""

import pandas as pd

from gka.kinds import KINDS
from runs import frames
from runs.demo.language import VARIANTS, run_tag
from runs.table import Table, measured

GKA = KINDS["gka"].label
DECODERS = {
    "softmax": KINDS["softmax"].label,
    "gka": GKA,
    "gka-normalised": f"{GKA}, values normalised (not the paper's)",
    "gka-keys": "the same, keys kept",
}
SCORERS = {
    "by prompt": "one prompt at a time",
    "by example": "one example at a time",
    "batched": "batched",
    "batched, beginnings shared": "beginnings shared",
}


def decode() -> list[Table]:
    """Tokens per second of whole models while they generate, and what their caches hold, for each hardware."""
    tables, lines = [], frames.bench("gpt")
    for _, of_hardware in lines[lines.phase.str.startswith("decode")].groupby("hardware", sort=False):
        rows = []
        for case, timed in of_hardware.groupby("case"):
            speeds = timed.pivot(index="candidate", columns="phase", values="items_per_second")
            caches = timed[timed.phase == "decode-8"].set_index("candidate").cache_mib
            if not DECODERS.keys() <= set(caches.index):
                continue  # measured of other forms than these
            for kind, label in DECODERS.items():
                said = [f"{speeds[phase][kind]:,.0f}" for phase in ("decode-1", "decode-8")]
                rows.append([f"{case}, {label}", f"{caches[kind]:.1f} MiB", *said])
        if rows:
            headings = ["", "cache, 8 rows", "tokens/s, 1 row", "tokens/s, 8 rows"]
            tables.append(
                Table.of(headings, rows, sources=[measured(list(of_hardware.record), of_hardware.file.iloc[0])])
            )
    return tables


def scorers() -> pd.DataFrame:
    """Of the demo's models the examples of all tasks and every scorer's seconds, by file, model and vocabulary."""
    parts = []
    for path in sorted(frames.RESULTS.glob("bench_core_*.jsonl")):
        lines = frames.frame(path, "model", "vocab_size", "task", "examples", "seconds").assign(file=path.name)
        parts.append(lines.drop_duplicates(["model", "vocab_size", "task"], keep="last").sort_index())
    if not parts:
        return pd.DataFrame()
    lines = pd.concat(parts, ignore_index=True)
    lines[list(SCORERS)] = pd.DataFrame(list(lines.seconds))[list(SCORERS)]
    return lines


def scorer() -> list[Table]:
    """The CORE scorer's speed on the demo's models, for each hardware."""
    tables, tags = [], {run_tag(name) for name in VARIANTS}
    for file, lines in scorers().groupby("file"):
        rows = []
        demos = lines[lines.model.isin(tags)]
        totals = demos.groupby(["model", "vocab_size"], sort=False)[["examples", *SCORERS]].sum()
        for (model, vocabulary), total in totals.iterrows():
            seconds = total[list(SCORERS)]
            speeds = [f"{speed:,.0f}" for speed in total.examples / seconds]
            gains = [f"{seconds[slow] / seconds.min():.1f}x" for slow in ("by prompt", "by example")]
            rows.append([f"{model}, vocabulary {vocabulary:,}", *speeds, *gains])
        headings = ["examples/s, six tasks", *SCORERS.values(), "over by prompt", "over by example"]
        tables.append(Table.of(headings, rows, sources=[measured(list(lines.record), file)]))
    return tables
