"""Finished trials of question 7, as comparisons need them: a family on some images, at its best rate, seed by seed."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from runs.frames import records
from runs.study.scores import Result, rate_to_compare
from runs.study.vision.families import chosen_rate, done_of, families_of
from runs.study.vision.images import setting_of
from runs.study.vision.trials import KIND, Setting, VisionTrial, score


@dataclass(frozen=True)
class VisionResult(Result):
    """A family on some images, at its best rate."""

    @property
    def losses(self) -> dict[int, float]:
        """Top-1 of the averaged weights in percent, by seed."""
        return {seed: metrics["ema_top1"] for seed, metrics in self.runs.items()}

    @property
    def images_per_second(self) -> float | None:
        """Of a training, median over its seeds; None where none was measured."""
        speeds = [run["images_per_second"] for run in self.runs.values() if run["images_per_second"]]
        return median(speeds) if speeds else None

    @property
    def sigmas(self) -> list[float]:
        """The learned bandwidths of all heads, layers and seeds."""
        return [sigma for run in self.runs.values() for layer in run["sigma"].values() for sigma in layer]


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """By set of images, the rows of trials that would compute the same today; a key's last row counts."""
    found = {}
    for path in sorted(folder.glob("vision_*.jsonl")):
        rows = {row["key"]: row for row in records(path, "ema_top1", "ema_loss", kind=KIND)}
        data = next((row["data"] for row in reversed(rows.values())), {})
        setting = setting_of(data.get("images", ""))
        own = [row for key, row in rows.items() if key == VisionTrial.from_row(row["trial"]).key(data, setting)]
        found |= {path.stem.removeprefix("vision_"): own} if own else {}
    return found


def results_of(rows: list[dict[str, Any]]) -> dict[str, VisionResult | None]:
    """By family; None where nothing is finished."""
    setting = setting_of(rows[-1]["data"]["images"])
    return {name: _at_best_rate(family, rows, setting) for name, family in families_of(setting).items()}


def _at_best_rate(family: dict, rows: list[dict[str, Any]], setting: Setting) -> VisionResult | None:
    """The family at the rate that it is compared at."""
    done, rates = done_of(setting)(), {}
    for row in rows:
        trial = VisionTrial.from_row(row["trial"])
        done[trial] = score(row["metrics"])
        if trial == VisionTrial(**family, rate=trial.rate, seed=trial.seed):
            rates.setdefault(trial.rate, {})[trial.seed] = row["metrics"]
    if not rates:
        return None
    chosen = chosen_rate(family, done)
    scores = {rate: [score(metrics) for metrics in seeds.values()] for rate, seeds in rates.items()}
    rate = rate_to_compare(scores, chosen)
    return VisionResult(rate, chosen is not None, rates[rate])
