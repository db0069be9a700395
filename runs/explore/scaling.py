"""A model with scaled bandwidths: a second structure around the same weights, for one request."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Scaling:
    """The factor by which σ is multiplied, and where. layer, head: from 0; None means all."""

    factor: float = 1.0
    layer: int | None = None
    head: int | None = None


def scaled(model: Model, attention_layers: Callable[[Model], Iterable[nn.Module]], scaling: Scaling) -> Model:
    """A model that shares all weights with `model`, which stays as it is, except for the bandwidths that are scaled.

    It has hooks of its own too, so that requests that run at the same time do not meet.
    attention_layers: gives the attention of every layer, in order; layers without `log_sigma` stay as they are.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    changed = copy.deepcopy(model, shared)
    for number, attention in enumerate(attention_layers(changed)):
        if hasattr(attention, "log_sigma") and scaling.layer in (None, number):
            log_sigma = attention.log_sigma.detach().clone()
            log_sigma[slice(None) if scaling.head is None else scaling.head] += math.log(scaling.factor)
            attention.log_sigma = nn.Parameter(log_sigma, requires_grad=False)
    return changed
