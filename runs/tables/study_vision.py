"""The table of the study's question 7: vision transformers with spatial offsets, and hybrids."""

from pathlib import Path

from runs.study.vision.families import DEEPER
from runs.study.vision.images import IMAGES, setting_of
from runs.study.vision.scores import VisionResult, results_of, rows_of
from runs.table import NOT_RUN, Table, measured
from runs.tables.study import PROVISIONAL, ROWS, loss_of, over, rate_of, seeds_of

BASELINES = ("softmax", "GKA")


def images(folder: Path = ROWS) -> list[Table]:
    """Every family's accuracy, and its difference from softmax and from GKA, for each set of images."""
    tables = []
    for name, trained in rows_of(folder).items():
        results, rows, about = results_of(trained), [], trained[-1]["data"]
        apart = bool(setting_of(about["images"]).tuning_epochs)
        for family, result in results.items():
            if result is None and family in DEEPER:
                continue
            differences = [over(result, results[other], "+.2f") if family != other else "" for other in BASELINES]
            counts = [f"{result['parameters']:,}", f"{result['flops'] / 1e6:.2f}"] if result else ["", ""]
            own = [family, loss_of(result, ".2f"), rate_of(result), seeds_of(result)]
            rows.append([*own, *differences, *counts, *(learned(result) if apart else [])])
        settled = all(result.settled for result in results.values() if result)
        headings = ["", "top-1 %", "rate", "seeds", *(f"over {baseline}" for baseline in BASELINES)]
        judged = f"{about['val images']:,} held out"
        if held_out := about.get("held out"):
            judged = f"{about['val images']:,} to test, rates by {held_out:,} that those of training hold out"
        title = f"{about['images']}, {about['train images']:,} for training and {judged}:"
        source = measured(trained, f"study/vision_{name}.jsonl")
        notes = [] if settled else [PROVISIONAL]
        headings += ["parameters", "MFLOPs/image", *(["images/s", "learned σ"] if apart else [])]
        tables.append(Table.of(headings, rows, title=title, notes=notes, sources=[source]))
    return tables


def learned(result: VisionResult | None) -> list[str]:
    """Images that a training took each second, and the least and the largest learned bandwidth."""
    speed, sigmas = (result.images_per_second, result.sigmas) if result else (None, [])
    return [f"{speed:,.0f}" if speed else "", f"{min(sigmas):.2f} to {max(sigmas):.2f}" if sigmas else ""]


def summary(folder: Path = ROWS) -> list[Table]:
    """VLT and GKA over softmax on every set of images, and GKA over softmax with the spatial offsets that suit it best
    there.
    """
    rows = []
    for trained in rows_of(folder).values():
        results, images = results_of(trained), trained[-1]["data"]["images"]
        letters = best_offsets(results)
        pairs = {"VLT": "softmax", "GKA": "softmax"}
        if letters:
            pairs[f"GKA + {letters}"] = f"softmax + {letters}"
        for name, other in pairs.items():
            own, softmax = results[name], results[other]
            cells = [f"{result.mean:.2f}" if result else NOT_RUN for result in (own, softmax)]
            rows.append([IMAGES.get(images, images), name, other, *cells, over(own, softmax, "+.2f"), seeds_of(own)])
    headings = ["images", "form", "over", "top-1 %", "softmax's", "difference, points", "seeds"]
    return [Table.of(headings, rows, words=3)]


def best_offsets(results: dict[str, VisionResult | None]) -> str:
    """The letters of the GKA with spatial offsets that is best; empty before one is trained."""
    offsets = {name: one for name, one in results.items() if one and name.startswith("GKA +")}
    return max(offsets, key=lambda name: offsets[name].mean, default="").rpartition(" ")[2]


TABLES = {"study-images": images, "study-images-summary": summary}
