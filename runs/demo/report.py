"""What the demo prints of its language models: the paper's tables in miniature, samples of text, learned bandwidths."""

from nanochat_gka.training.bits_per_byte import remarks
from runs.paper import published
from runs.table import Table
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
    headings = ["", baseline, *(heading for label in others for heading in (label, "ratio"))]
    cells = []
    for key, (heading, form) in COLUMNS.items():
        base = rows[baseline][key]  # None or, in older runs, 0 tokens/s: too few steps to time
        cells.append([heading, "" if base is None else form.format(base)])
        for label in others:
            value = rows[label][key]
            ratio = "" if key == "gap" or not (base and value) else f"{value / base:.2f}x"
            cells[-1] += ["" if value is None else form.format(value), ratio]
    notes = [OFFSETS_NOTE, *remarks(rows)]
    Table.of(headings, cells, title="Measured here, equal tokens for all", notes=notes).show()
    paper_table().show()

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
    rows = []
    for key in base:
        ratio = "" if key == "gap" else f"{float(gka[key].rstrip('M')) / float(base[key].rstrip('M')):.2f}x"
        rows.append([COLUMNS[key][0], f"*{base[key]}*", f"*{gka[key]}*", ratio])
    title, notes = "The paper's depth 20, as printed there", published.notes("compute")[:2]
    return Table.of(["", base_label, gka_label, "ratio"], rows, title=title, notes=notes)
