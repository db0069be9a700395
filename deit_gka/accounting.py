"""Parameters, FLOPs and size of DeiT with every kind of attention in three sizes: the paper's tables of vision models.

python -m deit_gka.accounting
python -m deit_gka.accounting --attention GGGA
"""

from dataclasses import dataclass

from deit_gka.model.accounting import vit_cost
from deit_gka.model.attention import ATTENTION
from deit_gka.model.checkpoints import check_attention
from deit_gka.model.registry import SIZES
from gka import KINDS
from trainkit_gka.cli import run

HEADINGS = ("", "parameters", "attention", "MLP", "sigma", "GFLOPs", "MiB", "parameters", "FLOPs")
WIDTHS = (14, 12, 12, 12, 7, 9, 8, 12, 9)


@dataclass
class AccountingConfig:
    """Print parameters, FLOPs and MiB of DeiT with every kind of attention in three sizes, as the paper counts them."""

    attention: str = ""
    """Add a row to every size for this pattern by layer: letters of the kinds, such as GGGA."""


def main(config: AccountingConfig) -> None:
    patterns = [kind for kind in KINDS if kind in ATTENTION]
    if config.attention:
        check_attention(config.attention)
        patterns.append(config.attention)
    print(line(HEADINGS))
    for size, shape in SIZES.items():
        dim, depth, num_heads = shape["embed_dim"], shape["depth"], shape["num_heads"]
        base = vit_cost(patterns[0], dim, depth, num_heads)
        for pattern in patterns:
            cost = vit_cost(pattern, dim, depth, num_heads)
            cells = [f"{pattern} {size}", *(f"{count:,}" for count in (cost.parameters, cost.attention, cost.mlp))]
            cells += [str(cost.bandwidths or "-"), f"{cost.flops / 1e9:.4f}", f"{cost.raw_mib:.2f}"]
            if pattern != patterns[0]:
                cells += [f"{cost.parameters / base.parameters - 1:+.2%}", f"{cost.flops / base.flops - 1:+.2%}"]
            print(line(cells))


def line(cells) -> str:
    """The cells in columns, the first one flush left."""
    first, *rest = zip(cells, WIDTHS)
    return f"{first[0]:<{first[1]}}" + "".join(f"{cell:>{width}}" for cell, width in rest)


if __name__ == "__main__":
    run(main, AccountingConfig)
