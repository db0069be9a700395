"""Prompts that begin alike, run as the tree they are: a token is computed once for all prompts that have it and everything before it in common.

Outside attention a layer treats every token alone, so there the tokens of the tree are one long row without padding. For attention they are copied out
to one row per prompt, padded on the right, where an ordinary causal mask is right. A token's output depends only on what precedes it, so which prompt it
is taken from makes no difference.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nanochat_gka.model.attention import Tensors


class SharedPrompts:
    """An `attention.Past` for `model.hidden(tree.ids, tree)`. Legend: N tokens of the tree, R prompts, L tokens of the longest.

    groups: how many of the prompts belong together, in order; the first tokens, as many as the prompts of every group share, are mixed once for each.
    starts: per prompt, the first token that is judged; wanted are the tokens that predict the judged ones, from start - 1 to the last but one.
    ids: (1, N). node: per prompt, the places of its tokens in the tree. share=False computes every prompt by itself.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        share: bool = True,
    ):
        rows = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
        order = sorted(range(len(rows)), key=lambda row: prompts[row]) if share else range(len(rows))
        nodes = self.node = list(rows)
        fresh_ids, positions, count, before = [], [], 0, None
        for row in order:
            common = _common(rows[before], rows[row]) if share and before is not None else 0
            fresh_ids.append(rows[row][common:])
            positions.append(np.arange(common, len(rows[row])))
            fresh = np.arange(count, count + len(rows[row]) - common)
            nodes[row] = np.concatenate([nodes[before][:common], fresh]) if common else fresh
            count, before = count + len(fresh), row
        self.longest = max(map(len, rows))
        # To the right of a prompt any token will do: nothing in it looks there.
        copies = np.zeros((len(rows), self.longest), dtype=np.int64)
        for row, node in enumerate(nodes):
            copies[row, : len(node)] = node
        firsts = np.cumsum([0, *groups[:-1]])
        shared = min(_shared(nodes[first : first + size]) for first, size in zip(firsts, groups)) if share else 0
        self.shared = min(shared, self.longest - 1)  # so that something follows
        # Where in the outputs, the groups' beginnings and then the prompts' ends, each token is found.
        where = np.empty(count, dtype=np.int64)
        ends, begun = copies[:, self.shared :], copies[firsts, : self.shared]
        numbers = np.arange(begun.size, begun.size + ends.size).reshape(ends.shape)
        for row, node in enumerate(nodes):
            where[node[self.shared :]] = numbers[row, : len(node) - self.shared]
        where[begun.ravel()] = np.arange(begun.size)
        # The last layer needs no queries before the first wanted token.
        self.first = min(starts) - 1
        width = self.longest - self.first
        where_wanted = [
            row * width - self.first + np.arange(start - 1, len(node) - 1)
            for row, (node, start) in enumerate(zip(nodes, starts))
        ]
        wanted = [node[start - 1 : -1] for node, start in zip(nodes, starts)]
        self.ids, self.positions = (
            torch.from_numpy(np.concatenate(parts)).to(device)[None] for parts in (fresh_ids, positions)
        )
        self.wanted, self.where_wanted = (
            torch.from_numpy(np.concatenate(parts)).to(device) for parts in (wanted, where_wanted)
        )
        self.copies, self.begun, self.where = (torch.from_numpy(array).to(device) for array in (copies, begun, where))

    def split(
        self, layer: int, queries: torch.Tensor, new: Tensors, wanted_only: bool = False
    ) -> Iterator[tuple[torch.Tensor, Tensors, torch.Tensor | None]]:
        """The (1, N, H, D) tensors copied out: of the groups' beginnings, then of all prompts with the queries of what follows these."""
        parts = (
            [(self.copies, self.first)]
            if wanted_only
            else [(self.begun, 0)] * (self.shared > 0) + [(self.copies, self.shared)]
        )
        for known, first in parts:
            all_queries = _rows(queries[0], known)
            stored = tuple(all_queries if tensor is queries else _rows(tensor[0], known) for tensor in new)
            yield all_queries[:, first:] if first else all_queries, stored, all_queries

    def join(self, mixed: list[torch.Tensor], wanted_only: bool = False) -> torch.Tensor:
        """The outputs as (1, N, H, D), or (1, n, H, D) of the wanted tokens."""
        return _rows(
            torch.cat([part.flatten(0, 1) for part in mixed]), self.where_wanted if wanted_only else self.where
        )[None]

    def end(self) -> None:
        """Nothing is kept."""


def _rows(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """tensor[places]: on a CPU index_select copies whole rows, five times as fast as indexing does."""
    return tensor.index_select(0, places.flatten()).unflatten(0, places.shape)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens at the beginning that both have."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _shared(nodes: Sequence[np.ndarray]) -> int:
    """Number of tokens at the beginning that all prompts of a group have; 0 for a single prompt, which shares with nobody."""
    return 0 if len(nodes) == 1 else min(_common(nodes[0], other) for other in nodes[1:])
