"""timm's blocks with our attention: a kind for every layer, each with its own settings.

timm builds a block with a place in it, and the layer is then assigned: `block.attn = GKA(dim, num_heads)`. A block that
timm makes of other parts (two layers side by side) has several places; one that makes its own attention has none.
"""

from typing import Any

from timm.models.vision_transformer import Block
from torch import nn

from deit_gka.model.attention import ATTENTION
from gka import layer_kinds


class Place(nn.Identity):
    """Where a block's attention goes. It keeps the arguments that timm would build the attention with."""

    def __init__(self, dim: int, **arguments):
        super().__init__()
        self.arguments = dict(dim=dim, **arguments)


def block_of(
    pattern: str,
    settings: dict[str, Any],
    timms_block: type[nn.Module] = Block,
    *,
    depth: int,
    norm_weight: bool = True,
    **arguments,
) -> nn.Module:
    """The block of layer `depth`, from 0, with the attention that `pattern` has there.

    settings: as `check_settings` takes them; a layer takes those of its kind. norm_weight: False leaves the norm before
    attention without weight and bias; GKA's distances then count all channels alike. arguments: timm's.
    Raises ValueError for a block of timm's whose attention cannot be chosen.
    """
    kind = ATTENTION[layer_kinds(pattern, depth + 1)[depth]]
    own = {name: value for name, value in settings.items() if name in kind.SETTINGS}
    block = timms_block(**arguments | dict(attn_layer=Place, depth=depth))
    parents = [module for module in block.modules() if isinstance(getattr(module, "attn", None), Place)]
    if not parents:
        name = type(block).__name__
        raise ValueError(f"{name} has an attention of its own, attn_layer={pattern!r} changes nothing")
    for parent in parents:
        parent.attn = kind(**parent.attn.arguments, **own)
    if not norm_weight:
        block.norm1 = nn.LayerNorm(arguments["dim"], eps=block.norm1.eps, elementwise_affine=False)
    return block


def check_settings(pattern: str, settings: dict[str, Any]) -> None:
    """Raises ValueError for a pattern that `gka.layer_kinds` refuses, and for a setting that no kind in it has.

    settings: arguments of the attention classes that are among their SETTINGS.
    """
    kinds = sorted(set(layer_kinds(pattern, len(pattern))))
    for name in settings:
        if not any(name in ATTENTION[kind].SETTINGS for kind in kinds):
            raise ValueError(f"{name} is not a setting of {' or '.join(kinds)} attention")
