"""What training did: losses, validation, and the bandwidths, from the runs' logs."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean

from nanochat_gka.training.bits_per_byte import remark, remarks
from runs.figures import GREY, LOOKS, Look
from runs.report.blocks import Picture
from runs.report.charts import Series, lines
from runs.report.trained import TrainedRun
from runs.table import Table
from trainkit_gka.plots import shades

LANGUAGE_COLUMNS = {
    "parameters": ("parameters", ","),
    "flops_per_token": ("FLOPs per token", ".3e"),
    "train_tokens": ("training tokens", ".3e"),
    "train_bpb": ("training bits per byte", ".4f"),
    "val_bpb": ("validation bits per byte", ".4f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
}
VISION_COLUMNS = {
    "parameters": ("parameters", ","),
    "flops": ("FLOPs per image", ".3e"),
    "top1": ("top-1 %", ".2f"),
    "ema_top1": ("top-1 %, averaged weights", ".2f"),
    "images": ("images judged", ","),
    "images_per_second": ("training images/s", ",.0f"),
}
LINES, OTHER_FORMS = ("-", "--", ":", "-."), Look(GREY)
X = {False: "training tokens, millions", True: "epochs"}


def progress_of(run: TrainedRun) -> Callable[[int], float]:
    """From a step to what the x axis counts: millions of tokens, or epochs."""
    if run.is_vision:
        steps = [(event["step"], event["epoch"]) for event in run.events if event.get("epoch") and event["step"]]
        return lambda step: round(step * steps[-1][1] / steps[-1][0], 6) if steps else float(step)
    tokens = run.config["total_batch_size"]
    return lambda step: step * tokens / 1e6


def chart(title: str, caption: str, y: str, runs: list[TrainedRun], event: str, key: str) -> Picture | None:
    """A line for every run in its form's colour; others of the form have other lines. None if no run has the values."""
    seen: Counter[str] = Counter()
    series = []
    for run in runs:
        progress = progress_of(run)
        points = [(progress(step), value) for step, value in run.points(event, key) if isinstance(value, (int, float))]
        if points:
            own = replace(LOOKS.get(run.form, OTHER_FORMS), line=LINES[seen[run.form] % len(LINES)])
            series.append(Series(f"{run.form}, {run.name}", points, own, marker=event == "eval"))
            seen[run.form] += 1
    return lines(title, caption, X[runs[0].is_vision], y, series) if series else None


def learning_curves(runs: list[TrainedRun]) -> list[Picture]:
    """Loss and validation of the language runs, then of the vision runs."""
    language, vision = ([run for run in runs if run.is_vision == kind] for kind in (False, True))
    charts = []
    if language:
        smooth = "The smoothed loss that the trainer logs, in nats per token."
        charts.append(chart("Language, training loss", smooth, "nats per token", language, "train", "smooth_loss"))
        held_out = "Text that was not trained on. Bits per byte do not depend on the tokenizer; lower is better."
        last = {run.name: evaluation for run in language for evaluation in run.events if evaluation["event"] == "eval"}
        held_out = " ".join([held_out, *remarks(last)])
        charts.append(chart("Language, validation", held_out, "bits per byte", language, "eval", "val_bpb"))
    if vision:
        smoothed = "Cross-entropy of the last batch, label smoothing and augmentation of the recipe included."
        charts.append(chart("Vision, training loss", smoothed, "cross-entropy, nats", vision, "train", "loss"))
        averaged = "Accuracy of the averaged weights on images that were not trained on; higher is better."
        charts.append(chart("Vision, validation", averaged, "top-1, %", vision, "eval", "ema_top1"))
    return [picture for picture in charts if picture]


def bandwidth_curves(runs: Iterable[TrainedRun]) -> list[Picture]:
    """σ over training, a chart for every run that has any: a line for each layer, mean and range of its heads."""
    pictures = []
    for run in runs:
        progress, layers = progress_of(run), {}
        for step, sigma in run.points("eval", "sigma"):
            for layer, heads in sigma.items() if isinstance(sigma, dict) else ():
                layers.setdefault(layer, []).append((progress(step), heads))
        series, colours = [], shades(len(layers))
        for place, (layer, seen) in enumerate(layers.items()):
            means = [(x, fmean(heads)) for x, heads in seen]
            label = f"layer {int(layer.rpartition('_')[2]) + 1}"
            band = [(min(heads), max(heads)) for _, heads in seen]
            series.append(Series(label, means, Look(colours[place]), band, marker=True))
        if series:
            caption = "Mean σ of a layer's heads; the band is from the lowest to the highest head."
            pictures.append(lines(f"σ over training, {run.name}", caption, X[run.is_vision], "σ", series))
    return pictures


def reached(run: TrainedRun) -> str:
    """A run in a line: its name, its form, and what it reached."""
    key, form, words = ("ema_top1", ".1f", "% top-1") if run.is_vision else ("val_bpb", ".3f", "bits per byte")
    value = run.finish.get(key)
    return f"{run.name} ({run.form}): " + ("not finished" if value is None else f"{value:{form}} {words}")


def run_tables(runs: list[TrainedRun]) -> list[Table]:
    """What the finished runs reached, a table for the language models and one for the vision models."""
    tables = []
    for vision, columns, title in (
        (False, LANGUAGE_COLUMNS, "Language models"),
        (True, VISION_COLUMNS, "Vision models"),
    ):
        chosen = [run for run in runs if run.is_vision == vision]
        rows = [
            [
                "; ".join(filter(None, [run.name, remark(run.finish), *run.finish.get("warnings", [])])),
                *(cell(run.finish, key, form) for key, (_, form) in columns.items()),
            ]
            for run in chosen
        ]
        if rows:
            headings = ["run", *(heading for heading, _ in columns.values())]
            tables.append(Table.of(headings, rows, title=f"{title}, as their logs end"))
    return tables


def cell(finish: dict, key: str, form: str) -> str:
    """A number of the record that a run ends with; a dash for one that it has not, as a speed of too few steps."""
    value = finish.get(key)
    return "not finished" if not finish else "–" if value is None else f"{value:{form}}"
