"""What the demo shows: the paper's tables in miniature, samples of text, learned bandwidths, and two pictures."""

import json
from pathlib import Path

from rich.table import Table

from trainkit.plots import save, subplots
from trainkit.progress import console, read_events

_PRINTED = json.loads((Path(__file__).parents[1] / "paper/published.json").read_text())
PAPER, PAPER_VISION = _PRINTED["depth_20"], _PRINTED["vision"]
# The tables' captions.
OFFSETS = " ".join([
    "GKA is the paper's form. Offsets pair key and value one token apart, a fixed case of KV shifting attention",
    "(arXiv 2411.19574); softmax gains from that too, and has none here.",
])  # fmt: skip
PAPER_NOTE = " ".join(_PRINTED["depth_20_notes"])
COLUMNS = {
    "parameters": ("parameters", "{:,}"),
    "flops_per_token": ("FLOPs/token", "{:.3e}"),
    "train_tokens": ("tokens", "{:.3e}"),
    "train_flops": ("total FLOPs", "{:.3e}"),
    "train_bpb": ("train BPB", "{:.4f}"),
    "val_bpb": ("val BPB", "{:.4f}"),
    "gap": ("val - train", "{:.4f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}


def show(rows: dict[str, dict], samples: dict[str, dict[str, str]]) -> None:
    """Print the table, the samples and the bandwidths. rows: label -> the `finish` record of its log; the first is the baseline."""
    baseline, *others = rows
    table = Table(title="\nMeasured here, equal tokens for all", caption=OFFSETS, caption_justify="left")
    table.add_column("")
    table.add_column(baseline, justify="right")
    for label in others:
        table.add_column(label, justify="right")
        table.add_column("ratio", justify="right", style="dim")
    for key, (heading, form) in COLUMNS.items():
        cells = [form.format(rows[baseline][key])]
        for label in others:
            base = rows[baseline][key]  # 0 tokens/s: too few steps to time
            ratio = "" if key == "gap" or not base else f"{rows[label][key] / base:.2f}x"
            cells += [form.format(rows[label][key]), ratio]
        table.add_row(heading, *cells)
    console.print(table)
    console.print(paper_table())

    for label, texts in samples.items():
        console.rule(f"text by {label}", align="left")
        for prompt, text in texts.items():
            console.print(f"{(prompt + text)!r}", highlight=False, markup=False)
    for label, row in rows.items():
        if row["sigma"]:
            console.rule(f"learned sigma per head, {label}", align="left")
            for layer, sigma in row["sigma"].items():
                console.print(f"  {layer}: " + "  ".join(f"{value:.2f}" for value in sigma), highlight=False)


def paper_table() -> Table:
    """The paper's depth-20 figures as it prints them, and their ratios."""
    (base_label, base), (gka_label, gka) = PAPER.items()
    table = Table(title="\nThe paper's depth 20, as printed there", caption=PAPER_NOTE, caption_justify="left")
    for heading in ("", base_label, gka_label, "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for key in base:
        ratio = "" if key == "gap" else f"{float(gka[key].rstrip('M')) / float(base[key].rstrip('M')):.2f}x"
        table.add_row(COLUMNS[key][0], base[key], gka[key], ratio)
    return table


def plot(rows: dict[str, dict], out: Path) -> list[Path]:
    """Loss curves, and bandwidths as the paper draws them (heat map and lines over depth). Returns the files."""
    figure, (losses, bpbs) = subplots(1, 2, figsize=(11, 4))
    for label, row in rows.items():
        millions = row["train_tokens"] / row["step"] / 1e6  # tokens per step
        train = [(r["step"] * millions, r["smooth_loss"]) for r in read_events(row["log"], "train", "smooth_loss")]
        evaluations = [(r["step"] * millions, r["val_bpb"]) for r in read_events(row["log"], "eval", "val_bpb")]
        losses.plot(*zip(*train), label=label)
        bpbs.plot(*zip(*evaluations), marker="o", label=label)
    for axes, what in ((losses, "training loss (nats per token)"), (bpbs, "validation bits per byte")):
        axes.set(xlabel="training tokens (millions)", ylabel=what)
        axes.grid(alpha=0.3)
        axes.legend()
    paths = [save(figure, out / "loss_curves.png")]

    with_sigma = {label: list(row["sigma"].values()) for label, row in rows.items() if row["sigma"]}
    if with_sigma:
        paths.append(plot_bandwidths(with_sigma, out / "bandwidths.png"))
    return paths


def plot_bandwidths(sigmas: dict[str, list[list[float]]], path: Path) -> Path:
    """Bandwidths as the paper draws them: heat map and lines over depth. sigmas: label -> for every layer, its heads' sigma."""
    figure, axes = subplots(2, len(sigmas), figsize=(5 * len(sigmas), 7), squeeze=False)
    for column, (label, sigma) in enumerate(sigmas.items()):
        heads = list(zip(*sigma))  # H x L
        picture = axes[0][column].imshow(heads, cmap="YlOrRd", aspect="auto")
        figure.colorbar(picture, ax=axes[0][column], label="sigma")
        axes[0][column].set(
            title=label, xlabel="layer", ylabel="head", xticks=range(len(sigma)), yticks=range(len(heads))
        )
        for head, values in enumerate(heads):
            axes[1][column].plot(values, marker="o", label=f"head {head}")
        axes[1][column].set(xlabel="layer", ylabel="sigma", xticks=range(len(sigma)))
        axes[1][column].grid(alpha=0.3)
        axes[1][column].legend()
    return save(figure, path)
