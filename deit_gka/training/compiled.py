"""A model as it is trained when its blocks are compiled one by one: one program for all blocks that are alike."""

import torch
from timm.layers import DropPath
from torch import nn

from trainkit_gka.compiling import compile_blocks, twin


class StochasticDepth(nn.Module):
    """timm's DropPath with its probability in a buffer, so that torch.compile makes one program for every rate.

    In training every sample of x (B, ...) is kept with the probability 1 - rate, divided by it, and is 0 otherwise.
    """

    def __init__(self, rate: float, device: torch.device | None = None):
        super().__init__()
        self.register_buffer("keep", torch.tensor(1 - rate, device=device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x as in timm's, in any dtype: the factor of a sample is rounded to x's."""
        if not self.training:
            return x
        draws = torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device)
        return x * ((draws < self.keep) / self.keep).to(x.dtype)


def has_blocks(model: nn.Module) -> bool:
    """Whether a timm model has its blocks in one list, as vision transformers do."""
    return isinstance(getattr(model, "blocks", None), (nn.ModuleList, nn.Sequential))


def compiled_by_blocks(model: nn.Module) -> nn.Module:
    """A twin of `model` in training mode, with the same parameters, whose blocks are compiled one by one."""
    network = twin(model).train()
    blocks = network.blocks
    # Ours in the place of timm's DropPath, also in blocks of rate 0, where timm has Identity
    names = {name for block in blocks for name, layer in block.named_modules() if isinstance(layer, DropPath)}
    device = next(blocks.parameters()).device
    for block in blocks:
        for name, layer in list(block.named_modules()):
            if name in names and isinstance(layer, (DropPath, nn.Identity)):
                block.set_submodule(name, StochasticDepth(getattr(layer, "drop_prob", 0.0), device))
    compile_blocks(blocks)
    return network
