"""The study's pictures, each from a frame of finished trials. A picture of an empty frame is None: nothing is drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from runs.figures import WIDTH, Look, legend, look, panels, save
from runs.study.families import ALL, KERNELS, MIXINGS
from runs.study.grid import BUDGETS, CONTENDERS, CONTROL, DEEPER, HALF, LONGER, LONGEST, longer_families, scaled_places
from runs.study.rates import SMALLEST
from runs.study.scores import Scores, family_of, probed_models
from runs.study.statistics import Scaling, frontier
from runs.study.vision.images import IMAGES
from runs.study.vision.scores import results_of, rows_of
from trainkit_gka.plots import Figure, shades

LOSS = "validation bits per byte"
RATES = "Every family at the learning rate that is best for it with two layers (with eight, there)"
SPREAD = "bars are one standard deviation over seeds, where there are any"
PAIRED = "Bars hold 95 % over seeds, paired; without a bar there is one seed. Less is better."
OVER_CONTROL = ("softmax", "GKA + offsets", HALF, "GGGA + offsets", *CONTENDERS[:2])
# What is changed, by panel: the families whose change it is, and what each is compared with.
CHANGES = {
    "Repairs": {
        f"{side} + {change}": baseline
        for side, baseline in (("GKA", "GKA unrotated"), ("softmax", "softmax"))
        for change in ("offsets", *MIXINGS)
    },
    "Kernels": dict.fromkeys(["softmax + offsets", "VLT + offsets", *KERNELS], "GKA + offsets"),
}
DEPTHS = {place["depth"]: Look(colour, marker) for place, colour, marker in zip((SMALLEST, DEEPER), shades(2), "os")}
QUALITY = ("softmax", "softmax + offsets", "GKA", "GKA + offsets", HALF, "GGGA + offsets", *CONTENDERS[:2])
# Points of that picture that lie close together: what stands beside them, and how far above them in points.
NAMED = {CONTROL: (CONTROL, 9), CONTENDERS[0]: ("GKA, the preset", 0), CONTENDERS[1]: (CONTENDERS[1], -8)}
COSTS = {"parameters": "parameters, millions", "minutes": "minutes of training, one thread of a CPU"}


def of_text(scores: Scores, speeds: Mapping[int, Mapping[str, float]], name: str, folder: Path) -> list[Figure]:
    """All pictures of the finished trials of one text that there are rows for. speeds: see `with_minutes`."""
    fits = scores.scalings()
    scaled = scores.frame({family: ALL[family] for family in fits}, scaled_places())
    timed = scores.frame({family: ALL[family] for family in (CONTROL, *OVER_CONTROL)}, scaled_places())
    over = scores.differences(dict.fromkeys(OVER_CONTROL, CONTROL), scaled_places())
    longest = scores.frame(longer_families(), LONGER)
    changed = {panel: scores.differences(pairs, (SMALLEST, DEEPER)) for panel, pairs in CHANGES.items()}
    drawn = [
        compute(scaled, fits, name, folder),
        budgets(over, name, folder),
        time(with_minutes(timed, speeds), name, folder),
        quality(costs(scores, speeds), name, folder),
        longer(longest, name, folder),
        changes(changed, name, folder),
    ]
    return [figure for figure in drawn if figure]


def costs(scores: Scores, speeds: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    """A row for every family of QUALITY that is finished at LONGEST: parameters in millions, minutes of training (NaN
    where its speed is unknown), loss, and its spread over seeds.
    """
    rows, at = [], speeds.get(LONGEST["depth"], {})
    for family in QUALITY:
        if result := scores.at(ALL[family], LONGEST):
            minutes = LONGEST["tokens"] / at.get(family, math.nan) / 60
            rows.append([family, result["parameters"] / 1e6, minutes, result.mean, result.spread])
    return pd.DataFrame(rows, columns=["family", "parameters", "minutes", "loss", "spread"])


def draw_quality(frame: pd.DataFrame, columns: Sequence[str] = tuple(COSTS), width: float = WIDTH) -> Any:
    """The figure: loss against each of COSTS that `columns` names, every point with its family's name beside it."""
    figure, axes = panels(1, len(columns), 4.4, sharey=True)
    figure.set_figwidth(width)
    # One form far behind would leave the others no room: it stands at the top, with its loss.
    best, second = frame.loss.min(), frame.loss.nlargest(2).iloc[-1]
    top = second + (second - best) * 0.6 if len(frame) > 2 else math.inf
    frame = frame.assign(shown=frame.loss.where(frame.loss <= top + (second - best), top))
    for axis, column in zip(axes, columns, strict=True):
        own = frame[frame[column].notna()]
        middle = (own[column].min() + own[column].max()) / 2
        for row in own.itertuples():
            place, style = getattr(row, column), look(row.family)
            spread = 0 if math.isnan(row.spread) or row.shown != row.loss else row.spread
            axis.errorbar(place, row.shown, spread, **style(row.family))
            left, (name, lift) = place > middle, NAMED.get(row.family, (row.family, 0))
            words, shift = dict(ha="right" if left else "left", va="center", fontsize=9), (-8 if left else 8, lift)
            style = dict(color=style.colour, textcoords="offset points")
            name = name if row.shown == row.loss else f"{name}: {row.loss:.2f} ↑"
            axis.annotate(name, (place, row.shown), shift, **words, **style)
        axis.set_xlabel(COSTS[column])
        axis.margins(x=0.12, y=0.08)
    axes[0].set_ylabel(LOSS)
    return figure


