"""Prompts that begin alike, run as the tree they are: what prompts have in common is computed once.

A token is computed once for all prompts that have it and everything before it in common. Outside attention the tokens
of the tree are one long row without padding. For attention they are copied out to one row per prompt, padded on the
right, where a causal mask is right. A token's output depends only on what precedes it, so any prompt's copy will do.
"""

from collections.abc import Sequence

import numpy as np
import torch

from nanochat_gka.model.context import Context, map_distinct


class PromptTree(Context):
    """The context of `model.hidden(tree.ids, tree)`. Legend: N tokens of the tree, R prompts, L tokens of the longest.

    groups: how many of the prompts belong together, in order. The first tokens, as many as the prompts of every group
    share, are mixed once for each group. starts: per prompt, the first token that is judged.

    ids: (1, N). nodes: per prompt, the places of its tokens in the tree. predictors: places of the tokens that predict
    judged ones, (n,). copies: nodes, padded, (R, L). first_query: where the last layer's queries begin in the copies.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int], groups: Sequence[int], device: torch.device
    ):
        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        ids, positions, self.nodes = _grow(prompts)
        self.ids, self.positions, self.longest = tensor(ids)[None], tensor(positions)[None], max(map(len, prompts))
        columns = np.arange(self.longest)
        lengths = np.array([len(nodes) for nodes in self.nodes])[:, None]
        inside = columns < lengths
        # To the right of a prompt any token will do: nothing in the prompt looks there.
        copies = np.zeros(inside.shape, dtype=np.int64)
        copies[inside] = np.concatenate(self.nodes)
        firsts = np.cumsum([0, *groups[:-1]])
        shared = min(_shared(self.nodes[first : first + size]) for first, size in zip(firsts, groups))
        self.shared = min(shared, self.longest - 1)  # so that something follows
        # Where each token is among the outputs of the groups' beginnings, followed by those of the prompts' ends.
        beginnings = copies[firsts, : self.shared]
        is_end = inside[:, self.shared :]
        output_of_node = np.empty(len(ids), dtype=np.int64)
        output_of_node[copies[:, self.shared :][is_end]] = beginnings.size + np.flatnonzero(is_end)
        output_of_node[beginnings.ravel()] = np.arange(beginnings.size)
        # The same for the predictors and the last layer, which has no queries before the first of them.
        predicts = (columns >= np.array(starts)[:, None] - 1) & (columns < lengths - 1)
        self.first_query = min(starts) - 1
        self.copies, self.beginnings, self.output_of_node = tensor(copies), tensor(beginnings), tensor(output_of_node)
        self.output_of_predictor = tensor(np.flatnonzero(predicts[:, self.first_query :]))
        self.predictors = tensor(copies[predicts])

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
            copied, *stored = map_distinct(lambda tensor, nodes=nodes: _rows(tensor[0], nodes), queries, *new)
            copied = copied[:, first_query:] if first_query else copied
            mixed.append(layer.attend(rotary, copied, tuple(stored)).flatten(0, 1))
        return _rows(torch.cat(mixed), outputs)[None]

    def select(self, layer, x):
        return x[:, self.predictors] if layer.is_last else x


def _grow(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The tree's tokens and their positions, (N,) each, and for every prompt the places of its tokens."""
    nodes = [np.empty(0)] * len(prompts)
    ids = []
    positions = []
    count = 0
    tokens_before = nodes_before = np.empty(0, dtype=np.int64)
    for row in sorted(range(len(prompts)), key=lambda row: prompts[row]):
        tokens = np.asarray(prompts[row], dtype=np.int64)
        common = _common(tokens_before, tokens)
        ids.append(tokens[common:])
        positions.append(np.arange(common, len(tokens)))
        nodes[row] = np.concatenate([nodes_before[:common], np.arange(count, count + len(tokens) - common)])
        count = count + len(tokens) - common
        tokens_before = tokens
        nodes_before = nodes[row]
    return np.concatenate(ids), np.concatenate(positions), nodes


def _rows(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """tensor[places]. On a CPU index_select copies whole rows, five times as fast as indexing does."""
    return tensor.index_select(0, places.flatten()).unflatten(0, places.shape)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of tokens at the beginning that both have."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _shared(nodes: Sequence[np.ndarray]) -> int:
    """Number of tokens at the beginning that all prompts of a group have; 0 for a single prompt."""
    return 0 if len(nodes) == 1 else min(_common(nodes[0], other) for other in nodes[1:])
