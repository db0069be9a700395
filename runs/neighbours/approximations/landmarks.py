"""Landmarks: the kernel through a few points of feature space. Causal cases take them from other texts."""

import torch
import torch.nn.functional as F

from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.sums import Features, kernel

RIDGE = 1e-5  # on the diagonal of the landmarks' kernel, which is 1
SAMPLE, ROUNDS = 4096, 5  # of k-means: tokens that it sees at most, and Lloyd's rounds


def uniform(case: Case, size: int, seed: int) -> torch.Tensor:
    """Tokens drawn without repetition, (H, size, D); the same places in every head."""
    pool = case.landmark_pool
    generator = torch.Generator().manual_seed(seed)
    return pool[:, torch.randperm(pool.shape[1], generator=generator)[:size]]


def k_means(case: Case, size: int, seed: int) -> torch.Tensor:
    """Centres of clusters, (H, size, D), from drawn tokens by Lloyd's rounds; a centre without tokens stays."""
    points = uniform(case, max(SAMPLE, size), seed)
    centres = points[:, :size]
    for _ in range(ROUNDS):
        members = F.one_hot(nearest(points, centres), centres.shape[1]).to(points.dtype)  # (H, n, size)
        counts = members.sum(1)[..., None]
        centres = torch.where(counts > 0, members.mT @ points / counts.clamp(min=1), centres)
    return centres


def nearest(points: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """The number of the nearest centre, (H, n)."""
    return (points @ centres.mT - 0.5 * centres.square().sum(-1)[..., None, :]).argmax(-1)


def nystrom(case: Case, landmarks: torch.Tensor) -> Features:
    """K = K_QL (K_LL + ridge)^-1 K_LK; the inverse in float64. Row sums may be negative."""
    exact = landmarks.double()
    ridge = RIDGE * torch.eye(exact.shape[1], dtype=exact.dtype)
    square = kernel(exact, exact, case.sigma.double()) + ridge
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(square)).to(landmarks.dtype)

    def similarity(x: torch.Tensor) -> torch.Tensor:
        return kernel(x, landmarks, case.sigma)

    return Features(similarity, similarity, inverse)


def cluster_sums(case: Case, landmarks: torch.Tensor) -> Features:
    """K_ij = K(q_i, the landmark nearest to k_j). Row sums are positive."""
    return Features(
        lambda x: kernel(x, landmarks, case.sigma),
        lambda x: F.one_hot(nearest(x, landmarks), landmarks.shape[1]).to(x.dtype),
    )
