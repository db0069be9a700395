"""What the controls say: the layer and head to show, the bandwidths to scale, and a model that has them scaled."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

EVERYWHERE, _, HEAD = WHERE = ("all layers and heads", "this layer", "this layer and head")
MEAN = "mean of the heads"
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Scaling:
    """The factor by which σ is multiplied, and where. layer, head: from 0; None means all."""

    factor: float = 1.0
    layer: int | None = None
    head: int | None = None


def read_controls(layer: float, head: str, power: float, where: str) -> tuple[int, int | None, Scaling]:
    """The layer and head to show, from 0, or None for the mean of the heads, and what is scaled."""
    number, one = int(layer) - 1, None if head == MEAN else int(head.split()[-1]) - 1
    if not power:
        return number, one, Scaling()
    return number, one, Scaling(2.0**power, None if where == EVERYWHERE else number, one if where == HEAD else None)


def scaled(model: Model, attentions: Iterable[nn.Module], scaling: Scaling) -> Model:
    """A model that shares all weights with `model`, which stays as it is, except for the bandwidths that are scaled.

    It has hooks of its own too, so that requests that run at the same time do not meet.
    attentions: those of the model's layers, in order; layers without `log_sigma` stay as they are.
    """
    copies: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    changed = copy.deepcopy(model, copies)
    for number, attention in enumerate(attentions):
        if hasattr(attention, "log_sigma") and scaling.layer in (None, number):
            log_sigma = attention.log_sigma.detach().clone()
            log_sigma[slice(None) if scaling.head is None else scaling.head] += math.log(scaling.factor)
            copies[id(attention)].log_sigma = nn.Parameter(log_sigma, requires_grad=False)
    return changed


def before_and_after(scaling: Scaling, compute: Callable[[Scaling], Any]) -> dict[str, Any]:
    """What is computed with the bandwidths as they are and, if they are scaled, with those; by a heading."""
    results = {"as it is": compute(Scaling())}
    if scaling.factor != 1:
        results[f"σ × {scaling.factor:.3g}"] = compute(scaling)
    return results


def sigma_in_words(layer, head: int | None) -> str:
    """σ of a head, or the mean over heads. layer: LayerMaps of a vision or a language model."""
    if layer.sigma is None:
        return "This layer has no σ."
    if head is None:
        return f"σ = {layer.sigma.mean():.3g} (mean over heads)."
    return f"σ = {layer.sigma[head]:.3g}."
