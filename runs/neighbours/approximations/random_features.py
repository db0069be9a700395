"""Random features of the Gaussian kernel: unbiased estimates of K_ij = exp(-|q - k|^2 / 2), of features over sigma."""

import torch

from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.sums import BLOCK, Features


def directions(case: Case, count: int, seed: int, orthogonal: bool) -> torch.Tensor:
    """w, (H, D, count), standard normal; orthogonal: by D at right angles to each other, with the lengths of others."""
    heads, _, width = case.queries.shape
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(heads, count, width, generator=generator, dtype=torch.float64)
    if orthogonal:
        blocks = -(-count // width)
        square = torch.randn(heads, blocks, width, width, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(square)
        q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # without it LAPACK's signs bias positive features
        drawn = q.mT.flatten(1, 2)[:, :count] * drawn.norm(dim=-1, keepdim=True)
    return drawn.mT.to(case.queries.dtype)


def positive(case: Case, size: int, seed: int, orthogonal: bool) -> Features:
    """phi(x) = exp(w.x - |x|^2), as K = E[phi(q) phi(k)].

    Every feature may be scaled, as rows are normalised: queries by their own largest one, keys all by one number, which
    in a causal case is known from the first key.
    """
    scaled_by = 1 / case.sigma.to(case.queries.dtype)[:, None, None]
    w = directions(case, size, seed, orthogonal)

    def exponent(x: torch.Tensor) -> torch.Tensor:
        scaled = x * scaled_by
        return scaled @ w - scaled.square().sum(-1, keepdim=True)

    seen = case.keys[:, :1] if case.causal else case.keys
    largest = torch.stack([exponent(part).amax((1, 2)) for part in seen.split(BLOCK, dim=1)]).amax(0)[:, None, None]

    def of_queries(x: torch.Tensor) -> torch.Tensor:
        logs = exponent(x)
        return (logs - logs.amax(-1, keepdim=True)).exp_()

    return Features(of_queries, lambda x: (exponent(x) - largest).exp_())


def trigonometric(case: Case, size: int, seed: int, orthogonal: bool) -> Features:
    """phi(x) = [cos(w.x), sin(w.x)] / sqrt(size / 2), as K = E[cos(w.(q - k))]; size / 2 directions."""
    scaled_by = 1 / case.sigma.to(case.queries.dtype)[:, None, None]
    w = directions(case, size // 2, seed, orthogonal) * scaled_by

    def phi(x: torch.Tensor) -> torch.Tensor:
        angles = x @ w
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * (size // 2) ** -0.5

    return Features(phi, phi)
