"""The learned bandwidths over training: σ of every layer and head, from the runs' logs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanochat_gka.figures.panels import label_row, layer_panels
from nanochat_gka.figures.subjects import TextSubject, form
from trainkit_gka.figures.sheet import name_above, save
from trainkit_gka.plots import Figure, shades


def draw_training(subjects: Sequence[TextSubject], folder: Path) -> list[Figure]:
    """Draw σ over training: a panel for every layer with a bandwidth, a line for every head, its start dashed.

    Of the models that have a log of bandwidths. Those of one shape, such as seeds, are one line, their mean, in a band
    from the least to the most.
    """
    groups = same_shape([subject for subject in subjects if subject.history])
    band = "A band is from the least to the most of several runs, the line their mean. "
    words = (
        "σ of every head at the evaluations of the training run; dashed: where it started. "
        f"{band if any(len(group) > 1 for group in groups) else ''}One scale for all. The kernel is "
        "exp(−|x_i − x_j|² / 2σ²): a σ that grows without end makes W the average of all tokens that it sees. "
        + " ".join(map(growth, groups))
    )
    title = "Bandwidths over training"
    figure, rows = layer_panels([(group, layers_of(group[0])) for group in groups], title, words)
    for group, panels in rows:
        _draw_row(panels, group)
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        name_above(panels[0][0], f"{group[0].model}{more}: {form(group[0].config)}")
    axes = [axis for _, panels in rows for axis, _ in panels]
    lows, highs = zip(*(axis.get_ylim() for axis in axes))
    for axis in axes:
        axis.set_ylim(min(lows), max(highs))
    table = [
        {"model": subject.model, "layer": layer + 1, "head": name, "training tokens": subject.history[-1].tokens,
         "σ at the start": subject.layers[layer].initial_sigma, "σ at the end": subject.history[-1].sigma[layer][head]}
        for group in groups
        for subject in group
        for layer in layers_of(subject)
        for head, name in enumerate(subject.head_names(subject.layers[layer]))
    ]  # fmt: skip
    return [Figure(save(figure, folder / "sigma.png"), title, words, table)]


def same_shape(subjects: Sequence[TextSubject]) -> list[list[TextSubject]]:
    """Models of one shape that were evaluated at the same steps together, in the order of the first of each."""
    groups: dict[object, list[TextSubject]] = {}
    for subject in subjects:
        groups.setdefault((subject.config, tuple(e.tokens for e in subject.history)), []).append(subject)
    return list(groups.values())


def layers_of(subject: TextSubject) -> list[int]:
    """The layers with a bandwidth, from 0."""
    return [number for number, layer in enumerate(subject.layers) if layer.sigma is not None]


def bandwidths(group: Sequence[TextSubject], layer: int) -> np.ndarray:
    """σ of a layer in every run of a group, at every evaluation, of every head: (runs, E, H)."""
    return np.array([[evaluation.sigma[layer] for evaluation in subject.history] for subject in group])


def growth(group: Sequence[TextSubject]) -> str:
    """How far σ² went, and whether it still moves: a sentence."""
    squares = np.stack([bandwidths(group, layer) for layer in layers_of(group[0])]) ** 2  # (L, runs, E, H)
    start = group[0].layers[layers_of(group[0])[0]].initial_sigma ** 2
    ends, runs = squares[:, :, -1] / start, " and ".join(subject.about for subject in group)
    words = f"{runs}: σ² ended at {ends.min():.2f} to {ends.max():.2f} times its start, {start:.3g}"
    if squares.shape[2] > 1:
        change = squares[:, :, -1] / squares[:, :, -2] - 1
        changed = f", and changed by {change.min():+.0%} to {change.max():+.0%} between the last two evaluations"
        words += changed.replace("-", "−")
    return words + "."


def _draw_row(panels: Sequence[tuple], group: Sequence[TextSubject]) -> None:
    """The panels of some layers of the runs of one shape."""
    tokens = np.array([evaluation.tokens for evaluation in group[0].history]) / 1e6
    for axis, layer in panels:
        heads = np.moveaxis(bandwidths(group, layer), -1, 0)
        for name, sigma, colour in zip(group[0].head_names(), heads, shades(len(heads))):
            style = dict(color=colour, marker=".", markersize=5, linewidth=1.2)
            axis.plot(tokens, sigma.mean(0), label=f"head {name}", **style)
            if len(group) > 1:
                axis.fill_between(tokens, sigma.min(0), sigma.max(0), color=colour, alpha=0.2, linewidth=0)
        initial = group[0].layers[layer].initial_sigma
        axis.axhline(initial, color="black", linestyle="--", linewidth=1, label=f"start, {initial:.2f}")
    label_row(panels, "training tokens (millions)", "σ")
