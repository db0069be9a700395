"""The learned bandwidths: σ over training, σ against the distances of the features, and exp(a) of every channel."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import Normalize

from nanochat_gka.figures.subjects import TextSubject, caption, rows_by_head
from trainkit_gka.figures.charts import heat_map
from trainkit_gka.figures.sheet import legend_beside, name_above, scale, sheet
from trainkit_gka.plots import Figure, shades

ACROSS = 5  # panels of layers beside each other


def _panels(models: Sequence[tuple], draw: Callable, title: str, words: str, x: str, y: str):
    """A sheet with a panel for every layer of every model; draw(axis, model, layer) fills one.

    models: name, argument of `draw`, layers from 0. Returns `save` of `sheet` and the axes of all panels.
    """
    columns = min(ACROSS, max(len(layers) for *_, layers in models))
    rows = [
        (name, model, layers[start : start + columns])
        for name, model, layers in models
        for start in range(0, len(layers), columns)
    ]
    save, axes = sheet(len(rows), columns, (2.3, 1.9), title, words, (0.7, 1.0, 0.85, 0.55), (0.42, 1.05))
    for row, (name, model, layers) in zip(axes, rows):
        for axis in row[len(layers) :]:
            axis.set_visible(False)
        for axis, layer in zip(row, layers):
            draw(axis, model, layer)
            axis.set_title(f"layer {layer + 1}", fontsize=9)
            axis.set_xlabel(x, fontsize=8)
            axis.tick_params(which="both", labelsize=7)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(y, fontsize=9)
        legend_beside(row[len(layers) - 1])
        name_above(row[0], name)
    return save, [axis for axis in axes.flat if axis.get_visible()]


# σ over training


def draw_training(subjects: Sequence[TextSubject], folder: Path) -> list[Figure]:
    """Draw σ over training: a panel for every layer with a bandwidth, a line for every head, its start dashed.

    Of the models that have a log of bandwidths. Those of one shape, such as seeds, are one line, their mean, in a band
    from the least to the most.
    """
    groups: dict[object, list[TextSubject]] = {}
    for subject in subjects:
        if subject.history:
            groups.setdefault((subject.config, tuple(subject.history)), []).append(subject)
    seeds = any(len(group) > 1 for group in groups.values())
    words = (
        "σ of every head at the evaluations of the training run; dashed: where it started. "
        f"{'A band is from the least to the most of several runs, the line their mean. ' if seeds else ''}"
        "One scale for all. The kernel is exp(−|x_i − x_j|² / 2σ²): a σ that grows without end makes W the average of "
        f"all tokens that it sees. Runs: {'; '.join(subject.about for group in groups.values() for subject in group)}."
    )
    title, models = "Bandwidths over training", []
    for group in groups.values():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        models.append((f"{group[0].model}{more}: {group[0].config.form}", group, group[0].layers_with("sigma")))
    save, axes = _panels(models, _draw_sigma, title, words, "training tokens (millions)", "σ")
    lows, highs = zip(*(axis.get_ylim() for axis in axes))
    for axis in axes:
        axis.set_ylim(min(lows), max(highs))

    def numbers(subject: TextSubject, layer: int, head: int) -> dict[str, float]:
        (tokens, last), initial = list(subject.history.items())[-1], subject.layers[layer].initial_sigma
        return {"training tokens": tokens, "σ at the start": initial, "σ at the end": last[layer][head]}

    table = rows_by_head([subject for group in groups.values() for subject in group], numbers, "sigma")
    return [save(folder / "sigma.png", table)]


def _draw_sigma(axis, group: Sequence[TextSubject], layer: int) -> None:
    """The panel of a layer of the runs of one shape."""
    tokens = np.array([*group[0].history]) / 1e6
    runs = np.array([[sigma[layer] for sigma in subject.history.values()] for subject in group])  # (runs, E, H)
    heads = np.moveaxis(runs, -1, 0)
    for name, sigma, colour in zip(group[0].head_names(), heads, shades(len(heads))):
        axis.plot(tokens, sigma.mean(0), ".-", color=colour, markersize=5, linewidth=1.2, label=f"head {name}")
        if len(group) > 1:
            axis.fill_between(tokens, sigma.min(0), sigma.max(0), color=colour, alpha=0.2, linewidth=0)
    initial = group[0].layers[layer].initial_sigma
    axis.axhline(initial, color="black", linestyle="--", linewidth=1, label=f"start, {initial:.2f}")


# σ against distances


def draw_distances(subjects: Sequence[TextSubject], folder: Path) -> list[Figure]:
    """Draw σ over the median distance as a table, and below it one against the other; models side by side.

    Of the models that have bandwidths.
    """
    subjects = [subject for subject in subjects if subject.layers_with("sigma")]
    words = caption(
        subjects,
        "Above: σ over the median distance |x_i − x_j| of two tokens' features, after rotation and norm, by layer and "
        "head, on one scale. Below: one against the other; dashed: where they are equal. Two tokens at the median "
        "distance d have the affinity exp(−d² / 2σ²): 0.61 where σ = d, 0.14 where it is half of d, 0.88 where it is "
        "twice d. σ alone cannot be compared across layers.",
    )
    depth = max(len(s.layers) for s in subjects)
    heads = max(s.num_heads for s in subjects)
    cell = (max(3.0, 0.42 * depth), max(2.2, 0.24 * heads))
    title = "Bandwidths against distances"
    save, axes = sheet(2, len(subjects), cell, title, words, (0.7, 1.0, 0.85, 0.55), (1.6, 0.85))
    measured = {subject: (subject.median_distances, subject.sigmas) for subject in subjects}
    ratios = np.concatenate([(sigmas / medians).ravel() for medians, sigmas in measured.values()])
    norm = Normalize(np.nanmin(ratios), np.nanmax(ratios))
    of_layer = Normalize(1, depth)
    end = 1.08 * max(np.nanmax(values) for pair in measured.values() for values in pair)
    for (table, chart), (subject, (medians, sigmas)) in zip(axes.T, measured.items()):
        heat_map(table, sigmas / medians, "σ / median distance", norm, names=subject.head_names())
        name_above(table, subject.model)
        numbers = np.repeat(np.arange(1, len(medians) + 1), medians.shape[1])
        chart.scatter(medians.ravel(), sigmas.ravel(), c=numbers, s=18, cmap="viridis", norm=of_layer)
        chart.plot((0, end), (0, end), color="black", linestyle="--", linewidth=1)
        chart.set(xlabel="median distance", ylabel="σ", xlim=(0, end), ylim=(0, end))
        chart.grid(alpha=0.3)
        bar = scale(of_layer, chart, (1.03, 0, 0.03, 1), "layer", cmap="viridis")
        bar.set_ticks(range(1, depth + 1, -(-depth // 10)))

    def numbers_of_head(subject: TextSubject, layer: int, head: int) -> dict[str, float]:
        median, sigma = (values[layer, head] for values in measured[subject])
        return {"σ": float(sigma), "median distance": float(median), "σ / median distance": float(sigma / median)}

    rows = rows_by_head(subjects, numbers_of_head, "sigma")
    return [save(folder / "distances.png", rows)]


# Channels


def _scales(subject: TextSubject) -> dict[int, np.ndarray]:
    """exp(a) by layer: (H, 2, D / 2), by head, half and rotary frequency, the fastest first."""
    layers = {number: subject.layers[number].channel_scales for number in subject.layers_with("channel_scales")}
    return {number: scales.unflatten(-1, (2, -1)).numpy() for number, scales in layers.items()}


def draw_channels(subjects: Sequence[TextSubject], folder: Path) -> list[Figure]:
    """Draw exp(a) of every channel: a panel for every layer that has them, a colour for every head.

    Of the models that have channel bandwidths.
    """
    by_layer = {subject: scales for subject in subjects if (scales := _scales(subject))}
    all_scales = {subject: np.stack([*scales.values()]) for subject, scales in by_layer.items()}  # (L, H, 2, D / 2)
    words = caption(
        [*by_layer],
        "exp(a) of every channel, which scales it before tokens are compared; dashed: 1, where it started. The two "
        "channels that the rotary embedding turns together stand above each other, the fastest at the left. A line is "
        "the geometric mean of the channels of a head in eighths of the frequencies. A channel of small exp(a) hardly "
        "counts: the scaled features are normalised per head, so that only ratios within a head matter.",
        *(
            f"{subject.model}: exp(a) is {scales.min():.2g} to {scales.max():.2g}, its median {np.median(scales):.2g}; "
            f"{np.mean(scales < 0.5):.0%} of the channels lie below a half."
            for subject, scales in all_scales.items()
        ),
        of_weights=False,
    )
    least = min(1.0, *(float(scales.min()) for scales in all_scales.values())) / 1.2
    largest = max(1.0, *(float(scales.max()) for scales in all_scales.values())) * 1.2

    def draw(axis, subject: TextSubject, layer: int) -> None:
        _draw_scales(axis, by_layer[subject][layer], subject.head_names(subject.layers[layer]))
        axis.set_ylim(least, largest)

    def numbers(subject: TextSubject, layer: int, head: int) -> dict[str, float]:
        scales = by_layer[subject][layer][head]
        fast, slow = np.split(np.log(scales), [scales.shape[-1] // 2], axis=-1)
        return {
            "least": float(scales.min()),
            "median": float(np.median(scales)),
            "largest": float(scales.max()),
            "below a half": float(np.mean(scales < 0.5)),
            "mean of fast frequencies": float(np.exp(fast.mean())),
            "mean of slow frequencies": float(np.exp(slow.mean())),
        }

    title = "Bandwidths of channels"
    models = [(subject.model, subject, [*layers]) for subject, layers in by_layer.items()]
    save, _ = _panels(models, draw, title, words, "rotary frequency, fast to slow", "exp(a)")
    table = rows_by_head([*by_layer], numbers, "channel_scales")
    return [save(folder / "channels.png", table)]


def _draw_scales(axis, scales: np.ndarray, names: Sequence[str]) -> None:
    """The panel of a layer with these `_scales`."""
    frequencies = np.arange(1, scales.shape[-1] + 1)
    eighths = np.array_split(np.arange(len(frequencies)), min(8, len(frequencies)))
    for name, of_head, colour in zip(names, scales, shades(len(scales))):
        axis.plot(frequencies, of_head.T, ".", color=colour, markersize=2, alpha=0.5)
        means = [np.exp(np.log(of_head[:, part]).mean()) for part in eighths]
        axis.plot([frequencies[part].mean() for part in eighths], means, color=colour, label=f"head {name}")
    axis.axhline(1, color="black", linestyle="--", linewidth=1)
    axis.set_yscale("log")
