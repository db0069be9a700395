"""Prompts that begin alike, run as the tree they are: what prompts have in common is computed once.

A token is computed once for all prompts that have it and everything before it in common. Outside attention a layer
treats every token alone, so there the tokens of the tree are one long row without padding. For attention they are
copied out to one row per prompt, padded on the right, where an ordinary causal mask is right. A token's output depends
only on what precedes it, so it does not matter which prompt it is taken from.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from nanochat_gka.model.context import Context, map_distinct


class PromptTree(Context):
    """The context of `model.hidden(tree.ids, tree)`. Legend: N tokens of the tree, R prompts, L tokens of the longest.

    groups: how many of the prompts belong together, in order. The first tokens, as many as the prompts of every group
      share, are mixed once for each group.
    starts: per prompt, the first token that is judged. The model computes outputs of the tokens that predict judged
      ones: of each prompt those from start - 1 to the last but one.
    share: False computes every prompt by itself.

    ids: (1, N). nodes: per prompt, the places of its tokens in the tree. predictors: places of the tokens that predict
    judged ones, (n,). copies: nodes, padded, (R, L). first_query: where the last layer's queries begin in the copies.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        starts: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        share: bool = True,
    ):
        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        ids, positions, self.nodes = _grow(prompts, share)
        self.ids, self.positions, self.longest = tensor(ids)[None], tensor(positions)[None], max(map(len, prompts))
        # To the right of a prompt any token will do: nothing in the prompt looks there.
        copies = np.zeros((len(prompts), self.longest), dtype=np.int64)
        for row, nodes in enumerate(self.nodes):
            copies[row, : len(nodes)] = nodes
        firsts = np.cumsum([0, *groups[:-1]])
        shared = min(_shared(self.nodes[first : first + size]) for first, size in zip(firsts, groups)) if share else 0
        self.shared = min(shared, self.longest - 1)  # so that something follows
        ends, beginnings = copies[:, self.shared :], copies[firsts, : self.shared]
        # Where each token is among the outputs of the groups' beginnings, followed by those of the prompts' ends.
        output_of_node = np.empty(len(ids), dtype=np.int64)
        numbers = np.arange(beginnings.size, beginnings.size + ends.size).reshape(ends.shape)
        for row, nodes in enumerate(self.nodes):
            output_of_node[nodes[self.shared :]] = numbers[row, : len(nodes) - self.shared]
        output_of_node[beginnings.ravel()] = np.arange(beginnings.size)
        # The same for the predictors and the last layer, which has no queries before the first of them.
        self.first_query = min(starts) - 1
        width = self.longest - self.first_query
        output_of_predictor, predictors = [], []
        for row, (nodes, start) in enumerate(zip(self.nodes, starts)):
            output_of_predictor.append(row * width - self.first_query + np.arange(start - 1, len(nodes) - 1))
            predictors.append(nodes[start - 1 : -1])
        self.copies, self.beginnings, self.output_of_node = tensor(copies), tensor(beginnings), tensor(output_of_node)
        self.output_of_predictor = tensor(np.concatenate(output_of_predictor))
        self.predictors = tensor(np.concatenate(predictors))

    def begin(self, num_tokens):
        """The positions are those of the tree."""

    def attend(self, layer, rotary, queries, new):
        """Copy the (1, N, H, D) tensors out to the groups' beginnings and to all prompts, and attend there."""
        if layer.is_last:
            parts, outputs = [(self.copies, self.first_query)], self.output_of_predictor
        else:
            parts, outputs = [(self.copies, self.shared)], self.output_of_node
            if self.shared:
                parts.insert(0, (self.beginnings, 0))
        mixed = []
        for nodes, first_query in parts:
            copied, *stored = map_distinct(partial(_copy_out, nodes=nodes), queries, *new)
            copied = copied[:, first_query:] if first_query else copied
            mixed.append(layer.attend(rotary, copied, tuple(stored)).flatten(0, 1))
        return _rows(torch.cat(mixed), outputs)[None]

    def select(self, layer, x):
        return x[:, self.predictors] if layer.is_last else x


def _grow(prompts: Sequence[Sequence[int]], share: bool) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The tree's tokens and their positions, (N,) each, and for every prompt the places of its tokens."""
    rows = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
    nodes, ids, positions, count, before = list(rows), [], [], 0, None
    for row in sorted(range(len(rows)), key=lambda row: prompts[row]) if share else range(len(rows)):
        common = _common(rows[before], rows[row]) if share and before is not None else 0
        ids.append(rows[row][common:])
        positions.append(np.arange(common, len(rows[row])))
        fresh = np.arange(count, count + len(rows[row]) - common)
        nodes[row] = np.concatenate([nodes[before][:common], fresh]) if common else fresh
        count, before = count + len(fresh), row
    return np.concatenate(ids), np.concatenate(positions), nodes


def _rows(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """tensor[places]. On a CPU index_select copies whole rows, five times as fast as indexing does."""
    return tensor.index_select(0, places.flatten()).unflatten(0, places.shape)


def _copy_out(tensor: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """(1, N, H, D) to one row per row of `nodes`."""
    return _rows(tensor[0], nodes)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens at the beginning that both have."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _shared(nodes: Sequence[np.ndarray]) -> int:
    """Number of tokens at the beginning that all prompts of a group have; 0 for a single prompt."""
    return 0 if len(nodes) == 1 else min(_common(nodes[0], other) for other in nodes[1:])
