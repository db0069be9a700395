"""Claims about speed and memory (table 4, sections 3.5, 4.3 and 6)."""

import re

from runs import frames
from runs.bench import error
from runs.bench.config import is_unusual
from runs.comparison.evidence import PRINTED, UNTESTED, Finding, follows, holds, seen
from runs.comparison.evidence.sizes import SIZES
from runs.paper import published
from runs.paper.cells import percent
from trainkit_gka.results import is_processor

TRAINING = ("training_64", "training_128")
MEMORY = ("inference_memory", "memory_64", "memory_128")
CARD_MB = 32_000  # of an RTX 5090, section 4.1
MOST_NAMED = 3  # ratios that are written one by one


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


def fusion_is_the_reason() -> Finding:
    """Whole models, all compiled: softmax's time over that of GKA, fused and unfused, in the same comparisons."""
    fused, over_unfused = _speeds("deit"), _speeds("deit", role="unfused")
    unfused = {
        hardware: {case: fused[hardware][case] / ratio for case, ratio in ratios.items() if case in fused[hardware]}
        for hardware, ratios in over_unfused.items()
    }
    if any(unfused.values()):  # where the two forms were timed side by side
        fused = {hardware: {case: fused[hardware][case] for case in ratios} for hardware, ratios in unfused.items()}
    operator = _written(_speeds("attention", case="vit-ti"))
    text = f"Softmax's time over that of GKA, fused: {_written(fused)}; the bare operator: {operator}"
    if not any(unfused.values()):
        return Finding(UNTESTED, _where(fused), f"{text}. Unfused, as the paper has it, was not timed yet.")
    slower = all(ratio < 1 for ratios in unfused.values() for ratio in ratios.values())
    faster = all(ratio >= 1 for ratios in fused.values() for ratio in ratios.values())
    return seen(slower and faster, _where(fused), f"{text}; unfused: {_written(unfused)}.")


def _speeds(benchmark: str, role: str = "baseline", case: str = "") -> dict[str, dict[str, float]]:
    """Hardware -> comparison -> the time of the fastest of `role` over ours."""
    speeds: dict[str, dict[str, float]] = {}
    for (hardware, name, phase), timed in _comparisons(benchmark):
        fastest = timed[timed.status == "ok"].groupby("role").median_ms.min()
        if case in ("", name) and {role, "ours"} <= set(fastest.index):
            speeds.setdefault(hardware, {})[f"{name} {phase}"] = fastest[role] / fastest.ours
    return speeds


def _comparisons(benchmark: str):
    """(hardware, case, phase), and the lines of the newest comparison."""
    return frames.bench(benchmark).groupby(["hardware", "case", "phase"], sort=False)


def _written(speeds: dict[str, dict[str, float]]) -> str:
    """The ratios in words, or many of them as a range, with the hardware where there is more than one."""
    parts = []
    for hardware, ratios in speeds.items():
        text = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        if len(ratios) > MOST_NAMED:
            text = f"{min(ratios.values()):.2f}x to {max(ratios.values()):.2f}x in {len(ratios)} comparisons"
        parts.append(f"{text} ({hardware})" if len(speeds) > 1 else text)
    return ", ".join(parts)


def _where(speeds: dict[str, dict[str, float]]) -> str:
    """The machines, without their numbers of threads."""
    machines = dict.fromkeys(re.sub(r", \d+ threads?$", "", hardware) for hardware in speeds)
    return ", ".join(machines) + ("; no model on a GPU yet" if all(map(is_processor, speeds)) else "")


def more_memory() -> Finding:
    changes = _changes(*MEMORY)
    less = [f"{size} {change:+.0f} %" for (size, key), change in changes.items() if change < 0]
    factor, more = 1 + max(changes.values()) / 100, len(changes) - len(less)
    text = f"More in {more} of {len(changes)} comparisons, up to {factor:.2f}x. Less in inference: {', '.join(less)}."
    return follows(not less, PRINTED, text)


