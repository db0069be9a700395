"""Claims about accuracy on images. Finished runs in runs/results decide; until then the demo's digits are quoted."""

import statistics
from pathlib import Path
from typing import Any

from gka.kinds import KINDS
from runs.comparison import measured
from runs.comparison.evidence import DEMO_VISION, FAILS, HOLDS, UNTESTED, Finding, seen
from runs.paper import published
from runs.tables.demo import vision_records

DIGITS = "(two seeds; such differences are noise there)"
CLOSE = 0.5  # points of top-1: seeds and rounding
NOWHERE = Path("no outputs: the page is of runs/results alone")


def _demo(kind: str) -> list[dict[str, Any]]:
    return [record["metrics"] for record in vision_records()[KINDS[kind].label]]


def _digits(kind: str) -> float:
    return statistics.fmean(run["ema_top1"] for run in _demo(kind))


def _reaches(labels: list[str], printed: dict[str, dict[str, str]], digits: str = "") -> Finding:
    """Whether the finished runs of these rows reach their printed top-1 within CLOSE points."""
    runs = measured.finished_runs(NOWHERE)
    ours = {label: run.metrics["ema_top1"] for label in labels if (run := measured.vision_run(label, runs))}
    if len(ours) < len(labels):
        return Finding(UNTESTED, "ImageNet, 300 epochs", f"No finished run here.{digits}")
    near = all(abs(value - float(printed[label]["top1"])) <= CLOSE for label, value in ours.items())
    text = ", ".join(f"{label} {value:.2f}" for label, value in ours.items())
    return Finding(HOLDS if near else FAILS, "ImageNet, 300 epochs", f"Ours: {text}.")


def tiny_and_small() -> Finding:
    gap = _digits("gka") - _digits("softmax")
    digits = f" On the demo's digits GKA is {gap:+.2f} points from softmax {DIGITS}."
    return _reaches(["DeiT-Ti", "GKA-Ti", "DeiT-S", "GKA-S"], published.rows("main_results"), digits)


def base_size() -> Finding:
    return _reaches(["DeiT-B", "GKA-B"], published.rows("main_results"))


def vlt_beats_softmax() -> Finding:
    gap = _digits("vlt") - _digits("softmax")
    digits = f" On the demo's digits VLT is {gap:+.2f} points from softmax {DIGITS}."
    return _reaches(["DeiT-Ti", "VLT-Ti"], published.rows("ablation"), digits)


def trains_stably() -> Finding:
    """The last evaluation is close to the best one, in every run."""
    drops = [run["best"]["value"] - run[run["best"]["metric"]] for run in _demo("gka")]
    return seen(max(drops) < 1, DEMO_VISION, f"The last evaluation is at most {max(drops):.2f} points below the best.")


def heads_specialise() -> Finding:
    """Largest over smallest sigma of a layer's heads, which start equal."""
    spreads = sorted(max(heads) / min(heads) for run in _demo("gka") for heads in run["sigma"].values())
    text = f"Largest σ over smallest in a layer: {spreads[0]:.2f} to {spreads[-1]:.2f}; they start equal."
    return seen(min(spreads) > 1.25, DEMO_VISION, f"{text} A short training; ImageNet is untested.")
