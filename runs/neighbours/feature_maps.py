"""Attention by feature maps, phi(q).phi(k) in place of exp(q.k), and the positive random features of such maps."""

import torch
import torch.nn.functional as F

from gka.related_costs import CHUNK


def feature_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, chunk: int = CHUNK
) -> torch.Tensor:
    """y_i = phi(q_i) (sum_j phi(k_j) v_j^T) / phi(q_i) (sum_j phi(k_j)), over j <= i where causal.

    queries, keys: phi of them, (B, H, N, m). values: (B, H, N, D). The causal form keeps the sums of whole chunks and
    builds products inside a chunk alone. Linear in N.
    """
    values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)  # the last channel sums the weights
    if causal:
        tokens = queries.shape[2]
        padded = (F.pad(t, (0, 0, 0, -tokens % chunk)).unflatten(2, (-1, chunk)) for t in (queries, keys, values))
        q, k, v = padded  # (B, H, chunks, chunk, ...)
        of_chunks = k.mT @ v
        before = of_chunks.cumsum(2).roll(1, 2)
        before = torch.cat([torch.zeros_like(before[:, :, :1]), before[:, :, 1:]], dim=2)
        mixed = ((q @ k.mT).tril() @ v + q @ before).flatten(2, 3)[:, :, :tokens]
    else:
        mixed = queries @ (keys.mT @ values)
    return mixed[..., :-1] / mixed[..., -1:]


def orthogonal_features(features: int, head_dim: int) -> torch.Tensor:
    """omega, (m, D): rows orthogonal in blocks of D, with the lengths of Gaussian vectors (Performer, section 2.4).

    As its authors' code: the signs of a plain QR are not random, so that many features keep a small bias.
    """
    blocks = [torch.linalg.qr(torch.randn(head_dim, head_dim))[0] for _ in range(-(-features // head_dim))]
    lengths = torch.randn(features, head_dim).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:features] * lengths


def positive_exponents(x: torch.Tensor, omega: torch.Tensor) -> torch.Tensor:
    """omega.x - |x|^2 / 2, (..., m): exp of it is the positive random feature map of exp(x.y) (Performer, lemma 1)."""
    return x @ omega.mT.to(x.dtype) - x.square().sum(-1, keepdim=True) / 2
