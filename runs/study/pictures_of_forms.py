"""The study's other pictures: what repairs the operator and what the kernel is worth, what models do in their context,
and images.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from runs.study.families import ALL, KERNELS, MIXINGS
from runs.study.grid import DEEPER
from runs.study.rates import SMALLEST
from runs.study.scores import Scores, family_of, probed_models
from runs.study.statistics import Interval
from runs.study.vision.scores import results_of, rows_of
from trainkit_gka.plots import Figure, save, subplots

REPAIRED = {
    family: [f"{side} + {name}" for name in ("offsets", *MIXINGS)]
    for family, side in (("GKA unrotated", "GKA"), ("softmax", "softmax"))
}
IN_PLACE_OF_THE_KERNEL = {"GKA + offsets": ["softmax + offsets", "VLT + offsets", *KERNELS]}
PROBED = dict(depth=4, tokens=2**22)


def forms(scores: Scores, folder: Path, name: str) -> Figure | None:
    """Losses over those of the form that is changed, with their intervals; None if none of them is finished."""
    figure, axes = subplots(1, 2, figsize=(11, 4.2))
    rows = []
    for axis, compared, title in zip(axes, (REPAIRED, IN_PLACE_OF_THE_KERNEL), ("Repairs", "Kernels"), strict=True):
        drawn = []
        for baseline, families in compared.items():
            for family in families:
                found = {place["depth"]: scores.over(ALL[family], ALL[baseline], place) for place in (SMALLEST, DEEPER)}
                drawn += [(family, baseline, depth, own) for depth, own in found.items() if own]
        labels = list(dict.fromkeys(family for family, *_ in drawn))[::-1]
        for number, depth in enumerate((SMALLEST["depth"], DEEPER["depth"])):
            own = [(labels.index(family), interval) for family, _, at, interval in drawn if at == depth]
            shift = 0.15 - 0.3 * number
            _with_intervals(axis, [(place + shift, interval) for place, interval in own], f"{depth} layers", number)
        rows += [
            {
                "family": family,
                "over": baseline,
                "layers": depth,
                "difference": own.value,
                "low": own.low,
                "high": own.high,
            }
            for family, baseline, depth, own in drawn
        ]
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("bits per byte over " + " and ".join(compared), fontsize=8)
        axis.grid(alpha=0.3, axis="x")
    if not rows:
        return None
    axes[0].legend(fontsize=7)
    title = f"What repairs GKA, and what its kernel is worth, on {name}"
    figure.suptitle(title, fontsize=10)
    caption = "Bars hold 95 % over seeds, paired; without a bar there is one seed. Less is better."
    return Figure(save(figure, folder / f"study-forms-{name}.png"), title, caption, rows)


def context(results: Path, folder: Path) -> Figure | None:
    """Loss by the position in a row, and how many tokens each head averages; None if no model was looked at."""
    figure, (left, right) = subplots(1, 2, figsize=(11, 4.2))
    rows, names = [], []
    known = [(cell, record) for cell, record in probed_models(results) if cell is not None]
    for cell, record in sorted(known, key=lambda one: one[0].seed):
        family = family_of(cell)
        if family in names or any(getattr(cell, field) != value for field, value in PROBED.items()):
            continue  # of every family the first seed
        losses = dict(list(record["metrics"]["loss_by_position"].items())[:-1])
        tokens = [head["effective tokens"] for head in record["metrics"]["heads"]]
        left.plot(range(len(losses)), list(losses.values()), marker="o", markersize=3, label=family)
        left.set_xticks(range(len(losses)), list(losses), fontsize=7)
        right.plot(tokens, [len(names)] * len(tokens), "o", alpha=0.5)
        names.append(family)
        rows += [{"family": family, "positions": place, "nats a token": loss} for place, loss in losses.items()]
    if not rows:
        return None
    left.set(xlabel="position in the row", ylabel="nats a token")
    left.legend(fontsize=7)
    right.set(xscale="log", xlabel="tokens that a head averages, exp(entropy): a dot for each head")
    right.set_yticks(range(len(names)), names, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    title = "What models of four layers do in their context"
    figure.suptitle(title, fontsize=10)
    caption = (
        "Trained on 2^22 tokens. Left: loss by the position in a row of 512 tokens. Right: the spread of the heads."
    )
    return Figure(save(figure, folder / "study-context.png"), title, caption, rows)


def images(results: Path, folder: Path) -> Figure | None:
    """Top-1 of every family on every set of images, seed by seed; None if nothing is finished."""
    found = {name: {f: r for f, r in results_of(rows).items() if r} for name, rows in rows_of(results).items()}
    if not found:
        return None
    figure, axes = subplots(1, len(found), figsize=(5.5 * len(found), 3.8), squeeze=False)
    rows = []
    for axis, (name, by_family) in zip(axes[0], found.items(), strict=True):
        labels = list(by_family)[::-1]
        for place, family in enumerate(labels):
            result, colour = by_family[family], f"C{place % 10}"
            axis.plot(list(result.losses.values()), [place] * len(result.losses), "o", color=colour, alpha=0.4)
            axis.plot([result.mean], [place], "|", color=colour, markersize=16, markeredgewidth=2)
            rows += [
                {"images": name, "family": family, "seed": s, "top-1 %": top1} for s, top1 in result.losses.items()
            ]
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.set(xlabel="top-1, %", title=name)
        axis.grid(alpha=0.3, axis="x")
    title = "Vision transformers with spatial offsets, and hybrids"
    caption = "Each family at its own best learning rate; a dot for each seed, a stroke for their mean."
    return Figure(save(figure, folder / "study-images.png"), title, caption, rows)


def _with_intervals(axis, places: Iterable[tuple[float, Interval]], label: str, number: int) -> None:
    for height, interval in places:
        if not math.isnan(interval.low):
            axis.plot([interval.low, interval.high], [height, height], color=f"C{number}", linewidth=1.5)
        axis.plot(interval.value, height, "o" if number == 0 else "s", color=f"C{number}", markersize=5, label=label)
        label = "_" + label.lstrip("_")  # once in the legend
