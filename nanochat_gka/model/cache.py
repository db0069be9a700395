"""The cache of past tokens while text is generated; `GPT.new_cache` makes one.

One tensor per layer for GKA, whose features are keys and values at once, two for softmax attention: at equal heads
half the bytes. Where values are not rotated the one tensor is the values, and keys are derived from them for every new
token, on CPUs in registers; `keep_keys` stores both.
Legend: B rows (sequences) in use, T new tokens of each, H heads, D head_dim.
"""

import torch

from nanochat_gka.model.context import Context, Tensors


class KVCache(Context):
    """The context of `model(ids, context=cache)`: T new tokens of every row in use; rows may differ in length.

    layers: per layer, tensors (rows, capacity, H, D). lengths: tokens of each row in use. last_only: the model returns
    the logits of each row's last token alone.
    """

    def __init__(self, layers: list[Tensors], rows_in_use: int, last_only: bool = False):
        self.layers, self.lengths, self.last_only = layers, [0] * rows_in_use, last_only

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def begin(self, num_tokens):
        """Raises ValueError if a row outgrows the capacity."""
        self.longest, self.new_tokens = max(self.lengths, default=0) + num_tokens, num_tokens
        if self.longest > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens a row, got {self.longest}")
        if len(set(self.lengths)) <= 1:  # none where no row is in use
            self.positions = slice(self.longest - num_tokens, self.longest)
            self.places = (slice(0, len(self.lengths)), self.positions)
        else:
            device = self.layers[0][0].device
            start = torch.tensor(self.lengths, device=device)[:, None]
            self.positions = start + torch.arange(num_tokens, device=device)
            self.places = (torch.arange(len(self.lengths), device=device)[:, None], self.positions)

    def attend(self, layer, rotary, queries, new):
        stored = self.layers[layer.layer]
        for tensor, new_entries in zip(stored, new):
            tensor[self.places] = new_entries
        if self.last_only and layer.is_last:
            queries = queries[:, -1:]
        if not any(self.lengths):  # `new` may hold more than is stored
            return layer.attend(rotary, queries, new)
        in_use = tuple(tensor[: len(self.lengths)] for tensor in stored)
        return layer.attend_cached(rotary, queries, in_use, [length + self.new_tokens for length in self.lengths])

    def select(self, layer, x):
        return x[:, -1:] if self.last_only and layer.is_last else x

    def end(self):
        self.lengths = [length + self.new_tokens for length in self.lengths]

    def take(self, source: "KVCache") -> None:
        """Put the only row of `source` into the next free row."""
        [length] = source.lengths
        self._copy(source, 0, len(self.lengths), length)
        self.lengths.append(length)

    def drop(self, row: int) -> None:
        """Free `row`; the last row in use moves into its place."""
        last = len(self.lengths) - 1
        if row != last:
            self._copy(self, last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def _copy(self, source: "KVCache", from_row: int, to_row: int, length: int) -> None:
        for to_layer, from_layer in zip(self.layers, source.layers):
            for to_tensor, from_tensor in zip(to_layer, from_layer):
                to_tensor[to_row, :length] = from_tensor[from_row, :length]
