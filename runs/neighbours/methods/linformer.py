"""Linformer: Wang et al., "Linformer: Self-Attention with Linear Complexity", arXiv 2006.04768.

y = softmax(q (E k)^T / sqrt(D)) F v, with learned E and F of shape (m, N), the same for all heads of a layer (headwise
sharing). They start with variance 1 / m, as in its theorem. A compressed token holds all tokens, so that it
has no causal form.
"""

import torch
from torch import nn

from runs.neighbours.mixing import About, Mixing, scores


class Linformer(Mixing, name="linformer"):
    about = About("Linformer", "arXiv 2006.04768", "QKV", causal=False, complexity="N m D")

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.compress_keys, self.compress_values = (
            nn.Parameter(torch.randn(self.size, self.tokens) * self.size**-0.5) for _ in "EF"
        )

    def default_size(self):
        return min(64, self.tokens)

    def _compressed(self, k, v):
        tokens = k.shape[2]
        return self.compress_keys[:, :tokens] @ k, self.compress_values[:, :tokens] @ v

    def forward(self, q, k, v):
        keys, values = self._compressed(k, v)
        return scores(q, keys).softmax(-1) @ values

    def exact(self, q, k, v):
        keys = torch.einsum("mn,bhnd->bhmd", self.compress_keys[:, : k.shape[2]], k)
        weights = scores(q, keys).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return (weights @ self.compress_values[:, : k.shape[2]]) @ v  # N x N weights of the tokens
