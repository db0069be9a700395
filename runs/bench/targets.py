"""The project's promises of speed and memory, and whether a hardware's comparisons keep them."""

import itertools
from dataclasses import dataclass

from runs.bench import onnx
from runs.bench.operators import FORWARD, FULL
from runs.bench.results import Comparison
from runs.paper.deit import SIZE_NAMES

Comparisons = dict[tuple[str, str], Comparison]


@dataclass
class Target:
    """A promise and what was measured. `at_most`: smaller is better."""

    name: str
    wanted: float
    measured: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "pass" if (self.measured <= self.wanted if self.at_most else self.measured >= self.wanted) else "miss"


def best(deit: Comparisons, size: str, role: str) -> float | None:
    """Images per second of a size's inference at its best batch, among the lines of `role`."""
    timed = [c for (case, phase), c in deit.items() if case.startswith(f"deit-{size}-") and phase == "inference"]
    lines = [comparison.fastest(role) for comparison in timed]
    return max((line["metrics"]["items_per_second"] for line in lines if line), default=None)


def over(top: float | None, bottom: float | None) -> float | None:
    """top / bottom; None if either was not measured."""
    return top / bottom if top is not None and bottom else None


def ratio(
    comparisons: Comparisons, case: str, phase: str, role: str = "baseline", metric: str = "median_ms"
) -> float | None:
    """The fastest of `role` over ours in one comparison; None if it was not made."""
    comparison = comparisons.get((case, phase))
    return comparison.ratio(role, metric) if comparison else None


def flops_ratio(comparison: Comparison | None) -> float | None:
    """FLOPs of the softmax model over GKA's, for a token's training or an image's forward pass."""
    lines = comparison.lines if comparison else []
    counts = ("flops_per_token", "flops_per_image")
    flops = {
        line["config"]["role"]: next((line["metrics"][name] for name in counts if line["metrics"].get(name)), None)
        for line in lines
    }
    return over(flops.get("baseline"), flops.get("ours"))


def targets(results: dict[str, Comparisons], cuda: bool) -> list[Target]:
    """The project's promises for this kind of device; ratios are of the fastest softmax over ours, in time."""
    attention, deit, gpt = results["attention"], results["deit"], results["gpt"]
    if cuda:
        step = Target("d20 training step", 1.18, ratio(gpt, "d20", "training"))
        return [*operator_targets(attention), *decode_targets(attention), *deit_targets(deit), step]
    every = attention | deit | gpt | results["onnx"]
    return [
        Target(f"{case}, {phase}", wanted, ratio(every, case, phase)) for (case, phase), wanted in on_cpu(gpt).items()
    ]


def on_cpu(gpt: Comparisons) -> dict[tuple[str, str], float]:
    """(case, phase) -> the ratio that is promised on a CPU. Of a GPT it is its FLOPs ratio (1 if it was not timed)."""
    promised = {}
    for case in (*(f"vit-{size}" for size in SIZE_NAMES), "lm-full", "lm-short-full"):
        promised |= {(case, phase): 1.5 for phase in (FORWARD, FULL)}
    promised |= {("padded", phase): 2.0 for phase in (FORWARD, FULL)}
    promised |= {(f"vit-{size}-bf16", FORWARD): 1.8 for size in SIZE_NAMES}
    promised |= {(f"{kind}-b{rows}-1024", FORWARD): 2.5 for kind in ("decode", "decode-derived") for rows in (1, 8)}
    for size in SIZE_NAMES:
        for dtype in ("", "-bf16"):
            promised |= {(f"deit-{size}-b{batch}{dtype}", "inference"): 1.25 for batch in (1, 8, 16)}
            promised |= {(f"deit-{size}-b8{dtype}", "training"): 1.25}
    timed = itertools.product(onnx.SIZES, onnx.BATCH_SIZES, onnx.THREADS)
    promised |= {(onnx.case_name(*settings), onnx.phase_name("float32")): 1.2 for settings in timed}
    steps = [(f"d{depth}{dtype}", "training") for depth in (4, 6, 8) for dtype in ("", "-bf16")]
    return promised | {step: flops_ratio(gpt.get(step)) or 1.0 for step in steps}


def operator_targets(attention: Comparisons) -> list[Target]:
    """Of the bare operator, beside softmax attention and beside GKA written out."""
    rows = []
    for size in SIZE_NAMES:
        name, case = f"operator, DeiT-{size.title()}", f"vit-{size}"
        rows += [Target(f"{name}, {FORWARD}", 1.5, ratio(attention, case, FORWARD))]
        rows += [Target(f"{name}, {FULL}", 1.7, ratio(attention, case, FULL))]
        rows += [Target(f"{name}, against eager GKA", 5, ratio(attention, case, FULL, "eager"))]
    for case in ("lm-full", "lm-window"):
        name = f"operator, d20 {case.removeprefix('lm-')}"
        rows += [Target(f"{name}, {FORWARD}", 1.0, ratio(attention, case, FORWARD))]
        rows += [Target(f"{name}, {FULL}", 0.9, ratio(attention, case, FULL))]
    return [*rows, Target("operator, d20 full, against eager GKA", 10, ratio(attention, "lm-full", FULL, "eager"))]


def decode_targets(attention: Comparisons) -> list[Target]:
    """Of one query for each sequence against its cache."""
    return [
        Target(
            f"decode, batch {batch}, {tokens} tokens", wanted, ratio(attention, f"decode-b{batch}-{tokens}", FORWARD)
        )
        for batch, wanted in ((1, 1.25), (32, 1.6))
        for tokens in (1024, 2048, 8192)
    ]


def deit_targets(deit: Comparisons) -> list[Target]:
    """Of whole vision transformers."""
    rows = []
    for size in SIZE_NAMES:
        name = f"DeiT-{size.title()}"
        speeds = over(best(deit, size, "ours"), best(deit, size, "baseline"))
        rows += [Target(f"{name}, inference at its best batch", 1.25, speeds)]
        for batch in (64, 128):
            case = (f"deit-{size}-b{batch}", "training")
            memory = over(1.0, ratio(deit, *case, metric="peak_mib"))
            rows += [Target(f"{name}, training step at {batch}", 1.3, ratio(deit, *case))]
            rows += [Target(f"{name}, training step at {batch}, peak memory", 0.85, memory, at_most=True)]
    return rows
