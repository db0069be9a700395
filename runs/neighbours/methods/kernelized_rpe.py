"""Kernelized attention with relative positions: Luo et al., "Stable, Fast and Accurate: Kernelized Attention with
Relative Positional Encoding", NeurIPS 2021, arXiv 2106.12566.

y_i = sum_j e^(b_(j-i)) phi(q_i).phi(k_j) v_j / sum_j e^(b_(j-i)) phi(q_i).phi(k_j): Performer's positive features of
unit queries and keys (normalised PRF), and a learned b of each head and distance. The sums over j are products with a
Toeplitz matrix, by the Fourier transform. Causal: e^b = 0 for j > i; the transform's rounding still carries later
tokens.
"""

import torch
import torch.nn.functional as F
from torch import nn

from gka.related_costs import transform_length
from runs.neighbours.feature_maps import orthogonal_features, positive_exponents
from runs.neighbours.mixing import About, Mixing, normalised


class KernelizedRPE(Mixing, name="kernelized-rpe"):
    about = About("Kernelized RPE", "arXiv 2106.12566", "QKV", causal=True, complexity="N log N m D")

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.register_buffer("omega", orthogonal_features(self.size, self.head_dim))
        self.bias = nn.Parameter(torch.zeros(self.heads, 2 * self.tokens - 1))  # of distances j - i, 1 - N to N - 1

    def default_size(self):
        return 32

    def _features(self, x):
        return positive_exponents(F.normalize(x, dim=-1), self.omega).exp()

    def _weights(self, tokens):
        """e^b of the distances of N tokens, (H, 2 N - 1); 0 for later ones where causal."""
        weights = self.bias[:, self.tokens - tokens : self.tokens + tokens - 1].exp()
        if not self.causal:
            return weights
        return weights * (torch.arange(1 - tokens, tokens, device=weights.device) <= 0)

    def forward(self, q, k, v):
        tokens, length = q.shape[2], transform_length(q.shape[2])
        queries, keys = self._features(q), self._features(k)
        values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        outer = (keys[..., None] * values[..., None, :]).transpose(2, 4)  # (B, H, D + 1, m, N)
        # sum_j w_(j-i) outer_j is a convolution with w reversed: its distance i - j runs from 1 - N to N - 1.
        spectrum = torch.fft.rfft(self._weights(tokens).flip(-1), length)[:, None, None]
        summed = torch.fft.irfft(torch.fft.rfft(outer, length) * spectrum, length)[..., tokens - 1 : 2 * tokens - 1]
        mixed = torch.einsum("bhnm,bhemn->bhne", queries, summed)
        return mixed[..., :-1] / mixed[..., -1:]

    def exact(self, q, k, v):
        tokens = q.shape[2]
        token = torch.arange(tokens, device=q.device)
        relative = self.bias[:, token - token[:, None] + self.tokens - 1].exp()  # (H, N, N)
        affinity = relative * (self._features(q) @ self._features(k).mT)
        return normalised(affinity.masked_fill(self.hidden(tokens, q.device), 0), v)
