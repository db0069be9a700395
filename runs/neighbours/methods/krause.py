"""Krause attention: Liu et al., "Krause Synchronization Transformers", 2026, arXiv 2602.11534.

Affinities s_ij = exp(-|q_i - k_j|^2 / (2 sigma_h^2)) with a learned sigma of each head, kept for the `size` keys
nearest to q_i among the neighbours of token i (bounded confidence) and normalised over them. Neighbours: in a causal
sequence the last WINDOW tokens; else tokens are a CLS token and patches of a grid row by row, whose neighbours are the
5 x 5 around them and the CLS token, and the CLS token sees all (as its authors' vision models do). Sigma^2 starts at
sqrt(D), as GKA's.
"""

import math

import torch
from torch import nn

from gka.related_costs import REACH, WINDOW
from runs.neighbours.mixing import About, Mixing, normalised


def neighbours(tokens: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of every token's neighbours, (N, W), and which of them exist; the CLS token of a grid has only itself."""
    token = torch.arange(tokens)[:, None]
    if causal:
        index = token - torch.arange(min(WINDOW, tokens))
        return index.clamp(min=0), index >= 0
    side = math.isqrt(max(0, tokens - 2)) + 1  # of the grid that tokens 1, 2, ... fill row by row
    steps = torch.arange(-REACH, REACH + 1)
    row = (token - 1) // side + steps.repeat_interleave(len(steps))
    column = (token - 1) % side + steps.repeat(len(steps))
    index = 1 + row * side + column
    exists = (row >= 0) & (column >= 0) & (column < side) & (index < tokens) & (token > 0)
    index = torch.cat([torch.zeros_like(token), index.clamp(0, tokens - 1)], dim=1)
    return index, torch.cat([torch.ones_like(token, dtype=torch.bool), exists], dim=1)


def mix(logits: torch.Tensor, nearest: int) -> torch.Tensor:
    """Weights of the `nearest` largest logits of each row, 0 for the others."""
    if nearest < logits.shape[-1]:
        least = logits.topk(nearest, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return logits.softmax(-1)


class Krause(Mixing, name="krause"):
    about = About("Krause", "arXiv 2602.11534", "QKV", causal=True, complexity="N W D")

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.log_sigma = nn.Parameter(torch.full((self.heads,), 0.25 * math.log(self.head_dim)))

    def default_size(self):
        return 32 if self.causal else 16

    def _logits(self, squared):
        return -squared / (2 * (2 * self.log_sigma).exp().view(-1, *[1] * (squared.dim() - 2)))

    def forward(self, q, k, v):
        index, exists = (t.to(q.device) for t in neighbours(q.shape[2], self.causal))
        near_k, near_v = (t.index_select(2, index.flatten()).unflatten(2, index.shape) for t in (k, v))
        logits = self._logits((q[..., None, :] - near_k).square().sum(-1)).masked_fill(~exists, -math.inf)
        y = torch.einsum("bhnw,bhnwd->bhnd", mix(logits, self.size), near_v)
        if self.causal:
            return y
        cls = mix(self._logits((q[:, :, :1, None] - k[:, :, None]).square().sum(-1)), self.size) @ v
        return torch.cat([cls, y[:, :, 1:]], dim=2)

    def exact(self, q, k, v):
        tokens = q.shape[2]
        i, j = torch.arange(tokens, device=q.device)[:, None], torch.arange(tokens, device=q.device)
        if self.causal:
            near = (j <= i) & (i - j < WINDOW)
        else:
            side = math.ceil(math.sqrt(tokens - 1)) if tokens > 1 else 1
            rows, columns = (i - 1) // side - (j - 1) // side, (i - 1) % side - (j - 1) % side
            near = ((rows.abs() <= REACH) & (columns.abs() <= REACH)) | (i == 0) | (j == 0)
        sigma = self.log_sigma.exp()[:, None, None]
        affinity = (-(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / (2 * sigma**2)).exp() * near
        order = affinity.masked_fill(~near, -1).argsort(dim=-1, descending=True).argsort(dim=-1)
        return normalised(affinity * (order < self.size), v)
