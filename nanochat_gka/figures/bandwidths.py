"""The learned bandwidths: σ of every layer and head over training, and σ against the distances of the features."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanochat_gka.figures.subject import Subject, form
from trainkit.figures.charts import heat_map
from trainkit.figures.measures import median_distance
from trainkit.figures.sheet import name_above, save, sheet

ACROSS = 5  # layers beside each other


def same_form(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Runs of models of one shape together, in the order of the first of each."""
    groups: dict[object, list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(subject.config, []).append(subject)
    return list(groups.values())


def trajectories(group: Sequence[Subject], layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens trained on, (E,), and σ of a layer, (runs, E, H), at the evaluations that all runs of a group had."""
    common = set.intersection(*({e.tokens for e in subject.history if layer in e.sigma} for subject in group))
    by_run = [[e.sigma[layer] for e in subject.history if e.tokens in common] for subject in group]
    return np.array(sorted(common)), np.array(by_run, dtype=float).reshape(len(group), len(common), -1)


def growth(group: Sequence[Subject]) -> str:
    """How far σ² went, and whether it still moves: a sentence."""
    layers = [number for number, layer in enumerate(group[0].layers) if layer.sigma is not None]
    values = [trajectories(group, layer)[1] for layer in layers]
    start = group[0].layers[layers[0]].initial_sigma ** 2
    ends = np.concatenate([(sigma[:, -1] ** 2).ravel() for sigma in values]) / start
    words = (
        f"{' and '.join(subject.about for subject in group)}: σ² ended at {ends.min():.2f} to {ends.max():.2f} times "
    )
    words += f"its start, {start:.3g}"
    if len(values[0][0]) > 1:
        change = np.concatenate([(sigma[:, -1] ** 2 / sigma[:, -2] ** 2 - 1).ravel() for sigma in values])
        words += f", and changed by {change.min():+.0%} to {change.max():+.0%} between the last two evaluations"
    return words + "."


def draw_training(subjects: Sequence[Subject], folder: Path) -> list[Path]:
    """Draw σ over training: a panel for every layer with a bandwidth, a line for every head, its start dashed.

    Models of one shape, such as seeds, are one line, their mean, in a band from the least to the most. Returns the
    file.
    """
    groups = same_form(subjects)
    panels = [[n for n, layer in enumerate(group[0].layers) if layer.sigma is not None] for group in groups]
    columns = min(ACROSS, max(map(len, panels)))
    rows = [(g, layers[i : i + columns]) for g, layers in zip(groups, panels) for i in range(0, len(layers), columns)]
    caption = (
        "σ of every head at the evaluations of the training run; dashed: where it started. A band is from the least to "
        "the most of several runs, the line their mean. The kernel is exp(−|x_i − x_j|² / 2σ²): a σ that grows without "
        "end makes W the average of all tokens that it sees. " + " ".join(map(growth, groups))
    )
    figure, axes = sheet(
        len(rows), columns, (2.3, 1.9), "Bandwidths over training", caption, (0.7, 1.0, 0.85, 0.55), (0.42, 1.05)
    )
    for row, (group, layers) in zip(axes, rows):
        _draw_panels(row, group, layers)
        name_above(row[0], _title(group))
    return [save(figure, folder / "sigma.png")]


def _title(group: Sequence[Subject]) -> str:
    names = group[0].name if len(group) == 1 else f"{len(group)} runs as {group[0].name}"
    return f"{names}: {form(group[0].config)}"


def _draw_panels(axes, group: Sequence[Subject], layers: Sequence[int]) -> None:
    """The panels of some layers of the runs of one shape, on one scale."""
    for axis in axes[len(layers) :]:
        axis.set_visible(False)
    for axis, layer in zip(axes, layers):
        tokens, sigma = trajectories(group, layer)
        for head, name in enumerate(group[0].head_names()):
            (line,) = axis.plot(
                tokens / 1e6, sigma[:, :, head].mean(0), marker=".", markersize=5, linewidth=1.2, label=f"head {name}"
            )
            if len(group) > 1:
                low, high = sigma[:, :, head].min(0), sigma[:, :, head].max(0)
                axis.fill_between(tokens / 1e6, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        initial = group[0].layers[layer].initial_sigma
        axis.axhline(initial, color="black", linestyle="--", linewidth=1, label=f"start, {initial:.2f}")
        axis.set_title(f"layer {layer + 1}", fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.set_xlabel("training tokens (millions)", fontsize=8)
    bounds = [axis.get_ylim() for axis in axes[: len(layers)]]
    for axis in axes[: len(layers)]:
        axis.set_ylim(min(low for low, _ in bounds), max(high for _, high in bounds))
    axes[0].set_ylabel("σ", fontsize=9)
    axes[len(layers) - 1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def relative(subject: Subject) -> tuple[np.ndarray, np.ndarray]:
    """The median distance of two tokens' features, and σ over it, (L, H) each; NaN in layers without σ."""
    missing = np.full(subject.num_heads, np.nan)
    medians = np.stack([missing if s.sigma is None else median_distance(s.features).numpy() for s in subject.layers])
    sigma = np.stack([missing if s.sigma is None else s.sigma.numpy() for s in subject.layers])
    return medians, sigma / medians


def draw_distances(subjects: Sequence[Subject], folder: Path) -> list[Path]:
    """Draw σ against the median distance of two tokens' features: what says whether a σ is narrow or wide.

    Models side by side, their tables above. Returns the file.
    """
    first = subjects[0]
    caption = first.caption(
        "Above: σ over the median distance |x_i − x_j| of two tokens' features, after rotation and norm, by layer and "
        "head. Below: both of them, and the line where they are equal. Two tokens at the median distance d have the "
        "affinity exp(−d² / 2σ²): 0.61 where σ = d, 0.14 at half of it, 0.88 at twice. σ alone cannot be compared "
        "across layers.",
        *[f"Beside it: {subject.about}." for subject in subjects[1:]],
    )
    depth, heads = len(first.layers), first.num_heads
    size = (max(3.0, 0.42 * depth), max(2.2, 0.24 * heads))
    figure, axes = sheet(
        2, len(subjects), size, "Bandwidths against distances", caption, (0.7, 1.0, 0.85, 0.55), (1.5, 0.85)
    )
    for (table, chart), subject in zip(axes.T, subjects):
        medians, ratio = relative(subject)
        heat_map(figure, table, ratio, "σ / median distance", names=subject.head_names())
        name_above(table, subject.name)
        for number, layer in enumerate(subject.layers):
            if layer.sigma is not None:
                chart.scatter(medians[number], layer.sigma, s=18, label=f"layer {number + 1}")
        ends = 0.0, 1.05 * max(chart.get_xlim()[1], chart.get_ylim()[1])
        chart.plot(ends, ends, color="black", linestyle="--", linewidth=1, label="equal")
        chart.set(xlabel="median distance", ylabel="σ", xlim=(0, None), ylim=(0, None))
        chart.grid(alpha=0.3)
        columns = 1 + depth // 14
        chart.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, ncols=columns)
    return [save(figure, folder / "distances.png")]
