"""Parameters, FLOPs and size of vision transformers, as the paper's tables of vision models count them.

python -m deit_gka.accounting --attention GGGA

FLOPs are 2 x multiply-accumulates of one image's forward pass, matrix products only (gka/cost.py). DeiT-S has 9.20
GFLOPs in the paper's comparison, which is this count, and 9.22 in its efficiency table, which counts LayerNorm too.
"""

import functools
from dataclasses import dataclass

import timm
from timm.layers import Attention, PatchEmbed
from timm.models import VisionTransformer
from torch import nn

import gka.flops  # noqa: F401  torch's FLOP counter then sees these FLOPs too
from deit_gka.model.attention import ATTENTION, TimmAttention
from deit_gka.model.checkpoints import check_attention
from deit_gka.model.registry import SIZES, model_name
from gka.cost import operator_flops
from trainkit_gka.cli import run

HEADINGS = ("", "parameters", "attention", "MLP", "sigma", "GFLOPs", "MiB", "parameters", "FLOPs")
WIDTHS = ("14", ">12", ">12", ">12", ">7", ">9", ">8", ">12", ">9")  # of columns


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
        """float32 weights in MiB, the paper's "MB"; the file that torch.save writes is about 0.05 larger."""
        return 4 * self.parameters / 2**20


def cost_of(model: nn.Module) -> ModelCost | None:
    """Cost of a built timm ViT, on any device; None for architectures whose FLOPs are not known here."""
    known = isinstance(model, VisionTransformer) and model.attn_pool is None
    if not (known and isinstance(model.patch_embed, PatchEmbed)):  # a hybrid's patches come out of a network
        return None
    layers = [getattr(block, "attn", None) for block in model.blocks]
    patches = model.patch_embed.num_patches
    if not all(isinstance(layer, TimmAttention | Attention) for layer in layers):
        return None
    heads = [model.head, getattr(model, "head_dist", nn.Identity())]  # each on one token
    tokens = patches + model.num_prefix_tokens
    dim = model.embed_dim
    products = patches * model.patch_embed.proj.weight.numel()
    products += tokens * matrices(model.blocks) + sum(map(matrices, heads))
    mixing = sum(operator_flops(1, tokens, layer.num_heads, dim // layer.num_heads, keys=tokens) for layer in layers)
    return ModelCost(
        parameters=numel(model),
        attention=sum(map(numel, layers)),
        mlp=sum(numel(block.mlp) for block in model.blocks),
        bandwidths=numel(model, "log_sigma"),
        flops=2 * products + mixing,
    )


@functools.cache
def deit_cost(size: str, attention: str) -> ModelCost:
    """Cost of DeiT in a size of `registry.SIZES`. attention: a kind's name, or a pattern by layer such as GGGA."""
    return cost_of(timm.create_model(model_name(size, "gka"), attention=attention, device="meta"))


def numel(module: nn.Module, part: str = "") -> int:
    """The number of parameters of a module with `part` in their names."""
    return sum(parameter.numel() for name, parameter in module.named_parameters() if part in name)


def matrices(module: nn.Module) -> int:
    """Entries of the matrices of a module's linear layers."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


# The command


@dataclass
class AccountingConfig:
    """Print parameters, FLOPs and MiB of DeiT with every kind of attention in three sizes, as the paper counts them."""

    attention: str = ""
    """Add a row to every size for this pattern by layer: letters of the kinds, such as GGGA."""


def main(config: AccountingConfig) -> None:
    patterns = list(ATTENTION)
    if config.attention:
        check_attention(config.attention)
        patterns.append(config.attention)
    rows = [HEADINGS]
    for size in SIZES:
        base = deit_cost(size, patterns[0])
        for pattern in patterns:
            cost = deit_cost(size, pattern)
            cells = [f"{pattern} {size}", *(f"{count:,}" for count in (cost.parameters, cost.attention, cost.mlp))]
            cells += [str(cost.bandwidths or "-"), f"{cost.flops / 1e9:.4f}", f"{cost.raw_mib:.2f}"]
            if pattern != patterns[0]:
                cells += [f"{cost.parameters / base.parameters - 1:+.2%}", f"{cost.flops / base.flops - 1:+.2%}"]
            rows.append(cells)
    for cells in rows:
        print("".join(f"{cell:{width}}" for cell, width in zip(cells, WIDTHS)))


if __name__ == "__main__":
    run(main, AccountingConfig)
