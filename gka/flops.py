"""What torch's FLOP counter counts of the fused operators, which it cannot look into: the cost model's products.

    import gka.flops  # once, before FlopCounterMode is made; a module of its own because torch's takes long to import

Forward 2 products of queries, keys in reach and channels; backward twice that, by the same convention (gka/cost.py):
what a kernel computes again is not counted.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from gka.cost import operator_flops
from gka.impl.cpu import decoding, op
from gka.impl.triton import op as _triton  # noqa: F401  defines torch.ops.gka.attend*

Shape = tuple[int, ...]


@register_flop_formula([op.attend.overloadpacket, decoding.attend_cached.overloadpacket, torch.ops.gka.attend])
def forward_flops(x: Shape, keys: Shape | None, values: Shape | None, log_sigma: Shape, *arguments, **__) -> int:
    """Of a forward pass, from the arguments of the operators; tensors are their shapes. Padding counts as tokens,
    packed documents as one, and a sequence that is shorter than its cache as a whole one.
    """
    before, after = [argument for argument in arguments if isinstance(argument, int)][:2]
    num_keys = (keys or values or x)[1]
    in_reach = num_keys if before < 0 else min(before + 1 + max(after, 0), num_keys)
    return operator_flops(*x, keys=in_reach)


@register_flop_formula([op.attend_backward.overloadpacket, torch.ops.gka.attend_backward])
def backward_flops(grad_y: Shape, x: Shape, *arguments, **__) -> int:
    """Of a backward pass; saved tensors stand between the tensors and the limits of the forward pass."""
    return 2 * forward_flops(x, *arguments)
