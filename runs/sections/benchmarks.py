"""The benchmarks' other tables: text generation, the CORE scorer, and the operator's errors (speed: speed.py)."""

from gka.kinds import KINDS
from runs.bench import error
from runs.demo.language import VARIANTS, run_tag
from runs.sections.sources import RESULTS, benchmarks, measured, table
from trainkit_gka.progress import read_lines

GKA = KINDS["gka"].label
DECODERS = {
    "softmax": KINDS["softmax"].label,
    "gka": GKA,
    "gka-normalised": f"{GKA}, values normalised (ours)",
    "gka-keys": "the same, keys kept",
}
SCORERS = {
    "by prompt": "one prompt at a time",
    "by example": "one example at a time",
    "batched": "batched",
    "batched, beginnings shared": "beginnings shared",
}
OUTPUTS = {"y": "y", "dx": "dx", "dkeys": "dkeys", "dvalues": "dvalues", "dlog_sigma": "dlogσ"}


def decode() -> str:
    """Tokens per second of whole models while they generate, and what their caches hold, for each hardware."""
    headings = ["", "cache, 8 rows", "tokens/s, 1 row", "tokens/s, 8 rows"]
    parts = []
    for hardware, compared in benchmarks("gpt").items():
        rows = []
        for case in sorted({case for case, phase in compared if phase == "decode-8"}):
            one, eight = (
                {line["config"]["candidate"]: line["metrics"] for line in compared[case, phase].lines}
                for phase in ("decode-1", "decode-8")
            )
            if not DECODERS.keys() <= eight.keys():
                continue  # measured of other forms than these
            for kind, label in DECODERS.items():
                speeds = [f"{metrics[kind]['items_per_second']:,.0f}" for metrics in (one, eight)]
                rows.append([f"{case}, {label}", f"{eight[kind]['cache_mib']:.1f} MiB", *speeds])
            source = measured(compared[case, "decode-8"].lines[0], f"bench_gpt_{hardware}.jsonl")
        if rows:
            parts.append("\n".join([table(headings, rows), source]))
    return "\n\n".join(parts)


def scorer_seconds(hardware: str) -> tuple[dict[tuple[str, int], tuple[int, dict[str, float]]], dict]:
    """(model, vocabulary) -> examples and every scorer's seconds over all tasks; and the last record."""
    newest: dict[tuple, dict] = {}
    for record in read_lines(RESULTS / f"bench_core_{hardware}.jsonl"):
        config = record["config"]
        newest[config["model"], config["vocab_size"], config["task"]] = record
    tags = {run_tag(name) for name in VARIANTS}
    totals: dict[tuple[str, int], tuple[int, dict[str, float]]] = {}
    for (model, vocabulary, _), record in newest.items():
        if model in tags:
            examples, seconds = totals.get((model, vocabulary), (0, dict.fromkeys(SCORERS, 0.0)))
            metrics = record["metrics"]
            added = {scorer: seconds[scorer] + metrics["seconds"][scorer] for scorer in SCORERS}
            totals[model, vocabulary] = examples + metrics["examples"], added
    return totals, list(newest.values())[-1]


def scorer() -> str:
    """The CORE scorer's speed on the demo's models, for each hardware."""
    headings = ["examples/s, six tasks", *SCORERS.values(), "over by prompt", "over by example"]
    parts = []
    for path in sorted(RESULTS.glob("bench_core_*.jsonl")):
        totals, newest = scorer_seconds(path.stem.removeprefix("bench_core_"))
        rows = []
        for (model, vocabulary), (examples, seconds) in totals.items():
            speeds = [f"{examples / value:,.0f}" for value in seconds.values()]
            gains = [f"{seconds[slow] / min(seconds.values()):.1f}x" for slow in ("by prompt", "by example")]
            rows.append([f"{model}, vocabulary {vocabulary:,}", *speeds, *gains])
        parts.append("\n".join([table(headings, rows), measured(newest, path.name)]))
    return "\n\n".join(parts)


def errors() -> str:
    """The relative errors of every operator route, float32 beside bfloat16."""
    records = error.records("routes")
    paired: dict[tuple[str, str], list[dict]] = {}
    for record in records:
        paired.setdefault((record["config"]["features"], record["config"]["route"]), []).append(record["metrics"])
    rows = []
    for names, (single, half) in paired.items():
        sizes = [f"{single[name]:.0f}" for name in ("max_norm2_over_sigma2", "log_sigma_condition")]
        off = [one[name] for one in (single, half) for name in ("y", "dx", "dlog_sigma")]
        rows.append([*names, *sizes, *("NaN" if value is None else f"{value:.0e}" for value in off)])
    outputs = [f"{dtype} {name}" for dtype in ("fp32", "bf16") for name in ("y", "dx", "dlogσ")]
    headings = ["features", "route", "max x²/σ²", "cond", *outputs]
    return "\n".join([table(headings, rows, left=2), measured(records, error.FILE.name)])


def cpu_errors() -> str:
    """The CPU kernel beside plain PyTorch in float32: over many small cases, and in a few with long rows among them."""
    swept, cases = error.records("sweep"), error.records("cases")
    rows = []
    for config, shown in ((record["config"], record["metrics"]) for record in swept):
        name = config["output"]
        plain, cpu = (
            [one["metrics"][name] for one in cases if one["config"]["route"] == route and name in one["metrics"]]
            for route in error.BOTH
        )
        times = max(ours / theirs for ours, theirs in zip(cpu, plain, strict=True))
        small = [f"{shown['median']:.2f}", f"{shown['most']:.2f}", f"{shown['above_1']} of {config['cases']:,}"]
        rows.append([OUTPUTS[name], *small, shown["worst"], f"{times:.2f}", f"{max(cpu):.1e}"])
    headings = ["times plain PyTorch's error", "median", "most", "above 1", "where it is most"]
    count = len({record["config"]["case"] for record in cases})
    headings += [f"most of {count} cases", f"largest error of {count} cases"]
    return "\n".join([table(headings, rows), measured(swept + cases, error.FILE.name)])
