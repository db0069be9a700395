"""What the tokens of transformers' batches attend to: rows padded on the left, and past tokens in its caches.

Legend: B rows, T tokens of the pass in each, n tokens so far, padding included, H heads, D head_dim.
"""

from itertools import groupby

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from nanochat_gka.model.context import Context, Tensors, map_distinct

LAYERS = (DynamicLayer, StaticLayer)  # these and no subclass: others cut, quantise or compress what they are given


class PaddedBatch(Context):
    """The context of `model(ids, context=batch)`, ids (B, T), for one pass.

    cache: a transformers cache that holds the past, or None. mask: (B, n), 0 for padding; None without. positions:
    (1 or B, T), what the caller takes positions to be, which is checked. keep: how many last tokens of each row the
    model returns; 0 for all.
    A layer that stores one tensor (GKA) keeps it as a cache's keys, beside values of no width: half the bytes.
    """

    def __init__(
        self, cache: Cache | None, mask: torch.Tensor | None, positions: torch.Tensor | None = None, keep: int = 0
    ):
        self.cache, self.mask, self.stated, self.keep = cache, mask, positions, keep
        for layer in cache.layers if cache is not None else ():
            if type(layer) not in LAYERS:
                usable = "DynamicCache (the default), StaticCache and their offloaded kinds hold what this model stores"
                raise ValueError(f"{usable}, got a cache with a {type(layer).__name__}")

    def begin(self, num_tokens):
        """Raises ValueError for a mask or positions that rows padded on one side cannot have, or for a full cache."""
        self.seen = int(self.cache.get_seq_length()) if self.cache is not None else 0
        self.total = self.seen + num_tokens
        room = self.cache.get_max_length() if self.cache is not None and self.cache.layers else -1
        if 0 < room < self.total:
            raise ValueError(f"the cache holds {room} tokens a row, got {self.total}")
        pads = padding(self.mask, self.total)
        self.longest = self.total - min(pads, default=0)
        if any(pads):
            device, every = self.mask.device, torch.arange(self.seen, self.total, device=self.mask.device)
            self.positions = (every - torch.tensor(pads, device=device)[:, None]).clamp(min=0)
        else:
            self.positions = slice(self.seen, self.total)
        self._check_positions()
        self.groups, first = [], 0  # neighbours with as much padding, and how much that is
        for pad, members in groupby(pads):
            rows = slice(first, first + len(list(members)))
            self.groups.append((rows, pad))
            first = rows.stop
        self.groups = self.groups or [(slice(None), 0)]

    def attend(self, layer, rotary, queries, new):
        stored = self._store(layer, new)
        if self.keep and layer.is_last:
            queries = queries[:, -self.keep :]
        mixed = []
        for rows, pad in self.groups:
            tokens = min(new[0].shape[1], self.total - pad)  # of this pass that are not padding
            if tokens <= 0:
                mixed.append(torch.zeros_like(queries[rows]))
                continue
            wanted, *visible = map_distinct(lambda t, rows=rows, tokens=tokens: t[rows, -tokens:], queries, *new)
            if self.seen > pad:
                visible = [tensor[rows, pad : self.total] for tensor in stored]
            out = layer.attend(rotary, wanted, tuple(visible))
            mixed.append(F.pad(out, (0, 0, 0, 0, queries.shape[1] - out.shape[1], 0)))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def select(self, layer, x):
        return x[:, -self.keep :] if self.keep and layer.is_last else x

    def _store(self, layer, new: Tensors) -> Tensors:
        """Put what a layer must keep of the new tokens into the cache; returns what it holds, (B, n or more, H, D)."""
        if self.cache is None:
            return new
        tensors = [tensor.transpose(1, 2) for tensor in new[: layer.cached_tensors]]
        if len(tensors) > 2:
            raise ValueError(f"a transformers cache has two tensors a layer, layer {layer.layer} stores {len(tensors)}")
        values = tensors[1] if len(tensors) == 2 else tensors[0][..., :0]
        content = self.cache.update(tensors[0], values, layer.layer)
        return tuple(tensor.transpose(1, 2) for tensor in content[: len(tensors)])

    def _check_positions(self) -> None:
        if self.stated is None:
            return
        ours = self.positions
        if isinstance(ours, slice):
            ours = torch.arange(ours.start, ours.stop, device=self.stated.device)
        real = self.mask is None or self.mask[:, self.seen : self.total] != 0  # padding may have any position
        if bool(((self.stated != ours) & real).any()):
            advice = "rows that hold several documents are not supported: give each document a row"
            raise ValueError(f"position_ids must count the tokens of each row from its first one ({advice})")


def padding(mask: torch.Tensor | None, total: int) -> list[int]:
    """Columns of padding on the left of each row of a mask, (B, total); [] without a mask.

    Padding on the right needs nothing: no token attends to later ones. Raises ValueError for any other mask.
    """
    if mask is None:
        return []
    if mask.ndim != 2 or mask.shape[1] != total:
        raise ValueError(f"attention_mask must be (rows, {total}), past tokens included, got {tuple(mask.shape)}")
    real = (mask != 0).int()
    starts = (F.pad(real, (1, 0)).diff(dim=1) == 1).sum(1)
    if bool((starts > 1).any()):
        raise ValueError("attention_mask must not hide tokens between others: pad on the left (padding_side='left')")
    return torch.where(starts == 0, total, real.argmax(dim=1)).tolist()