def penalty_grows_with_scale() -> Finding:
    grows = all(
        _changes(key)["Ti", key] > _changes(key)["S", key] > _changes(key)["B", key] for key in ("inference", *TRAINING)
    )
    text = f"Ti, S, B: inference {_by_size('inference')} %, training at 64 {_by_size('training_64')} %"
    text = f"{text}, at 128 {_by_size('training_128')} %. From Ti to B alone it grows in all three."
    return follows(grows, f"{PRINTED}, size by size", text)


def throughput_doubles() -> Finding:
    gains = {
        label: _figures(label)["training_128"] / _figures(label)["training_64"] for label in published.rows("runtime")
    }
    true = gains["DeiT-S"] > 1.9 and gains["GKA-S"] < 1.2
    text = ", ".join(f"{label} {gain:.2f}x" for label, gain in gains.items())
    text = f"From 64 to 128 a GPU: {text}. DeiT-B gains little too, GKA-Ti much, so that the figures alone do not show"
    return follows(true, f"{PRINTED}; not the cause", f"{text} the cause.")


def batch_of_256_fits() -> Finding:
    """A line through the two printed batches."""
    gka = _figures("GKA-B")
    needed = gka["memory_128"] + 2 * (gka["memory_128"] - gka["memory_64"])
    text = (
        f"GKA-B's two batches extrapolate to {needed / 1000:.1f} GB at 256 a GPU, on cards of {CARD_MB / 1000:.0f} GB"
    )
    text = f"{text}. Checkpointing or accumulation, which the paper does not mention for it, would save memory."
    if needed < CARD_MB:
        return follows(True, f"{PRINTED}, extrapolated in a line", text)
    return Finding(UNTESTED, f"{PRINTED}, extrapolated in a line, suggest otherwise at size B", text)


# Fused kernels


def _operator_gain(kernel: str = "") -> dict[str, dict[str, float]]:
    """The time of the paper's eager form over that of our routes with such a kernel, forward and backward.

    In the device's usual dtype: in bfloat16 on a CPU our routes compute more exactly than the eager form.
    """
    gains: dict[str, dict[str, float]] = {}
    for (hardware, name, phase), timed in _comparisons("attention"):
        right = timed[(timed.status == "ok") & (timed.family == "gka")]
        ours = right[right.role.isin(["ours", "variant"]) & right.kernel.str.startswith(kernel)]
        eager = right[right.role == "eager"]
        left_out = name.startswith("sweep") or is_unusual(name)
        if phase == "forward+backward" and not left_out and len(ours) and len(eager):
            gains.setdefault(hardware, {})[f"{name} {phase}"] = eager.median_ms.min() / ours.median_ms.min()
    return gains


def _fused_is_exact() -> bool:
    """Whether the fused route's bfloat16 output is never less exact than plain PyTorch's (runs/results)."""
    errors: dict[str, dict[str, float]] = {}
    for record in error.records("routes"):
        config, y = record["config"], record["metrics"]["y"]
        if config["dtype"] == "bfloat16" and y is not None:
            errors.setdefault(config["features"], {})[config["route"]] = y
    pairs = [(routes["sdpa"], routes["plain"]) for routes in errors.values() if routes.keys() >= {"sdpa", "plain"}]
    return bool(pairs) and all(fused <= plain for fused, plain in pairs)


def _faster(gains: dict[str, dict[str, float]]) -> bool:
    ratios = [gain for ratios in gains.values() for gain in ratios.values()]
    return bool(ratios) and min(ratios) > 1


def amenable_to_fused() -> Finding:
    gains = _operator_gain()
    text = f"The eager form's time over our fused route's: {_written(gains)}."
    return seen(_faster(gains) and _fused_is_exact(), _where(gains), text)


def cannot_use_sdpa() -> Finding:
    """The claim holds only if the route through SDPA were wrong, or slower than the eager form everywhere."""
    gains = _operator_gain("sdpa")
    can = _fused_is_exact() and any(gain > 1 for ratios in gains.values() for gain in ratios.values())
    text = '`impl="sdpa"` writes the distance as a dot product of extended features and calls fused SDPA'
    exact = "its bfloat16 error is at most plain PyTorch's" if _fused_is_exact() else "it is not exact"
    return holds(
        not can, _where(gains), f"{text}; {exact}. The eager form's time over that route's: {_written(gains)}."
    )
