"""What the demo draws: loss curves, and learned bandwidths as the paper draws them."""

from pathlib import Path

from runs.looks import LOOKS, legend, panels, save
from trainkit_gka.plots import shades
from trainkit_gka.progress import read_events


def draw_losses(rows: dict[str, dict], path: Path) -> Path:
    """Training loss and validation bits per byte over tokens. rows: label -> the run's `finish` record and its log."""
    figure, (losses, bpbs) = panels(1, 2, 3.8)
    for label, row in rows.items():
        millions = row["train_tokens"] / row["step"] / 1e6  # tokens of a step
        train = [(r["step"] * millions, r["smooth_loss"]) for r in read_events(row["log"], "train", "smooth_loss")]
        evaluations = [(r["step"] * millions, r["val_bpb"]) for r in read_events(row["log"], "eval", "val_bpb")]
        style = LOOKS[label]
        losses.plot(*zip(*train), **style(label, marker=None))
        bpbs.plot(*zip(*evaluations), **style(label))
    losses.set(xlabel="training tokens (millions)", ylabel="training loss, nats a token")
    bpbs.set(xlabel="training tokens (millions)", ylabel="validation bits per byte")
    legend(figure, [bpbs], 3)
    return save(figure, "Loss of small language models", path)


def draw_bandwidths(sigmas: dict[str, list[list[float]]], path: Path) -> Path:
    """A heat map, and lines over depth, on one scale. sigmas: label -> for every layer its heads' sigma."""
    figure, axes = panels(2, len(sigmas), 7.0)
    every = [value for sigma in sigmas.values() for layer in sigma for value in layer]
    least, most = min(every), max(every)
    for heat_map, lines, (label, sigma) in zip(axes, axes[len(sigmas) :], sigmas.items()):
        heads = list(zip(*sigma))  # H x L
        numbers = [range(1, len(side) + 1) for side in (sigma, heads)]
        picture = heat_map.imshow(heads, cmap="YlOrRd", aspect="auto", vmin=least, vmax=most)
        figure.colorbar(picture, ax=heat_map, label="σ")
        heat_map.grid(visible=False)
        heat_map.set_title(label, fontsize=10)
        heat_map.set(xlabel="layer", ylabel="head")
        heat_map.set_xticks(range(len(sigma)), numbers[0])
        heat_map.set_yticks(range(len(heads)), numbers[1])
        for head, (values, colour) in enumerate(zip(heads, shades(len(heads))), 1):
            lines.plot(numbers[0], values, marker="o", color=colour, label=f"head {head}")
        lines.set(xlabel="layer", ylabel="σ", xticks=numbers[0], ylim=(0.97 * least, 1.03 * most))
    legend(figure, axes, 4)
    return save(figure, "Learned bandwidths", path)
