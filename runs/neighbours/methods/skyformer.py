"""Skyformer: Chen et al., "Skyformer: Remodel Self-Attention with Gaussian Kernel and Nyström Method", NeurIPS 2021,
arXiv 2111.00035.

y = C v with C_ij = kappa(q_i, k_j) = exp(-|q_i - k_j|^2 / (2 sqrt(D))), not normalised, and C replaced by
kappa(q, z) (kappa(z, z) + gamma I)^-1 kappa(z, k) with m landmarks z of the queries and keys together: those are the
rows of a positive definite matrix, as C alone is not. The inverse is iterative, of the matrix with its row sums divided
out on both sides. Landmarks are evenly spaced here, not drawn; gamma is its authors' 0.1. It has no causal form.
"""

import torch

from runs.neighbours.mixing import About, Mixing
from runs.neighbours.newton import iterative_inverse

GAMMA = 0.1


def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """exp(-|a_i - b_j|^2 / (2 sqrt(D))), (B, H, N, M), by |a|^2 + |b|^2 - 2 a.b."""
    squared = a.square().sum(-1, keepdim=True) + b.square().sum(-1, keepdim=True).mT - 2 * a @ b.mT
    return (-squared / (2 * a.shape[-1] ** 0.5)).exp()


class Skyformer(Mixing, name="skyformer"):
    about = About("Skyformer", "arXiv 2111.00035", "QKV", causal=False, complexity="N m D + m³")

    def default_size(self):
        return min(128, 2 * self.tokens)

    def landmarks(self, q, k):
        """Every so many-th row of the queries above the keys, (B, H, m, D)."""
        rows = torch.cat([q, k], dim=2)
        count = min(self.size, rows.shape[2])
        return rows[:, :, (torch.arange(count, device=q.device) * rows.shape[2]) // count]

    def forward(self, q, k, v):
        landmarks = self.landmarks(q, k)
        inner = kernel(landmarks, landmarks) + GAMMA * torch.eye(landmarks.shape[2], dtype=q.dtype, device=q.device)
        scale = inner.sum(-1).rsqrt()[..., None]
        read = scale * (iterative_inverse(scale * inner * scale.mT) @ (scale * (kernel(landmarks, k) @ v)))
        return kernel(q, landmarks) @ read

    def exact(self, q, k, v):
        z = self.landmarks(q, k)

        def kappa(a, b):
            return (-(a[..., :, None, :] - b[..., None, :, :]).square().sum(-1) / (2 * q.shape[-1] ** 0.5)).exp()

        inner = kappa(z, z) + GAMMA * torch.eye(z.shape[2], dtype=q.dtype, device=q.device)
        root = torch.diag_embed(inner.sum(-1).rsqrt())
        return kappa(q, z) @ root @ iterative_inverse(root @ inner @ root) @ root @ kappa(z, k) @ v
