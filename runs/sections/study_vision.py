"""The table of the study's question 6: vision transformers with spatial offsets, and hybrids."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from runs.sections.sources import measured, table
from runs.sections.study import NOT_RUN, PROVISIONAL, ROWS, difference_of, rate_of, seeds_of
from runs.study.scores import Result
from runs.study.vision.cells import Setting, VisionCell
from runs.study.vision.families import DEEPER, chosen_rate, done_of, families_of
from runs.study.vision.images import DIGITS, setting_of
from runs.study.vision.rows import VISION, score
from trainkit_gka.progress import read_lines

BASELINES = ("softmax", "GKA")


@dataclass(frozen=True)
class VisionResult(Result):
    """A family on some images, at its best rate."""

    @property
    def losses(self) -> dict[int, float]:
        """Top-1 of the averaged weights in percent, by seed."""
        return {seed: metrics["ema_top1"] for seed, metrics in self.runs.items()}


def images(folder: Path = ROWS) -> str:
    """Every family's accuracy, and its difference from softmax and from GKA, for each set of images."""
    parts = []
    for path in sorted(folder.glob("vision_*.jsonl")):
        rows = _rows(path)
        if rows:
            about = rows[-1]["data"]
            judged = f"{about['val images']:,} held out"
            if held_out := about.get("held out"):
                judged = f"{about['val images']:,} to test, rates by {held_out:,} that those of training hold out"
            said = f"{about['images']}, {about['train images']:,} for training and {judged}:"
            parts.append(f"{said}\n\n{_table(rows)}\n{measured(rows[-1], f'study/{path.name}')}")
    return "\n\n".join(parts) or f"{NOT_RUN}: `.venv/bin/python -m runs.study.vision`"


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of cells that would compute the same today, on the images of the newest row; a key's last row counts."""
    rows = {row["key"]: row for row in read_lines(path) if row.get("kind") == VISION}
    data = next((row["data"] for row in reversed(rows.values())), {})
    setting = setting_of(data.get("images", ""))
    return [row for key, row in rows.items() if key == VisionCell.from_row(row["cell"]).key(data, setting)]


def results_of(folder: Path = ROWS) -> dict[str, dict[str, VisionResult]]:
    """By set of images, by family, of what is finished."""
    found = {path.stem.removeprefix("vision_"): _results(_rows(path)) for path in sorted(folder.glob("vision_*.jsonl"))}
    return {name: {f: r for f, r in results.items() if r} for name, results in found.items() if any(results.values())}


def _results(rows: list[dict[str, Any]]) -> dict[str, VisionResult | None]:
    setting = setting_of(rows[-1]["data"]["images"]) if rows else DIGITS
    return {name: _at_best_rate(family, rows, setting) for name, family in families_of(setting).items()}


def _table(rows: list[dict[str, Any]]) -> str:
    results, lines = _results(rows), []
    apart = bool(setting_of(rows[-1]["data"]["images"]).tuning_epochs)
    for name, result in results.items():
        if result is None and name in DEEPER:
            continue
        own = [NOT_RUN, "", ""] if result is None else [_accuracy(result), rate_of(result), seeds_of(result)]
        over = [_over(result, results[baseline]) if name != baseline else "" for baseline in BASELINES]
        counts = [f"{result['parameters']:,}", f"{result['flops'] / 1e6:.2f}"] if result else ["", ""]
        lines.append([name, *own, *over, *counts, *([_speed(result), _sigma(result)] if apart else [])])
    headings = ["", "top-1 %", "rate", "seeds", *(f"over {baseline}" for baseline in BASELINES)]
    open_rates = any(result and not result.settled for result in results.values())
    note = f"\n\n{PROVISIONAL}" if open_rates else ""
    more = ["images/s", "learned σ"] if apart else []
    return table([*headings, "parameters", "MFLOPs/image", *more], lines) + note


def _at_best_rate(family: dict, rows: list[dict[str, Any]], setting: Setting) -> VisionResult | None:
    """The family at the rate with most seeds, and among those of the best scores."""
    done, rates = done_of(setting)(), {}
    for row in rows:
        cell = VisionCell.from_row(row["cell"])
        done[cell] = score(row["metrics"])
        if cell == VisionCell(**family, rate=cell.rate, seed=cell.seed):
            rates.setdefault(cell.rate, {})[cell.seed] = row["metrics"]
    if not rates:
        return None

    def order(rate: float) -> tuple:
        scores = [score(metrics) for metrics in rates[rate].values()]
        return -len(scores), *(mean(part) for part in zip(*scores))

    rate = min(rates, key=order)
    return VisionResult(rate, chosen_rate(family, done) is not None, rates[rate])


def _accuracy(result: VisionResult) -> str:
    return f"{result.mean:.2f}" + (f" ± {result.spread:.2f}" if len(result.runs) > 1 else "")


def _speed(result: VisionResult | None) -> str:
    """Images that a training took each second, median over its seeds."""
    speeds = [run["images_per_second"] for run in result.runs.values() if run["images_per_second"]] if result else []
    return f"{median(speeds):,.0f}" if speeds else ""


def _sigma(result: VisionResult | None) -> str:
    """The least and the largest bandwidth of any head, layer and seed."""
    runs = result.runs.values() if result else ()
    values = [value for run in runs for layer in run["sigma"].values() for value in layer]
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""


def _over(result: VisionResult | None, baseline: VisionResult | None) -> str:
    return difference_of(result.over(baseline), "+.2f") if result and baseline else ""


TABLES = {"study-images": images}