def quality(frame: pd.DataFrame, name: str, folder: Path) -> Figure | None:
    """Loss against what a model costs."""
    if frame.empty:
        return None
    millions = LONGEST["tokens"] / 1e6
    title = f"Loss against cost, four layers and {millions:.1f} million tokens of {name}: lower is better"
    return _figure(draw_quality(frame), title, about_quality(), frame, folder / f"quality-{name}.png")


def about_quality() -> str:
    """The caption of `draw_quality`."""
    millions = LONGEST["tokens"] / 1e6
    return (
        f"Lower and further left is better. Models of {LONGEST['depth']} layers after {millions:.1f} million tokens, "
        "each at its own best learning rate; bars are one standard deviation over seeds, where there are several. The "
        "preset is GKA + offsets + half VE + channel bandwidths + head gates. Minutes are of one thread of a CPU."
    )


def compute(frame: pd.DataFrame, fits: Mapping[str, Scaling | None], name: str, folder: Path) -> Figure | None:
    """Loss against training FLOPs, with the fits to the frontiers."""
    if frame.empty:
        return None
    figure, [axis] = panels(1, 1, 5.6)
    for family, own in frame.groupby("family", sort=False):
        style = look(family)(family, linestyle="none")
        axis.errorbar(own["FLOPs"], own.loss, own.spread.fillna(0), **style)
        if fitted := fits.get(family):
            reach, colour = np.geomspace(*fitted.reach, 60), look(family).colour
            axis.plot(reach, fitted.fit(reach), color=colour, linestyle=look(family).line, linewidth=1)
            if fitted.draws:
                edges = np.percentile([draw(reach) for draw in fitted.draws], (2.5, 97.5), axis=0)
                axis.fill_between(reach, *edges, color=colour, alpha=0.12, linewidth=0)
    axis.set(xscale="log", xlabel="training FLOPs", ylabel=LOSS)
    legend(figure, [axis], 4)
    title = f"Loss against compute on {name}"
    caption = f"{RATES}; {SPREAD}. Lines: a + b C^-c through what is better than everything cheaper; bands: 95 % of "
    caption += "other seeds."
    return _figure(figure, title, caption, frame, folder / f"study-compute-{name}.png")


