"""Parameters, FLOPs and bytes of one attention sublayer from its shapes alone, for softmax, VLT and GKA.

Conventions (the paper's tables of parameters and FLOPs): FLOPs are 2 x multiply-accumulates of the matrix products,
forward pass; exponentials, sums, norms and biases are not counted. Score and mixing products are charged for every key
in reach, without halving for causality. What a preset adds, such as gates and value embeddings, is not counted.
"""

from dataclasses import dataclass

from gka.kinds import KINDS


@dataclass(frozen=True)
class AttentionCost:
    """Costs of one attention sublayer, W_O included."""

    parameters: int  # weights, biases and bandwidths
    bandwidths: int  # the sigma scalars among them
    flops: int  # forward pass, whole batch
    operator_bytes: int  # memory traffic of a fused operator's forward pass, projections left out
    matrix_bytes: int  # what an unfused implementation allocates for W alone
    cache_bytes: int  # decode cache for `tokens` tokens, whole batch


def operator_flops(batch: int, queries: int, heads: int, head_dim: int, *, keys: int) -> int:
    """FLOPs of scores and mixing, forward: every query with `keys` keys in reach."""
    return 4 * batch * queries * keys * heads * head_dim


def attention_cost(
    kind: str,
    dim: int,
    num_heads: int,
    tokens: int,
    *,
    batch: int = 1,
    window: int | None = None,
    bias: bool = True,
    value_bias: bool = False,
    itemsize: int = 2,
) -> AttentionCost:
    """Cost of attention of `kind` over (batch, tokens, dim).

    window: keys in reach of a query, None for all tokens. itemsize: bytes per element (2 for bf16).
    value_bias: VLT keeps the bias of the W_V it lost (it needs `bias` too). Raises ValueError for an unknown kind, a
    num_heads that does not divide dim, and sizes below 1.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if num_heads < 1 or dim % num_heads:
        raise ValueError(f"num_heads must divide dim, got dim={dim} and num_heads={num_heads}")
    if tokens < 1 or batch < 1 or (window is not None and window < 1):
        raise ValueError(f"tokens, batch and window must be at least 1, got {tokens}, {batch} and {window}")
    linears = len(KINDS[kind].input_projections) + 1
    keys = tokens if window is None else min(window, tokens)
    bandwidths = num_heads if KINDS[kind].has_bandwidth else 0
    tensor_bytes = batch * tokens * dim * itemsize
    return AttentionCost(
        parameters=linears * (dim * dim + (dim if bias else 0))
        + (dim if kind == "vlt" and bias and value_bias else 0)
        + bandwidths,
        bandwidths=bandwidths,
        flops=2 * batch * tokens * linears * dim * dim
        + operator_flops(batch, tokens, num_heads, dim // num_heads, keys=keys),
        operator_bytes=KINDS[kind].operator_tensors * tensor_bytes,
        matrix_bytes=batch * num_heads * tokens * tokens * itemsize,
        cache_bytes=KINDS[kind].cached_tensors * tensor_bytes,
    )
