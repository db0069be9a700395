"""What the demo draws: loss curves, and learned bandwidths as the paper draws them."""

from pathlib import Path

from trainkit_gka.plots import save, subplots
from trainkit_gka.progress import read_events


def draw_losses(rows: dict[str, dict], path: Path) -> Path:
    """Training loss and validation bits per byte over tokens. rows: label -> the run's `finish` record and its log."""
    figure, (losses, bpbs) = subplots(1, 2, figsize=(11, 4))
    for label, row in rows.items():
        millions = row["train_tokens"] / row["step"] / 1e6  # tokens of a step
        train = [(r["step"] * millions, r["smooth_loss"]) for r in read_events(row["log"], "train", "smooth_loss")]
        evaluations = [(r["step"] * millions, r["val_bpb"]) for r in read_events(row["log"], "eval", "val_bpb")]
        losses.plot(*zip(*train), label=label)
        bpbs.plot(*zip(*evaluations), marker="o", label=label)
    for axes, quantity in ((losses, "training loss (nats per token)"), (bpbs, "validation bits per byte")):
        axes.set(xlabel="training tokens (millions)", ylabel=quantity)
        axes.grid(alpha=0.3)
        axes.legend()
    return save(figure, path)


def draw_bandwidths(sigmas: dict[str, list[list[float]]], path: Path) -> Path:
    """A heat map, and lines over depth. sigmas: label -> for every layer its heads' sigma."""
    figure, axes = subplots(2, len(sigmas), figsize=(5 * len(sigmas), 7), squeeze=False)
    for (heat_map, lines), (label, sigma) in zip(axes.T, sigmas.items()):
        heads = list(zip(*sigma))  # H x L
        picture = heat_map.imshow(heads, cmap="YlOrRd", aspect="auto")
        figure.colorbar(picture, ax=heat_map, label="sigma")
        heat_map.set(title=label, xlabel="layer", ylabel="head", xticks=range(len(sigma)), yticks=range(len(heads)))
        for head, values in enumerate(heads):
            lines.plot(values, marker="o", label=f"head {head}")
        lines.set(xlabel="layer", ylabel="sigma", xticks=range(len(sigma)))
        lines.grid(alpha=0.3)
        lines.legend()
    return save(figure, path)
