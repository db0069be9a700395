"""Claims about speed and memory (table 4, sections 3.5, 4.3 and 6)."""

import statistics

from runs.bench import operator_error
from runs.paper import published
from runs.paper.evidence import FAILS, HOLDS, PRINTED, Finding, follows
from runs.paper.evidence.sizes import SIZES
from runs.paper.paper_table import percent
from runs.sections.sources import benchmarks
from trainkit.progress import read_lines
from trainkit.results import is_processor

TRAINING = ("training_64", "training_128")
MEMORY = ("inference_memory", "memory_64", "memory_128")
CARD_MB = 32_000  # of an RTX 5090, section 4.1


def _figures(label: str) -> dict[str, float]:
    return {key: float(value) for key, value in published.rows("runtime")[label].items()}


def _changes(*keys: str) -> dict[tuple[str, str], float]:
    """(size, column) -> GKA against DeiT in percent, from the printed figures."""
    return {
        (size, key): percent(_figures(f"GKA-{size}")[key], _figures(f"DeiT-{size}")[key])
        for size in SIZES
        for key in keys
    }


def _by_size(key: str) -> str:
    return ", ".join(f"{_changes(key)[size, key]:+.0f}" for size in SIZES)


def slower_in_the_paper() -> Finding:
    changes = _changes("inference", *TRAINING).values()
    text = f"Images/s: {max(changes):+.0f} % to {min(changes):+.0f} % over the table's {len(changes)} comparisons."
    return follows(max(changes) < 0, PRINTED, text)


def slower_here() -> Finding:
    """Whole models, compiled on both sides, and the bare operator, on whatever hardware was measured."""
    models, operator = _speeds("deit"), _speeds("attention", case="vit-ti")
    always = bool(models) and all(ratio < 1 for ratios in models.values() for ratio in ratios.values())
    text = f"Softmax's time over ours: {_written(models)}; the bare operator: {_written(operator)}."
    return Finding(HOLDS if always else FAILS, f"our implementation on {_where(models)}", text)


def _speeds(benchmark: str, role: str = "baseline", case: str = "", phase: str = "") -> dict[str, dict[str, float]]:
    """Hardware -> case and phase -> the time of `role` over ours; the newest comparisons of case and phase."""
    speeds: dict[str, dict[str, float]] = {}
    for compared in benchmarks(benchmark).values():
        for (name, measured_phase), comparison in compared.items():
            ratio = comparison.ratio(role)
            if case in ("", name) and phase in ("", measured_phase) and ratio is not None:
                speeds.setdefault(comparison.lines[0]["hardware"], {})[f"{name} {measured_phase}"] = ratio
    return speeds


def _written(speeds: dict[str, dict[str, float]]) -> str:
    """The ratios in words, with the hardware where there is more than one."""
    parts = []
    for hardware, ratios in speeds.items():
        text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        parts.append(f"{text} ({hardware})" if len(speeds) > 1 else text)
    return ", ".join(parts)


def _where(speeds: dict[str, dict[str, float]]) -> str:
    only_processors = all(map(is_processor, speeds))
    return ", ".join(speeds) + ("; no GPU yet" if only_processors else "")


def more_memory() -> Finding:
    changes = _changes(*MEMORY)
    less = [f"{size} {change:+.0f} %" for (size, key), change in changes.items() if change < 0]
    factor = 1 + max(changes.values()) / 100
    text = f"Less in inference: {', '.join(less)}. More elsewhere, up to {factor:.2f}x."
    return follows(not less, PRINTED, text)


def penalty_grows_with_scale() -> Finding:
    grows = all(
        _changes(key)["Ti", key] > _changes(key)["S", key] > _changes(key)["B", key] for key in ("inference", *TRAINING)
    )
    text = f"Ti, S, B: inference {_by_size('inference')} %, training at 64 {_by_size('training_64')} %"
    return follows(grows, PRINTED, f"{text}, at 128 {_by_size('training_128')} %.")


