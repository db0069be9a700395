"""What attention keeps of past tokens while text is generated.

One tensor per layer for GKA, whose features are keys and values at once, two for softmax attention: at equal heads
half the bytes. Of our forms whose values are not rotated the one tensor is the values, and keys are computed from them
again for every token; `keep_keys` saves that time for the other half of the bytes.
Legend: B rows (sequences), T new tokens, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanochat_gka.model.gpt import GPT

Tensors = tuple[torch.Tensor, ...]
KEYS_ARE_STORED = "this model's cache holds its keys in any case"


@dataclass
class KVCache:
    """Per layer, tensors of shape (rows, capacity, H, D). `lengths` are the tokens of each row in use; rows may differ.

    `model(ids, cache=cache)` runs T new tokens of every row in use behind what the row has, without padding or masks: rows of equal length that
    lie side by side share one call of the operator.
    """

    layers: list[Tensors]
    lengths: list[int]

    @classmethod
    def empty(cls, model: GPT, rows: int, capacity: int, in_use: int | None = None, keep_keys: bool = False) -> KVCache:
        """Room for `rows` sequences of at most `capacity` tokens in the dtype of the model's activations.

        in_use: rows to begin with, None = all. keep_keys: a second tensor in GKA layers whose keys would have to be
        derived; ValueError if there are none.
        """
        if keep_keys and not model.derives_keys:
            raise ValueError(f"keep_keys is for gka layers whose values are not rotated, and {KEYS_ARE_STORED}")
        shape, table = (rows, capacity, model.config.n_head, model.config.head_dim), model.transformer.wte.weight
        counts = [block.attn.cached_tensors + (keep_keys and block.attn.derives_keys) for block in model.transformer.h]
        return cls(
            [
                tuple(torch.empty(shape, dtype=table.dtype, device=table.device) for _ in range(count))
                for count in counts
            ],
            [0] * (rows if in_use is None else in_use),
        )

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def begin(self, new_tokens: int, wanted: torch.Tensor | None = None) -> Pass:
        """Where a forward pass over `new_tokens` tokens of every row in use reads and writes. Raises ValueError if a row outgrows the capacity.

        wanted: with a single row in use, which of the new tokens' outputs are needed, (n,); None = all.
        """
        if max(self.lengths) + new_tokens > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row, got {max(self.lengths) + new_tokens}")
        groups, first = [], 0
        for row, length in enumerate(self.lengths):
            if row + 1 == len(self.lengths) or self.lengths[row + 1] != length:
                groups.append((slice(first, row + 1), length))
                first = row + 1
        if len(groups) == 1:
            return Pass(self, new_tokens, groups, slice(self.lengths[0], self.lengths[0] + new_tokens), wanted)
        start = torch.tensor(self.lengths, device=self.device)
        return Pass(self, new_tokens, groups, start[:, None] + torch.arange(new_tokens, device=self.device))

    def take(self, source: KVCache) -> None:
        """Put the only row of `source` into the next free row."""
        row, [length] = len(self.lengths), source.lengths
        self._copy(source, 0, row, length)
        self.lengths.append(length)

    def drop(self, row: int) -> None:
        """Free `row`; the last row in use moves into its place."""
        last = len(self.lengths) - 1
        if row != last:
            self._copy(self, last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def _copy(self, source: KVCache, from_row: int, to_row: int, length: int) -> None:
        for layer, theirs in zip(self.layers, source.layers):
            for tensor, other in zip(layer, theirs):
                tensor[to_row, :length] = other[from_row, :length]


@dataclass(frozen=True)
class Pass:
    """One forward pass through a cache; an `attention.Past`. positions: of the new tokens, a slice if all rows are equally long, else (B, T)."""

    cache: KVCache
    new_tokens: int
    groups: list[tuple[slice, int]]  # rows, and how many tokens each of them had
    positions: slice | torch.Tensor
    wanted: torch.Tensor | None = None

    @property
    def longest(self) -> int:
        return max(self.cache.lengths) + self.new_tokens

    def split(
        self, layer: int, queries: torch.Tensor, new: Tensors, wanted_only: bool = False
    ) -> Iterator[tuple[torch.Tensor, Tensors, torch.Tensor | None]]:
        """Store the (B, T, H, D) tensors of the new tokens; then, for every group of rows, yield its queries and what is stored so far, (b, n, H, D)."""
        stored, count = self.cache.layers[layer], len(self.cache.lengths)
        for tensor, fresh in zip(stored, [*new, queries]):  # the queries too if there is room: GKA's are keys
            if isinstance(self.positions, slice):
                tensor[:count, self.positions] = fresh
            else:
                tensor[torch.arange(count, device=tensor.device)[:, None], self.positions] = fresh
        for rows, length in self.groups:
            some, so_far = queries[rows], tuple(tensor[rows, : length + self.new_tokens] for tensor in stored)
            yield some, so_far[: len(new)], some if length == 0 else so_far[-1] if len(so_far) > len(new) else None

    def join(self, mixed: list[torch.Tensor], wanted_only: bool = False) -> torch.Tensor:
        """The groups' (b, T, H, D) outputs as one (B, T, H, D), or the wanted tokens', (1, n, H, D)."""
        joined = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return joined[:, self.wanted] if wanted_only else joined

    def end(self) -> None:
        """All layers are done: count the new tokens."""
        self.cache.lengths = [length + self.new_tokens for length in self.cache.lengths]