def budgets(frame: pd.DataFrame, name: str, folder: Path) -> Figure | None:
    """Differences from the control against the tokens of the training, a panel a depth."""
    if frame.empty:
        return None
    figure, axes = panels(1, len(BUDGETS), 3.9, sharey=True)
    tokens = sum(BUDGETS.values(), ())
    for depth, axis in zip(BUDGETS, axes, strict=True):
        for number, family in enumerate(OVER_CONTROL):
            own = frame[(frame.family == family) & (frame.layers == depth)]
            beside = own.tokens * 2 ** (0.06 * (number - 1.5))
            axis.plot(beside, own.difference, **look(family)(family))
            axis.vlines(beside, own.low, own.high, color=look(family).colour)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set(xlim=(min(tokens) / 1.4, max(tokens) * 1.4), xlabel="training tokens")
        axis.set_title(f"{depth} layers", fontsize=10)
    axes[0].set_ylabel(f"bits per byte over {CONTROL}")
    legend(figure, axes, 4)
    title = f"Losses over those of {CONTROL}, on {name}"
    return _figure(figure, title, f"At equal tokens. {PAIRED}", frame, folder / f"study-budgets-{name}.png")


def with_minutes(frame: pd.DataFrame, speeds: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    """The rows whose speed is known, with the minutes of their training. speeds: depth -> family -> tokens/s."""
    speed = [speeds.get(row.layers, {}).get(row.family, math.nan) for row in frame.itertuples()]
    timed = frame.assign(minutes=frame.tokens / np.array(speed, dtype=float) / 60)
    return timed[timed.minutes.notna()]


def time(frame: pd.DataFrame, name: str, folder: Path) -> Figure | None:
    """Loss against the minutes of training."""
    if frame.empty:
        return None
    figure, [axis] = panels(1, 1, 5.4)
    for family, own in frame.groupby("family", sort=False):
        axis.errorbar(own.minutes, own.loss, own.spread.fillna(0), **look(family)(family, linestyle="none"))
        best = own.iloc[frontier(own.minutes.to_numpy(), own.loss.to_numpy())]
        axis.plot(best.minutes, best.loss, color=look(family).colour, linestyle=look(family).line, linewidth=1)
    axis.set(xscale="log", xlabel="minutes of training, one thread", ylabel=LOSS)
    axis.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    legend(figure, [axis], 3)
    title = f"Loss against the time of training, on {name}"
    caption = f"Two to eight layers; lines join what is better than everything quicker; {SPREAD}. "
    caption += "Minutes are tokens over the speed of steps that were timed in turns. GKA with channels and gates is "
    caption += "the preset."
    return _figure(figure, title, caption, frame, folder / f"study-time-{name}.png")


def longer(frame: pd.DataFrame, name: str, folder: Path) -> Figure | None:
    """Loss and sigma^2 against the tokens of the training, at depth 2."""
    if frame.empty:
        return None
    figure, (left, right) = panels(1, 2, 4.4)
    for family, own in frame.groupby("family", sort=False):
        left.errorbar(own.tokens, own.loss, own.spread.fillna(0), **look(family)(family))
        if own["sigma^2"].notna().any():
            right.plot(own.tokens, own["sigma^2"], **look(family)(family))
    for axis, label in ((left, LOSS), (right, "median σ² of all heads (head_dim is 64)")):
        axis.set(xlabel="training tokens", ylabel=label)
        axis.set_xscale("log", base=2)
    right.set_yscale("log")
    legend(figure, [left], 4)
    title = f"Two layers, trained longer, on {name}"
    return _figure(figure, title, f"{RATES}; {SPREAD}.", frame, folder / f"study-longer-{name}.png")


def changes(frames: Mapping[str, pd.DataFrame], name: str, folder: Path) -> Figure | None:
    """What changes do to the loss of the form that is changed, at two depths. frames: title -> its differences."""
    together = pd.concat([frame for frame in frames.values() if len(frame)] or [pd.DataFrame()])
    if together.empty:
        return None
    figure, axes = panels(1, len(frames), 4.8)
    for axis, (title, frame) in zip(axes, frames.items(), strict=True):
        labels = list(dict.fromkeys(frame.family))[::-1]
        for number, (depth, style) in enumerate(DEPTHS.items()):
            own = frame[frame.layers == depth]
            heights = [labels.index(family) + 0.15 - 0.3 * number for family in own.family]
            axis.hlines(heights, own.low, own.high, color=style.colour, linewidth=1.5)
            axis.plot(own.difference, heights, **style(f"{depth} layers", linestyle="none"))
        axis.set_yticks(range(len(labels)), labels)
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_title(title, fontsize=10)
        others = list(dict.fromkeys(frame.over))
        axis.set_xlabel("bits per byte over " + (others[0] if len(others) == 1 else "the form without it"), fontsize=9)
        axis.grid(visible=False, axis="y")
        axis.locator_params(axis="x", nbins=5)
    legend(figure, axes, len(DEPTHS))
    title = f"What repairs GKA, and what its kernel is worth, on {name}"
    return _figure(figure, title, PAIRED, together, folder / f"study-forms-{name}.png")


def context(results: Path, folder: Path) -> Figure | None:
    """Loss by the position in a row, and how many tokens each head averages, of every family's first seed."""
    probed = sorted((pair for pair in probed_models(results) if pair[0] is not None), key=lambda pair: pair[0].seed)
    models: dict[str, dict[str, Any]] = {}
    for trial, record in probed:
        if all(getattr(trial, field) == value for field, value in LONGEST.items()):
            models.setdefault(family_of(trial), record["metrics"])
    if not models:
        return None
    figure, (left, right) = panels(1, 2, 4.4)
    rows = []
    for number, (family, metrics) in enumerate(models.items()):
        losses = dict(list(metrics["loss_by_position"].items())[:-1])  # the last group may be one token
        tokens = [head["effective tokens"] for head in metrics["heads"]]
        left.plot(range(len(losses)), list(losses.values()), **look(family)(family))
        left.set_xticks(range(len(losses)), list(losses), rotation=45)
        right.plot(tokens, [number] * len(tokens), **look(family)(family, linestyle="none", alpha=0.6))
        rows += [{"family": family, "positions": place, "nats a token": loss} for place, loss in losses.items()]
    left.set(xlabel="position in the row", ylabel="loss, nats a token")
    right.set(xscale="log", xlabel="tokens that a head averages, exp(entropy)")
    right.set_yticks(range(len(models)), list(models))
    legend(figure, [left], 3)
    title = "What models of four layers do in their context"
    caption = "Trained on 2^22 tokens. Left: loss by the position in a row of 512 tokens. Right: a dot for each head."
    return _figure(figure, title, caption, pd.DataFrame(rows), folder / "study-context.png")


def images(results: Path, folder: Path) -> Figure | None:
    """Top-1 of every family on every set of images, seed by seed."""
    rows = [
        {"images": name, "family": family, "seed": seed, "top-1 %": top1}
        for name, trained in rows_of(results).items()
        for family, result in results_of(trained).items()
        if result
        for seed, top1 in result.losses.items()
    ]
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    sets = frame.groupby("images", sort=False)
    figure, axes = panels(1, len(sets), 4.2)
    for axis, (name, own) in zip(axes, sets, strict=True):
        labels = list(dict.fromkeys(own.family))[::-1]
        for family, seeds in own.groupby("family", sort=False)["top-1 %"]:
            height, style = labels.index(family), look(family)
            axis.plot(seeds, [height] * len(seeds), **style(family, linestyle="none", alpha=0.5))
            axis.plot(seeds.mean(), height, "|", color=style.colour, markersize=16, markeredgewidth=2)
        axis.set_yticks(range(len(labels)), [label.replace(", channel", ",\nchannel") for label in labels])
        axis.set(xlabel="top-1, %")
        axis.set_title(IMAGES.get(name, name), fontsize=10)
        axis.grid(visible=False, axis="y")
    title = "Top-1 of vision transformers, with spatial offsets (four letters) and without"
    caption = "Each family at its own best learning rate; a dot for each seed, a stroke for their mean."
    return _figure(figure, title, caption, frame, folder / "study-images.png")


def _figure(figure, title: str, caption: str, frame: pd.DataFrame, path: Path) -> Figure:
    return Figure(save(figure, title, path), title, caption, frame.to_dict("records"))
