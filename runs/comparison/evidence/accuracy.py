"""Claims about accuracy on images: finished runs on ImageNet decide. Until then the study's CIFAR-10 decides what small
models can show and is quoted for the rest; until it has its seeds, the demo's digits.
"""

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

from gka.kinds import KINDS
from runs import frames
from runs.comparison import measured
from runs.comparison.evidence import DEMO_VISION, FAILS, HOLDS, UNTESTED, Finding, seen
from runs.paper import published
from runs.tables.demo import vision_records
from trainkit_gka.progress import read_lines

CIFAR10 = "the study's small vision models, CIFAR-10, 8 epochs"
DIGITS = "(two seeds; such differences are noise there)"
CLOSE = 0.5  # points of top-1: seeds and rounding
NOWHERE = Path("no outputs: the page is of runs/results alone")


def _demo(kind: str) -> list[dict[str, Any]]:
    return [record["metrics"] for record in vision_records()[KINDS[kind].label]]


def _digits(kind: str) -> float:
    return statistics.fmean(run["ema_top1"] for run in _demo(kind))


class Gap(NamedTuple):
    """A difference with its 95 % t-interval."""

    value: float
    low: float
    high: float


def _on_cifar10() -> dict[str, dict[int, dict[str, Any]]]:
    """Metrics by form and seed, of the rate that the study chose."""
    study, found = frames.RESULTS / "study", {}
    forms = {line["key"]: line["form"] for line in read_lines(study / "chosen.jsonl")}
    for row in frames.records(study / "vision_cifar10.jsonl", "ema_top1"):
        if form := forms.get(row["key"]):
            found.setdefault(form, {})[row["trial"]["seed"]] = row["metrics"]
    return found


def _gap(kind: str) -> Gap | None:
    """Points of top-1 between a kind and softmax on CIFAR-10, paired over seeds."""
    found = _on_cifar10()
    ours, softmax = (found.get(name, {}) for name in (KINDS[kind].label, "softmax"))
    differences = [ours[seed]["ema_top1"] - softmax[seed]["ema_top1"] for seed in ours.keys() & softmax.keys()]
    if len(differences) < 3:
        return None
    half = stats.t.ppf(0.975, len(differences) - 1) * stats.sem(differences)
    return Gap(middle := statistics.fmean(differences), middle - half, middle + half)


def _said(kind: str) -> str:
    """How far a kind is from softmax where it was measured."""
    if gap := _gap(kind):
        interval = f"{gap.value:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}]"
        return f"On CIFAR-10 {KINDS[kind].label} is {interval} points from softmax, paired over seeds."
    difference = _digits(kind) - _digits("softmax")
    return f"On the demo's digits {KINDS[kind].label} is {difference:+.2f} points from softmax {DIGITS}."


def _reaches(labels: list[str], printed: dict[str, dict[str, str]], elsewhere: str = "") -> Finding:
    """Whether the finished runs of these rows reach their printed top-1 within CLOSE points."""
    runs = measured.finished_runs(NOWHERE)
    ours = {label: run.metrics["ema_top1"] for label in labels if (run := measured.vision_run(label, runs))}
    if len(ours) < len(labels):
        return Finding(UNTESTED, "ImageNet, 300 epochs", f"No finished run here. {elsewhere}".strip())
    near = all(abs(value - float(printed[label]["top1"])) <= CLOSE for label, value in ours.items())
    text = ", ".join(f"{label} {value:.2f}" for label, value in ours.items())
    return Finding(HOLDS if near else FAILS, "ImageNet, 300 epochs", f"Ours: {text}.")


def tiny_and_small() -> Finding:
    return _reaches(["DeiT-Ti", "GKA-Ti", "DeiT-S", "GKA-S"], published.rows("main_results"), _said("gka"))


def base_size() -> Finding:
    return _reaches(["DeiT-B", "GKA-B"], published.rows("main_results"))


def vlt_beats_softmax() -> Finding:
    """Where nothing is trained on ImageNet: that VLT is not behind softmax, as far as seeds tell, on CIFAR-10."""
    on_imagenet, gap = _reaches(["DeiT-Ti", "VLT-Ti"], published.rows("ablation"), _said("vlt")), _gap("vlt")
    if on_imagenet.verdict != UNTESTED or gap is None:
        return on_imagenet
    return seen(gap.high >= 0, CIFAR10, f"{_said('vlt')} No finished run on ImageNet.")


def trains_stably() -> Finding:
    """The last evaluation is close to the best one, in every run."""
    drops = [run["best"]["value"] - run[run["best"]["metric"]] for run in _demo("gka")]
    return seen(max(drops) < 1, DEMO_VISION, f"The last evaluation is at most {max(drops):.2f} points below the best.")


def heads_specialise() -> Finding:
    """Largest over smallest sigma of a layer's heads, which start equal."""
    on_cifar10 = _on_cifar10().get(KINDS["gka"].label)
    runs, scale = (on_cifar10.values(), CIFAR10) if on_cifar10 else (_demo("gka"), DEMO_VISION)
    spreads = sorted(max(heads) / min(heads) for run in runs for heads in run["sigma"].values())
    text = f"Largest σ over smallest in a layer: {spreads[0]:.2f} to {spreads[-1]:.2f}; they start equal."
    return seen(min(spreads) > 1.25, scale, f"{text} A short training; ImageNet is untested.")
