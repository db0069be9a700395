"""The table of the paper's vision models: parameters and FLOPs counted here, accuracies as the paper prints them."""

from deit_gka.model.accounting import vit_cost
from deit_gka.model.registry import SIZES
from gka.kinds import KINDS
from runs.paper import published
from runs.paper.deit import DEFAULT_KIND, PAPER_NAMES, SIZE_NAMES
from runs.table import Table


def sizes() -> list[Table]:
    """Every vision model of the paper and the command that trains it."""
    kinds = {paper_name: kind for kind, paper_name in PAPER_NAMES.items()}
    rows = []
    for label, printed in published.VISION.items():
        paper_name, size = label.split("-")
        kind, shape = KINDS[kinds[paper_name]], SIZES[SIZE_NAMES[size.lower()]]
        cost = vit_cost(kind.name, shape["embed_dim"], shape["depth"], shape["num_heads"])
        suffix = {DEFAULT_KIND: "", "softmax": "-base"}.get(kind.name, f"-{kind.name}")
        command = f"`make train-deit-{size.lower()}{suffix}`"
        counts = [f"{cost.parameters:,}", f"{cost.attention:,}", str(cost.bandwidths or "")]
        measures = [f"{cost.flops / 1e9:.2f}", f"{cost.raw_mib:.1f}", f"*{printed['top1']}*"]
        rows.append([label, command, *counts, *measures])
    headings = ["", "command", "parameters", "attention", "sigma", "GFLOPs", "weights, MiB", "*paper: top-1*"]
    return [Table.of(headings, rows, words=2)]
