"""The tokens that a forward pass computes, and those that each of them attends to.

Legend: B rows, T tokens of the pass in each, n tokens so far, H heads, D head_dim, C width.
"""

from collections.abc import Callable

import torch

Tensors = tuple[torch.Tensor, ...]


class Context:
    """B whole sequences, from their first token on. Subclasses, such as `cache.KVCache`, keep or choose tokens."""

    positions: slice | torch.Tensor  # of the tokens: a slice of T for all rows, or (B, T)
    longest: int  # one more than the last position

    def begin(self, num_tokens: int) -> None:
        """A pass over `num_tokens` tokens of every row begins."""
        self.positions, self.longest = slice(0, num_tokens), num_tokens

    def attend(self, layer, rotary, queries: torch.Tensor, new: Tensors) -> torch.Tensor:
        """Outputs of the tokens that `select` keeps, by `layer.attend`.

        layer: an `attention.Attention`. queries, new: of the tokens of this pass, (B, T, H, D) each; `new` is stored
        for later tokens.
        """
        return layer.attend(rotary, queries, new)

    def select(self, layer, x: torch.Tensor) -> torch.Tensor:
        """The tokens of a layer's input, (B, T, C), whose outputs the layer computes."""
        return x

    def end(self) -> None:
        """All layers are done."""


class PackedRows(Context):
    """B whole rows of several documents, whose tokens see those of their own document only.

    A document begins at each token `first` and at each row's first; its positions are counted from there. cu_seqlens:
    where the documents of all rows, one after another, begin and end, (B (T + 1),) int32. Its size is that of most
    documents, so that another number of them is no other program: the last ones of a row have no tokens. of_rows: the
    same for every row alone, (B, T + 1). starts: where the document of every token begins, (B T,).
    """

    def __init__(self, ids: torch.Tensor, first: int):
        rows, length = ids.shape
        places = torch.arange(length + 1, dtype=torch.int32, device=ids.device)
        is_first = (ids == first) | (places[:-1] == 0)
        document = is_first.cumsum(1, dtype=torch.int32)  # of every token, from 1 on
        self.of_rows = torch.searchsorted(document, (places + 1).expand(rows, -1).contiguous(), out_int32=True)
        row_starts = length * torch.arange(rows, dtype=torch.int32, device=ids.device)[:, None]
        starts = self.of_rows.gather(1, document.long() - 1)
        self.cu_seqlens, self.starts = (self.of_rows + row_starts).flatten(), (starts + row_starts).flatten()
        self.positions, self.longest = places[:-1] - starts, length

    def begin(self, num_tokens):
        """The positions are those in the documents."""

    def attend(self, layer, rotary, queries, new):
        joined, *stored = map_distinct(lambda tensor: tensor.flatten(0, 1)[None], queries, *new)
        return layer.attend(rotary, joined, tuple(stored), self).view_as(queries)


def map_distinct(function: Callable[[torch.Tensor], torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """function(tensor) of each. Arguments that are one tensor (GKA's queries and keys) give one result."""
    results: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in results:
            results[id(tensor)] = function(tensor)
    return [results[id(tensor)] for tensor in tensors]
