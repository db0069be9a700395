"""The one table of results for the front page: what was measured here, a row for each subject, linking to its page."""

import statistics

from gka.kinds import KINDS
from runs.bench import error
from runs.bench.results import Comparison
from runs.demo.language import VARIANTS, run_tag
from runs.sections.benchmarks import scorer_seconds
from runs.sections.sources import benchmarks, language_records, table, vision_records

HARDWARE = "intel-xeon-processor-2-threads"  # the machine of the whole table
BOTH = "forward+backward"
# Where a row's subject has more.
SPEED, DEMO = "runs/README.md#benchmarks", "runs/README.md#the-demo"
CORE, ERRORS = "nanochat_gka/README.md#core", "gka/README.md#error-model"
SOFTMAX, GKA = KINDS["softmax"].label, KINDS["gka"].label
Row = list[str]


def times(comparison: Comparison) -> tuple[float, float]:
    """Median milliseconds of the fastest softmax attention and of ours."""
    return tuple(comparison.fastest(role)["metrics"]["median_ms"] for role in ("baseline", "ours"))


def row(subject: str, page: str, softmax: str, gka: str, ratio: str) -> Row:
    return [subject, softmax, gka, ratio, f"[{page.partition('/')[0]}]({page})"]


def time_row(subject: str, page: str, comparison: Comparison) -> Row:
    """Times of one comparison, and how much faster ours is."""
    softmax, ours = times(comparison)
    return row(subject, page, f"{softmax:.3g} ms", f"{ours:.3g} ms", f"{softmax / ours:.2f}x as fast")


def causal_row(comparison: Comparison) -> Row:
    """The operator as the language models have it."""
    config = comparison.lines[0]["config"]
    shape = f"{config['batch']} × {config['tokens']} causal tokens"
    return time_row(f"operator, {shape}: forward + backward", SPEED, comparison)


def deit_row() -> Row:
    """DeiT-Ti's inference and training, a batch of 8 images."""
    compared = benchmarks("deit")[HARDWARE]
    phases = [times(compared["deit-ti-b8", phase]) for phase in ("inference", "training")]
    softmax, ours = (" / ".join(f"{pair[side]:.3g} ms" for pair in phases) for side in (0, 1))
    ratio = " / ".join(f"{softmax_ms / our_ms:.2f}x" for softmax_ms, our_ms in phases)
    return row("DeiT-Ti, 8 images: inference / training step", SPEED, softmax, ours, f"{ratio} as fast")


def bpb_row() -> Row:
    """The demo's language models."""
    records = {label: record["metrics"]["val_bpb"] for label, record in language_records().items()}
    softmax, gka, offsets = (records[variant.label] for variant in VARIANTS.values())
    ours = f"{gka:.4f} (with head offsets, ours: {offsets:.4f})"
    return row(
        "demo's language models: validation bits per byte", DEMO, f"{softmax:.4f}", ours, f"{gka - softmax:+.4f}"
    )


def digits_row() -> Row:
    """The demo's vision models, averaged weights, mean over seeds."""
    records = vision_records()
    softmax, gka = (statistics.fmean(run["metrics"]["ema_top1"] for run in records[label]) for label in (SOFTMAX, GKA))
    return row(
        "demo's vision models: digits, EMA top-1", DEMO, f"{softmax:.1f} %", f"{gka:.1f} %", f"{gka - softmax:+.1f}"
    )


def scorer_row() -> Row:
    """CORE's six tasks of the paper with the demo's models, ours over nanochat's way."""
    totals, _ = scorer_seconds(HARDWARE)
    per_model = {model: (examples, seconds) for (model, _), (examples, seconds) in totals.items()}
    cells, gains = [], []
    for name in ("softmax", "gka-paper"):
        examples, seconds = per_model[run_tag(name)]
        cells.append(f"{examples / min(seconds.values()):,.0f} examples/s")
        gains.append(f"{seconds['by example'] / min(seconds.values()):.1f}x")
    ratio = f"{' / '.join(gains)} as fast as one example at a time"
    return row("CORE's scorer, the paper's six tasks", CORE, *cells, ratio)


def error_row() -> Row:
    """The fused CPU route against the float64 oracle, beside plain PyTorch in the same dtype."""
    errors = {}
    for record in error.records("routes"):
        config = record["config"]
        if config["features"] == "normal":
            errors[config["dtype"], config["route"]] = record["metrics"]["y"]
    cells = [
        f"float32 {errors['float32', route]:.0e}, bfloat16 {errors['bfloat16', route]:.0e}"
        for route in ("plain", "cpu")
    ]
    plain, ours = cells
    return row("operator's relative error against float64", ERRORS, "", ours, f"plain PyTorch: {plain}")


def results() -> str:
    """The one table of results."""
    operator, gpt = benchmarks("attention")[HARDWARE], benchmarks("gpt")[HARDWARE]
    rows = [
        time_row("operator, DeiT-Ti's 8 × 197 tokens: forward + backward", SPEED, operator["vit-ti", BOTH]),
        causal_row(operator["lm-full", BOTH]),
        deit_row(),
        time_row("GPT of depth 4, 4 × 512 tokens: training step", SPEED, gpt["d4", "training"]),
        bpb_row(),
        digits_row(),
        scorer_row(),
        error_row(),
    ]
    newest = gpt["d4", "training"].lines[0]
    source = f"\nMeasured on {newest['hardware']}; dates, commits and versions are in `runs/results/`."
    return "\n".join([table(["measured here", SOFTMAX, GKA, f"{GKA} against {SOFTMAX}", "more"], rows), source])
