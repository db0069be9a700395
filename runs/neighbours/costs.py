"""Parameters and FLOPs of the methods in the paper's Table 1, from their shapes alone, counted as in gka/cost.py.

Softmax attention, VLT and GKA are in gka/cost.py. Formulas are of one sequence, forward: m is the number of features,
landmarks or compressed tokens (`size`), N of tokens, D is head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gka.cost import operator_flops

# Settings of the methods as they are built here, which take them from this file.
CHUNK = 128  # tokens whose products are built at once in the causal form of feature maps
ITERATIONS = 6  # of the inverse of Nyströmformer and Skyformer, four products each
WINDOW, REACH = 64, 2  # Krause: tokens in reach of causal text, and rows and columns to each side in a grid of patches


@dataclass(frozen=True)
class RelatedCost:
    """Costs of one attention sublayer for one sequence, W_O and biases included."""

    parameters: int
    flops: int  # forward pass, matrix products
    other_flops: int = 0  # Fourier transforms and differences of features, which are not matrix products


@dataclass(frozen=True)
class Shape:
    """What the mixing of a method is given."""

    heads: int
    head_dim: int
    tokens: int
    size: int
    causal: bool


def related_cost(
    method: str, dim: int, num_heads: int, tokens: int, *, size: int = 0, causal: bool = False
) -> RelatedCost:
    """Cost of `method`, a name of `RELATED`, over (1, tokens, dim).

    size: m of a method that has features, landmarks or compressed tokens, at least 1 there. Raises ValueError for an
    unknown method, a num_heads that does not divide dim, too few tokens, a size that is missing, and causal=True for a
    method without a causal form.
    """
    if method not in RELATED:
        raise ValueError(f"method must be one of {', '.join(RELATED)}, got {method!r}")
    if num_heads < 1 or dim % num_heads:
        raise ValueError(f"num_heads must divide dim, got dim={dim} and num_heads={num_heads}")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    if size < (method in SIZED):
        raise ValueError(f"{method} needs a size of at least 1, got {size}")
    if causal and method in NOT_CAUSAL:
        raise ValueError(f"{method} has no causal form")
    projections, mixing = RELATED[method]
    of_mixing = mixing(Shape(num_heads, dim // num_heads, tokens, size, causal))
    linears = projections + 1
    return RelatedCost(
        parameters=linears * (dim * dim + dim) + of_mixing.parameters,
        flops=2 * tokens * linears * dim * dim + of_mixing.flops,
        other_flops=of_mixing.other_flops,
    )


def non_local_means(s: Shape) -> RelatedCost:
    """One head of all channels."""
    return RelatedCost(0, operator_flops(1, s.tokens, 1, s.heads * s.head_dim, keys=s.tokens))


def feature_maps(s: Shape, features: int) -> int:
    """FLOPs of phi(q) (phi(k)^T v) with D + 1 channels, the last for row sums; the causal form also builds chunks."""
    padded = -(-s.tokens // CHUNK) * CHUNK if s.causal else s.tokens
    chunks = 2 * padded * CHUNK * (features + s.head_dim + 1) if s.causal else 0
    return s.heads * (4 * padded * features * (s.head_dim + 1) + chunks)


def linear_transformer(s: Shape) -> RelatedCost:
    """Features are the channels."""
    return RelatedCost(0, feature_maps(s, s.head_dim))


def performer(s: Shape) -> RelatedCost:
    """Queries and keys are projected on m directions."""
    return RelatedCost(0, 4 * s.heads * s.tokens * s.head_dim * s.size + feature_maps(s, s.size))


def linformer(s: Shape) -> RelatedCost:
    """E and F of (m, N) compress keys and values."""
    return RelatedCost(2 * s.size * s.tokens, 8 * s.heads * s.size * s.tokens * s.head_dim)


def landmarks(s: Shape, most: int) -> RelatedCost:
    """Four products of tokens with m landmarks, two among landmarks, and the iterative inverse."""
    m = min(s.size, most)
    products = 2 * s.head_dim * (4 * s.tokens * m + 2 * m * m)
    return RelatedCost(0, s.heads * (products + ITERATIONS * 4 * 2 * m**3))


def nystromformer(s: Shape) -> RelatedCost:
    """Landmarks are means of tokens."""
    return landmarks(s, most=s.tokens)


def skyformer(s: Shape) -> RelatedCost:
    """Landmarks are rows of queries and keys."""
    return landmarks(s, most=2 * s.tokens)


def kernelized_rpe(s: Shape) -> RelatedCost:
    """A bias for each head and distance; products with Toeplitz matrices by Fourier transforms.

    Other: phi(k) v^T, 5 L log2 L for each complex transform of length L and half for a real one (there and back), and 6
    for each complex product of spectra, which are half as long.
    """
    length, rows = transform_length(s.tokens), s.size * (s.head_dim + 1)
    transform = 5 * length * math.ceil(math.log2(length)) // 2
    return RelatedCost(
        parameters=s.heads * (2 * s.tokens - 1),
        flops=s.heads * s.tokens * s.size * (4 * s.head_dim + 2 * (s.head_dim + 1)),
        other_flops=s.heads * ((2 * rows + 1) * transform + rows * (s.tokens + 6 * (length // 2 + 1))),
    )


def transform_length(tokens: int) -> int:
    """A power of two at which what wraps around a convolution of all distances stays in front of what is read."""
    return 2 ** math.ceil(math.log2(2 * tokens - 1))


def krause(s: Shape) -> RelatedCost:
    """A sigma for each head. In a grid every token has its patches and the CLS token, and the CLS token has all.

    Other: difference, square and sum.
    """
    in_reach = min(WINDOW, s.tokens) if s.causal else (2 * REACH + 1) ** 2 + 2
    pairs = s.heads * s.tokens * in_reach
    return RelatedCost(s.heads, 2 * pairs * s.head_dim, 3 * pairs * s.head_dim)


# Method -> how many of W_Q, W_K and W_V it learns, and the cost of its mixing.
RELATED: dict[str, tuple[int, Callable[[Shape], RelatedCost]]] = {
    "non-local-means": (0, non_local_means),
    "linear-transformer": (3, linear_transformer),
    "performer": (3, performer),
    "linformer": (3, linformer),
    "nystromformer": (3, nystromformer),
    "kernelized-rpe": (3, kernelized_rpe),
    "skyformer": (3, skyformer),
    "krause": (3, krause),
}
SIZED = {"performer", "linformer", "nystromformer", "kernelized-rpe", "skyformer"}
NOT_CAUSAL = {"linformer", "nystromformer", "skyformer"}
