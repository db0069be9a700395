"""The tokens that a forward pass computes, and those that each of them attends to.

Legend: B rows, T tokens of the pass in each, n tokens so far, H heads, D head_dim, C width.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Tensors = tuple[torch.Tensor, ...]


class AttentionLayer(Protocol):
    """What a context needs of `attention.Attention`."""

    layer: int
    is_last: bool

    def attend(self, rotary, queries: torch.Tensor, stored: Tensors) -> torch.Tensor: ...

    def attend_cached(self, rotary, queries: torch.Tensor, stored: Tensors, lengths: list[int]) -> torch.Tensor: ...


class Context:
    """B whole sequences, from their first token on. Subclasses, such as `cache.KVCache`, keep or choose tokens."""

    positions: slice | torch.Tensor  # of the tokens: a slice of T for all rows, or (B, T)
    longest: int  # one more than the last position

    def begin(self, num_tokens: int) -> None:
        """A pass over `num_tokens` tokens of every row begins."""
        self.positions, self.longest = slice(0, num_tokens), num_tokens

    def attend(self, layer: AttentionLayer, rotary, queries: torch.Tensor, new: Tensors) -> torch.Tensor:
        """Outputs of the tokens that `select` keeps, by `layer.attend`.

        queries, new: of the tokens of this pass, (B, T, H, D) each; `new` is stored for later tokens.
        """
        return layer.attend(rotary, queries, new)

    def select(self, layer: AttentionLayer, x: torch.Tensor) -> torch.Tensor:
        """The tokens of a layer's input, (B, T, C), whose outputs the layer computes."""
        return x

    def end(self) -> None:
        """All layers are done."""


def map_distinct(function: Callable[[torch.Tensor], torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """function(tensor) of each. Arguments that are one tensor (GKA's queries and keys) give one result."""
    results: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in results:
            results[id(tensor)] = function(tensor)
    return [results[id(tensor)] for tensor in tensors]
