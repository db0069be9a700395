"""Parameters, FLOPs and checkpoint sizes of a ViT from its shapes alone: the paper's tables of vision models, DeiT / VLT / GKA x Ti / S / B.

    python -m deit_gka.accounting

FLOPs are 2 x multiply-accumulates of one image's forward pass, matrix products only (gka/cost.py); "MB" are MiB, as the paper's.
DeiT-S has 9.20 GFLOPs in the paper's comparison, which is this count, and 9.22 in its efficiency table, which counts
LayerNorm too.
"""

from dataclasses import dataclass

from timm.models import VisionTransformer
from torch import nn

from gka import attention_cost
from trainkit.cli import run

MIB = 2**20


@dataclass(frozen=True)
class ModelCost:
    """The columns of the paper's tables."""

    parameters: int
    attention: int  # W_O, biases and bandwidths included
    mlp: int
    bandwidths: int
    flops: int  # one image, forward

    @property
    def raw_mib(self) -> float:
        """float32 weights in MiB; the file torch.save writes is about 0.05 more."""
        return 4 * self.parameters / MIB


def vit_cost(kind: str, dim: int, depth: int, num_heads: int, *, image_size: int = 224, patch_size: int = 16, channels: int = 3,
             classes: int = 1000, mlp_ratio: float = 4, value_bias: bool = True) -> ModelCost:  # fmt: skip
    """Cost of a DeiT-shaped ViT (pre-norm, CLS token, learned positions, biases everywhere) with attention of `kind` (softmax, vlt, gka).

    Raises ValueError as `gka.attention_cost`.
    """
    patches = (image_size // patch_size) ** 2
    tokens, hidden, pixels = patches + 1, int(mlp_ratio * dim), channels * patch_size**2
    attention = attention_cost(kind, dim, num_heads, tokens, value_bias=value_bias)
    mlp = 2 * dim * hidden + hidden + dim
    outside = (
        (pixels * dim + dim) + dim + tokens * dim + 2 * dim + (dim * classes + classes if classes else 0)
    )  # patches, CLS, positions, norm, head
    return ModelCost(
        parameters=outside + depth * (attention.parameters + mlp + 4 * dim),
        attention=depth * attention.parameters,
        mlp=depth * mlp,
        bandwidths=depth * attention.bandwidths,
        flops=2 * patches * pixels * dim + depth * (attention.flops + 4 * tokens * dim * hidden) + 2 * dim * classes,
    )


def cost_of(model: nn.Module) -> ModelCost | None:
    """Cost of a built timm ViT with one kind of attention; None for other architectures, whose shapes this module does not know."""
    if not isinstance(model, VisionTransformer):
        return None
    attentions = [block.attn for block in model.blocks if hasattr(block, "attn")]
    shapes = {(kind_of(attention), attention.num_heads) for attention in attentions}
    if len(shapes) != 1 or not hasattr(model.blocks[0].mlp, "fc1"):
        return None
    (kind, num_heads), embed = shapes.pop(), model.patch_embed
    cost = vit_cost(
        kind, model.embed_dim, len(attentions), num_heads, image_size=embed.img_size[0], patch_size=embed.patch_size[0],
        channels=embed.proj.in_channels, classes=model.num_classes, mlp_ratio=model.blocks[0].mlp.fc1.out_features / model.embed_dim,
        value_bias=getattr(attentions[0], "value_bias", None) is not None,
    )  # fmt: skip
    return (
        cost if cost.parameters == sum(parameter.numel() for parameter in model.parameters()) else None
    )  # registers, distillation, no biases, ...


def kind_of(attention: nn.Module) -> str:
    """softmax, vlt or gka, from the parameters of a built attention layer."""
    if hasattr(attention, "log_sigma"):
        return "gka"
    return "vlt" if hasattr(attention, "qk") else "softmax"


@dataclass
class AccountingConfig:
    """Print parameters, FLOPs and checkpoint sizes of DeiT, VLT and GKA in three sizes, as the paper counts them."""


def main(config: AccountingConfig) -> None:
    from deit_gka.model.registry import SIZES

    print(
        f"{'':<14}{'parameters':>12}{'attention':>12}{'MLP':>12}{'sigma':>7}{'GFLOPs':>9}{'MiB':>8}{'parameters':>12}{'FLOPs':>9}"
    )
    for size, shape in SIZES.items():
        costs = {
            kind: vit_cost(kind, shape["embed_dim"], shape["depth"], shape["num_heads"])
            for kind in ("softmax", "vlt", "gka")
        }
        base = costs["softmax"]
        for kind, cost in costs.items():
            line = f"{kind + ' ' + size:<14}{cost.parameters:>12,}{cost.attention:>12,}{cost.mlp:>12,}{cost.bandwidths or '-':>7}"
            line += f"{cost.flops / 1e9:>9.4f}{cost.raw_mib:>8.2f}"
            print(
                line
                if cost is base
                else f"{line}{cost.parameters / base.parameters - 1:>+12.2%}{cost.flops / base.flops - 1:>+9.2%}"
            )


if __name__ == "__main__":
    run(main, AccountingConfig)
