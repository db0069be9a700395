"""What the demo prints of its language models: the paper's tables in miniature, samples of text, learned bandwidths."""

from rich.table import Table

from nanochat_gka.training.bits_per_byte import remarks
from runs.paper import published
from trainkit_gka.progress import console

OFFSETS_NOTE = (
    "GKA is the paper's form. Offsets pair key and value one token apart, a fixed case of KV shifting attention "
    "(arXiv 2411.19574); softmax gains from that too, and has none here."
)
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
    """Print the table, the samples and the bandwidths.

    rows: label -> the `finish` record of its log; the first is the baseline. samples: label -> prompt -> continuation.
    """
    baseline, *others = rows
    caption = " ".join([OFFSETS_NOTE, *remarks(rows)])
    table = Table(title="\nMeasured here, equal tokens for all", caption=caption, caption_justify="left")
    table.add_column("")
    table.add_column(baseline, justify="right")
    for label in others:
        table.add_column(label, justify="right")
        table.add_column("ratio", justify="right", style="dim")
    for key, (heading, form) in COLUMNS.items():
        base = rows[baseline][key]  # None or, in older runs, 0 tokens/s: too few steps to time
        cells = ["" if base is None else form.format(base)]
        for label in others:
            value = rows[label][key]
            ratio = "" if key == "gap" or not (base and value) else f"{value / base:.2f}x"
            cells += ["" if value is None else form.format(value), ratio]
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
    (base_label, base), (gka_label, gka) = published.LANGUAGE.items()
    caption = " ".join(published.notes("compute")[:2])
    table = Table(title="\nThe paper's depth 20, as printed there", caption=caption, caption_justify="left")
    for heading in ("", base_label, gka_label, "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for key in base:
        ratio = "" if key == "gap" else f"{float(gka[key].rstrip('M')) / float(base[key].rstrip('M')):.2f}x"
        table.add_row(COLUMNS[key][0], base[key], gka[key], ratio)
    return table
