"""Muon on a stack of matrices of one shape: momentum, Polar Express, variance per neuron, cautious decay.

The orthogonalisation runs in bfloat16 on every device, as upstream's; `dtype` is for tests of the algorithm. Where the
processor cannot multiply bfloat16, its products are computed in float32 and rounded (`through_float32`).
"""

from functools import partial

import torch

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def product(a: torch.Tensor, b: torch.Tensor, through_float32: bool) -> torch.Tensor:
    """a @ b, (K, r, n) and (K, n, c), in their dtype.

    through_float32: widen bfloat16 factors, multiply in float32 and round the result once. Instructions
    for bfloat16 compute the same, in another order of the sums.
    """
    return (a.float() @ b.float()).to(a.dtype) if through_float32 else a @ b


def polar_express(x: torch.Tensor, through_float32: bool = False) -> torch.Tensor:
    """Approximate the orthogonal polar factor of every matrix in x, (K, r, c), by five odd polynomial steps."""

    multiply = partial(product, through_float32=through_float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in POLAR_EXPRESS:
        gram = multiply(x.mT, x) if tall else multiply(x, x.mT)
        polynomial = b * gram + c * multiply(gram, gram)
        x = a * x + (multiply(x, polynomial) if tall else multiply(polynomial, x))
    return x


def equalise_variance(x: torch.Tensor, second_moment: torch.Tensor, beta2: torch.Tensor) -> torch.Tensor:
    """NorMuon: divide every row (column, if wide) by its running root mean square, keeping the norm of each matrix.

    second_moment: (K, r, 1) for r >= c, else (K, 1, c); updated in place.
    """
    axis = -1 if second_moment.shape[-1] == 1 else -2
    mean_square = x.float().square().mean(dim=axis, keepdim=True)
    norm = (mean_square.sum(dim=(-2, -1), keepdim=True) * x.shape[axis]).sqrt()
    second_moment.lerp_(mean_square.to(second_moment.dtype), 1 - beta2.to(second_moment.dtype))
    scale = second_moment.clamp(min=1e-10).rsqrt()
    new_norm = (mean_square * x.shape[axis] * scale.float().square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    return x * (scale * (norm / new_norm.clamp(min=1e-10))).to(x.dtype)


def second_moment_shape(shape: torch.Size | tuple[int, int]) -> tuple[int, int]:
    """Shape of the variance state of one r x c matrix."""
    rows, columns = shape
    return (rows, 1) if rows >= columns else (1, columns)


def muon_update(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    momentum_buffer: torch.Tensor,
    second_moment: torch.Tensor,
    momentum: torch.Tensor,
    lr: torch.Tensor,
    weight_decay: torch.Tensor,
    beta2: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    through_float32: bool = False,
) -> None:
    """One step for a stack of matrices, all (K, r, c) and updated in place; the hyperparameters are 0-d tensors.

    lr is the group's rate; the factor sqrt(max(1, r / c)) is applied here. Decay changes only entries that the update
    shrinks too.
    """
    momentum_buffer.lerp_(gradients, 1 - momentum)
    update = polar_express(gradients.lerp(momentum_buffer, momentum).to(dtype), through_float32)
    update = equalise_variance(update, second_moment, beta2.to(dtype))
    lr = (lr * max(1.0, parameters.shape[-2] / parameters.shape[-1]) ** 0.5).to(dtype)
    decay = lr * weight_decay.to(dtype)
    shrinking = (update * parameters) >= 0
    parameters.sub_(lr * update + decay * parameters * shrinking)
