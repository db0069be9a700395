"""The iterative inverse that Nyströmformer and Skyformer use in place of a decomposition."""

import torch

from gka.related_costs import ITERATIONS


def iterative_inverse(matrix: torch.Tensor, iterations: int = ITERATIONS) -> torch.Tensor:
    """An approximate inverse of (..., m, m) matrices (Razavi et al., as in Nyströmformer): from
    Z = A^T / (|A|_1 |A|_inf), Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    size = matrix.abs()
    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    inverse = matrix.mT / norms[..., None, None]
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse
