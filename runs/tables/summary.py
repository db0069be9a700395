"""The one table of results: what was measured here, a row for each subject."""

import statistics

import pandas as pd

from gka.kinds import KINDS
from runs import frames
from runs.bench import error
from runs.demo.language import VARIANTS, run_tag
from runs.table import Row, Table
from runs.tables.benchmarks import SCORERS, scorers
from runs.tables.demo import language_records, vision_records

HARDWARE = "Intel(R) Xeon(R) Processor, 2 threads"  # of the whole table
BOTH = "forward+backward"
SOFTMAX, GKA = KINDS["softmax"].label, KINDS["gka"].label


def timed(benchmark: str, case: str, phase: str) -> pd.DataFrame:
    """The newest comparison of a case and phase on the table's machine."""
    lines = frames.bench(benchmark)
    return lines[(lines.hardware == HARDWARE) & (lines.case == case) & (lines.phase == phase)]


def times_row(subject: str, *comparisons: pd.DataFrame) -> Row:
    """Median milliseconds of the fastest softmax attention and of ours, and how much faster ours is."""
    pairs = [frames.sides(lines).median_ms.iloc[0] for lines in comparisons]
    softmax, ours = (" / ".join(f"{pair[side]:.3g} ms" for pair in pairs) for side in ("baseline", "ours"))
    ratios = " / ".join(f"{frames.ratios(lines).iloc[0]:.2f}x" for lines in comparisons)
    return [subject, softmax, ours, f"{ratios} as fast"]


def bpb_row() -> Row:
    """The demo's language models."""
    records = {label: record["metrics"]["val_bpb"] for label, record in language_records().items()}
    softmax, gka, offsets = (records[variant.label] for variant in VARIANTS.values())
    ours = f"{gka:.4f} (with head offsets, not the paper's: {offsets:.4f})"
    return ["demo's language models: validation bits per byte", f"{softmax:.4f}", ours, f"{gka - softmax:+.4f}"]


def digits_row() -> Row:
    """The demo's vision models, averaged weights, mean over seeds."""
    records = vision_records()
    softmax, gka = (statistics.fmean(run["metrics"]["ema_top1"] for run in records[label]) for label in (SOFTMAX, GKA))
    return ["demo's vision models: digits, EMA top-1", f"{softmax:.1f} %", f"{gka:.1f} %", f"{gka - softmax:+.1f}"]


def scorer_row() -> Row:
    """CORE's six tasks of the paper with the demo's models, ours over nanochat's way."""
    lines = scorers()
    totals = lines[lines.hardware == HARDWARE].groupby("model")[["examples", *SCORERS]].sum()
    cells, gains = [], []
    for name in ("softmax", "gka-paper"):
        total = totals.loc[run_tag(name)]
        fastest = total[list(SCORERS)].min()
        cells.append(f"{total.examples / fastest:,.0f} examples/s")
        gains.append(f"{total['by example'] / fastest:.1f}x")
    ratio = f"{' / '.join(gains)} as fast as one example at a time"
    return ["CORE's scorer, the paper's six tasks", *cells, ratio]


def error_row() -> Row:
    """The fused CPU route against the float64 oracle, beside plain PyTorch in the same dtype."""
    errors = {
        (record["config"]["dtype"], record["config"]["route"]): record["metrics"]["y"]
        for record in error.records("routes")
        if record["config"]["features"] == "normal"
    }
    plain, ours = (
        f"float32 {errors['float32', route]:.0e}, bfloat16 {errors['bfloat16', route]:.0e}"
        for route in ("plain", "cpu")
    )
    return ["operator's relative error against float64", "", ours, f"plain PyTorch: {plain}"]


def results() -> list[Table]:
    """The one table of results."""
    causal, steps = timed("attention", "lm-full", BOTH), timed("gpt", "d4", "training")
    shape = f"{causal.batch.iloc[0]} × {causal.tokens.iloc[0]} causal tokens"
    deit = [timed("deit", "deit-ti-b8", phase) for phase in ("inference", "training")]
    rows = [
        times_row("operator, DeiT-Ti's 8 × 197 tokens: forward + backward", timed("attention", "vit-ti", BOTH)),
        times_row(f"operator, {shape}: forward + backward", causal),
        times_row("DeiT-Ti, 8 images: inference / training step", *deit),
        times_row("GPT of depth 4, 4 × 512 tokens: training step", steps),
        bpb_row(),
        digits_row(),
        scorer_row(),
        error_row(),
    ]
    source = f"Measured on {HARDWARE}; dates, commits and versions are in `runs/results/`."
    return [Table.of(["measured here", SOFTMAX, GKA, f"{GKA} against {SOFTMAX}"], rows, sources=[source])]
