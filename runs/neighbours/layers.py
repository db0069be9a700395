"""All methods of the comparison in the paper's order, ours among them, as layers (B, N, C) -> (B, N, C)."""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from deit_gka.model.attention import ATTENTION
from gka import KINDS, attention_cost
from runs.neighbours.methods import METHODS, About, MixingLayer
from trainkit_gka.cli import UserError

DIM, HEADS = 192, 3  # DeiT-Ti's
LABELS = {"softmax": "Standard Attention", "gka": "GKA", "vlt": "VLT"}  # VLT is the paper's ablation, not in Table 1
OURS = {name: About(label, KINDS[name].input_projections, True, "N² D") for name, label in LABELS.items()}
BUILT = {name: method.about for name, method in METHODS.items()}
ABOUT: dict[str, About] = {"softmax": OURS["softmax"], **BUILT, "gka": OURS["gka"], "vlt": OURS["vlt"]}


def check_names(names: list[str]) -> list[str]:
    """The names, in the table's order; all of them if none is given. Raises UserError for another name."""
    for name in names:
        if name not in ABOUT:
            raise UserError(f"--methods must be of {', '.join(ABOUT)}; got {name}")
    return [name for name in ABOUT if not names or name in names]


def layer(name: str, tokens: int, causal: bool = False) -> nn.Module:
    """A freshly initialised layer for sequences of `tokens`; ours take `is_causal` when they are called."""
    if name in OURS:
        return ATTENTION[name](DIM, num_heads=HEADS, qkv_bias=True)
    return MixingLayer(METHODS[name](HEADS, DIM // HEADS, tokens, causal=causal))


def cost(name: str, tokens: int) -> dict[str, int]:
    """Parameters of a layer; FLOPs of one sequence, forward: of matrix products, as torch counts them, and others."""
    if name in OURS:
        known = attention_cost(name, DIM, HEADS, tokens, value_bias=True)
        return {"parameters": known.parameters, "flops": known.flops, "other_flops": 0}
    with torch.device("meta"), torch.no_grad():  # nothing is computed
        built = layer(name, tokens)
        with FlopCounterMode(display=False) as counter:
            built(torch.empty(1, tokens, DIM))
    flops = counter.get_total_flops()
    if name == "non-local-means":  # its operator is ours, with one head
        flops = attention_cost("gka", DIM, 1, tokens).flops
    parameters = sum(parameter.numel() for parameter in built.parameters())
    return {"parameters": parameters, "flops": flops, "other_flops": built.mixing.other_flops(tokens)}


def by_equation(built: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy of a layer that builds every weight as the equation has it."""
    copied = copy.deepcopy(built).to(dtype)
    if isinstance(copied, MixingLayer):
        copied.mixing.forward = copied.mixing.exact
    else:
        copied.fused_attn = False
    return copied
