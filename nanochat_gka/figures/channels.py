"""The learned bandwidths of channels: by which factor exp(a) each is scaled before tokens are compared."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanochat_gka.figures.maps import LayerMaps
from nanochat_gka.figures.subjects import Subject, caption
from trainkit_gka.figures.sheet import name_above, save, sheet
from trainkit_gka.plots import Figure, shades

ACROSS = 5  # layers beside each other


def draw_channels(subjects: Sequence[Subject], folder: Path) -> list[Figure]:
    """Draw exp(a) of every channel: a panel for every layer that has them, a colour for every head.

    Of the models that have channel bandwidths.
    """
    subjects = [subject for subject in subjects if subject.has_channel_scales]
    panels = [(subject, layers_of(subject)) for subject in subjects]
    columns = min(ACROSS, max(len(layers) for _, layers in panels))
    rows = [(s, layers[i : i + columns]) for s, layers in panels for i in range(0, len(layers), columns)]
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
    figure, axes = sheet(len(rows), columns, (2.3, 1.9), title, words, (0.7, 1.0, 0.85, 0.55), (0.42, 1.05))
    for row, (subject, layers) in zip(axes, rows):
        _draw_panels(row, subject, layers)
        name_above(row[0], subject.model)
    for axis in axes.flat:
        axis.set_ylim(*_range(subjects))
    table = [
        {"model": subject.model, "layer": layer + 1, "head": name, **numbers(scales)}
        for subject, layers in panels
        for layer in layers
        for name, scales in zip(subject.head_names(subject.layers[layer]), scales_of(subject.layers[layer]))
    ]
    return [Figure(save(figure, folder / "channels.png"), title, words, table)]


def layers_of(subject: Subject) -> list[int]:
    """The layers with channel bandwidths, from 0."""
    return [number for number, layer in enumerate(subject.layers) if layer.channel_scales is not None]


def scales_of(layer: LayerMaps) -> np.ndarray:
    """exp(a) by head, half and rotary frequency, the fastest first: (H, 2, D / 2)."""
    return layer.channel_scales.unflatten(-1, (2, -1)).numpy()


def spread(subject: Subject) -> str:
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


def _range(subjects: Sequence[Subject]) -> tuple[float, float]:
    """The ends of the common scale, with 1 in it."""
    scales = np.concatenate([scales_of(s.layers[layer]).ravel() for s in subjects for layer in layers_of(s)])
    return min(1.0, float(scales.min())) / 1.2, max(1.0, float(scales.max())) * 1.2


def _draw_panels(axes, subject: Subject, layers: Sequence[int]) -> None:
    """The panels of some layers of a model."""
    for axis in axes[len(layers) :]:
        axis.set_visible(False)
    for axis, layer in zip(axes, layers):
        scales = scales_of(subject.layers[layer])
        frequencies = np.arange(1, scales.shape[-1] + 1)
        eighths = np.array_split(np.arange(len(frequencies)), min(8, len(frequencies)))
        names = subject.head_names(subject.layers[layer])
        for name, of_head, colour in zip(names, scales, shades(len(scales))):
            axis.plot(frequencies, of_head.T, ".", color=colour, markersize=2, alpha=0.5)
            means = [np.exp(np.log(of_head[:, part]).mean()) for part in eighths]
            axis.plot([frequencies[part].mean() for part in eighths], means, color=colour, label=f"head {name}")
        kind = subject.layers[layer].kind
        axis.set_title(f"layer {layer + 1}" + (f" ({kind})" if kind != "gka" else ""), fontsize=9)
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        axis.set_yscale("log")
        axis.set_xlabel("rotary frequency, fast to slow", fontsize=8)
        axis.tick_params(which="both", labelsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("exp(a)", fontsize=9)
    axes[len(layers) - 1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