def penalty_grows_with_batch() -> Finding:
    changes = _changes(*TRAINING)
    grows = all(changes[size, "training_64"] > changes[size, "training_128"] for size in SIZES)
    text = f"Training at 64 a GPU {_by_size('training_64')} %, at 128 {_by_size('training_128')} % (Ti, S, B)."
    return follows(grows, PRINTED, text)


def inference_gap_ends() -> Finding:
    changes = _changes("inference")
    ends = [round(changes[size, "inference"]) for size in ("Ti", "B")]
    text = f"Ti {ends[0]} %, B {ends[1]} %; between them S has {changes['S', 'inference']:+.0f} %."
    return follows(ends == [-12, -46], PRINTED, text)


def throughput_doubles() -> Finding:
    gains = {
        label: _figures(label)["training_128"] / _figures(label)["training_64"] for label in published.rows("runtime")
    }
    true = gains["DeiT-S"] > 1.9 and gains["GKA-S"] < 1.2
    text = ", ".join(f"{label} {gain:.2f}x" for label, gain in gains.items())
    return follows(true, PRINTED, f"From 64 to 128 a GPU: {text}. DeiT-B gains little too, GKA-Ti much.")


def largest_memory() -> Finding:
    used = _figures("GKA-B")["memory_128"]
    return follows(round(used / 1000, 1) == 19.9, PRINTED, f"{used:,.0f} MB, of {CARD_MB / 1000:.0f} GB.")


def batch_of_256_fits() -> Finding:
    """A line through the two printed batches."""
    gka = _figures("GKA-B")
    needed = gka["memory_128"] + 2 * (gka["memory_128"] - gka["memory_64"])
    text = (
        f"GKA-B's two batches extrapolate to {needed / 1000:.1f} GB at 256 a GPU, on cards of {CARD_MB / 1000:.0f} GB"
    )
    return follows(needed < CARD_MB, f"{PRINTED}, extrapolated in a line", f"{text} (checkpointing would save memory).")


# Fused kernels


def _operator_gain() -> dict[str, dict[str, float]]:
    """The time of the paper's eager form over our fused operator's, forward and backward."""
    gains = _speeds("attention", role="eager", phase="forward+backward")
    return {
        hardware: {name: gain for name, gain in ratios.items() if not name.startswith("sweep")}
        for hardware, ratios in gains.items()
    }


def _fused_is_exact() -> bool:
    """Whether the fused route's bfloat16 output is never less exact than plain PyTorch's (runs/results)."""
    errors: dict[str, dict[str, float]] = {}
    for record in read_lines(operator_error.RESULTS):
        metrics = record["metrics"]
        if metrics["dtype"] == "bfloat16" and metrics["y"] is not None:
            errors.setdefault(metrics["kind"], {})[metrics["route"]] = metrics["y"]
    pairs = [(routes["sdpa"], routes["plain"]) for routes in errors.values() if routes.keys() >= {"sdpa", "plain"}]
    return bool(pairs) and all(fused <= plain for fused, plain in pairs)


def amenable_to_fused() -> Finding:
    gains = _operator_gain()
    ratios = [gain for ratios in gains.values() for gain in ratios.values()]
    true = bool(ratios) and statistics.median(ratios) > 1 and _fused_is_exact()
    text = f"The eager form's time over our fastest route's: {_written(gains)}."
    return Finding(HOLDS if true else FAILS, _where(gains), text)


def cannot_use_sdpa() -> Finding:
    """The claim holds only if the route through SDPA were wrong or slower than the eager form."""
    can = amenable_to_fused()
    text = '`impl="sdpa"` writes the distance as a dot product of extended features and calls fused SDPA'
    exact = "its bfloat16 error is at most plain PyTorch's" if _fused_is_exact() else "it is not exact"
    return Finding(FAILS if can.verdict == HOLDS else HOLDS, can.scale, f"{text}; {exact}. {can.measured}")
