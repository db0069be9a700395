"""The learned bandwidths of channels: by which factor exp(a) each is scaled before tokens are compared."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanochat_gka.figures.maps import LayerWeights
from nanochat_gka.figures.panels import label_row, layer_panels
from nanochat_gka.figures.subjects import TextSubject, caption
from trainkit_gka.figures.sheet import name_above, save
from trainkit_gka.plots import Figure, shades


def draw_channels(subjects: Sequence[TextSubject], folder: Path) -> list[Figure]:
    """Draw exp(a) of every channel: a panel for every layer that has them, a colour for every head.

    Of the models that have channel bandwidths.
    """
    subjects = [subject for subject in subjects if subject.has_channel_scales]
    words = caption(
        subjects,
        "exp(a) of every channel, which scales it before tokens are compared; dashed: 1, where it started. The two "
        "channels that the rotary embedding turns together stand above each other, the fastest at the left. A line is "
        "the geometric mean of the channels of a head in eighths of the frequencies. A channel of small exp(a) hardly "
        "counts: the scaled features are normalised per head, so that only ratios within a head matter.",
        *map(spread, subjects),
        of_weights=False,
    )
    title = "Bandwidths of channels"
    figure, rows = layer_panels([(subject, layers_of(subject)) for subject in subjects], title, words)
    scales = np.concatenate([scales_of(s.layers[layer]).ravel() for s in subjects for layer in layers_of(s)])
    limits = min(1.0, float(scales.min())) / 1.2, max(1.0, float(scales.max())) * 1.2
    for subject, panels in rows:
        for axis, layer in panels:
            _draw_layer(axis, subject, layer)
            axis.set_ylim(*limits)
        label_row(panels, "rotary frequency, fast to slow", "exp(a)")
        name_above(panels[0][0], subject.model)
    table = [
        {"model": subject.model, "layer": layer + 1, "head": name, **numbers(scales)}
        for subject in subjects
        for layer in layers_of(subject)
        for name, scales in zip(subject.head_names(subject.layers[layer]), scales_of(subject.layers[layer]))
    ]
    return [Figure(save(figure, folder / "channels.png"), title, words, table)]


def layers_of(subject: TextSubject) -> list[int]:
    """The layers with channel bandwidths, from 0."""
    return [number for number, layer in enumerate(subject.layers) if layer.channel_scales is not None]


def scales_of(layer: LayerWeights) -> np.ndarray:
    """exp(a) by head, half and rotary frequency, the fastest first: (H, 2, D / 2)."""
    return layer.channel_scales.unflatten(-1, (2, -1)).numpy()


def spread(subject: TextSubject) -> str:
    """How far exp(a) went, and how many channels hardly count: a sentence."""
    scales = np.stack([scales_of(subject.layers[layer]) for layer in layers_of(subject)])
    range_ = f"exp(a) is {scales.min():.2g} to {scales.max():.2g}, its median {np.median(scales):.2g}"
    return f"{subject.model}: {range_}; {np.mean(scales < 0.5):.0%} of the channels lie below a half."


def numbers(scales: np.ndarray) -> dict[str, float]:
    """Of the channels of one head, (2, D / 2): the range, and geometric means of the faster and the slower half."""
    middle, logarithms = scales.shape[-1] // 2, np.log(scales)
    return {
        "least": float(scales.min()),
        "median": float(np.median(scales)),
        "largest": float(scales.max()),
        "below a half": float(np.mean(scales < 0.5)),
        "mean of fast frequencies": float(np.exp(logarithms[:, :middle].mean())),
        "mean of slow frequencies": float(np.exp(logarithms[:, middle:].mean())),
    }


def _draw_layer(axis, subject: TextSubject, number: int) -> None:
    layer = subject.layers[number]
    scales = scales_of(layer)
    frequencies = np.arange(1, scales.shape[-1] + 1)
    eighths = np.array_split(np.arange(len(frequencies)), min(8, len(frequencies)))
    for name, of_head, colour in zip(subject.head_names(layer), scales, shades(len(scales))):
        axis.plot(frequencies, of_head.T, ".", color=colour, markersize=2, alpha=0.5)
        means = [np.exp(np.log(of_head[:, part]).mean()) for part in eighths]
        axis.plot([frequencies[part].mean() for part in eighths], means, color=colour, label=f"head {name}")
    axis.axhline(1, color="black", linestyle="--", linewidth=1)
    axis.set_yscale("log")
