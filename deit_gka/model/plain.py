"""A vision transformer in plain matrix operations, as few as possible, for exporters to other runtimes.

It equals the model up to rounding, with fewer operations:
- Tokens of all images are the rows of one matrix wherever a layer treats them alike.
- GKA: the norm before it measures the features in sigma, and distances do not see its bias, so both move into its
  weights and those of W_O (channel bandwidths stay apart: the values do not have them). The exponent is then
  h_i.h_j - |h_j|^2 / 2, a product of features with one more channel.
- Softmax and VLT: the scale moves into W_Q, a bias of the keys cancels in the softmax, one of the values passes through
  the rows of W, which sum to 1, into the bias of W_O.
Legend: B images, N tokens, H heads, D head_dim, C = H * D.
"""

import copy

import torch
import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from deit_gka.model.attention import GKA, VLT, Softmax
from gka.bandwidth import inverse_variance
from trainkit_gka.cli import UserError


def check_blocks(model: nn.Module) -> None:
    """Raises UserError for an architecture that has no plain form."""
    if not isinstance(model, VisionTransformer) or any(type(block) is not Block for block in model.blocks):
        raise UserError(f"{type(model).__name__} is not a ViT of timm's usual blocks, which --onnx needs")


def plain(model: nn.Module) -> nn.Module:
    """A copy of the model, in evaluation mode, that computes the same. Raises UserError as `check_blocks` does."""
    check_blocks(model)
    model = copy.deepcopy(model).eval()
    for block in model.blocks:
        attn = block.attn
        # timm's with more to it than softmax(Q K^T) V, such as norms of queries and keys or gates, stays as it is.
        more = (getattr(attn, name, None) for name in ("q_norm", "k_norm", "norm", "gate"))
        if type(attn) in FORMS and all(isinstance(part, nn.Identity | None) for part in more):
            block.attn = FORMS[type(attn)](block)
        block.mlp = ByToken(block.mlp)
    return model


class ByToken(nn.Module):
    """A layer that treats every token alike, (B, N, C), on all of them as one matrix: its bias joins the product."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, (-1, x.shape[1]))


class PlainAttention(nn.Module):
    """softmax(queries keys^T) values, then W_O; a subclass gives the three, (B, H, N, ...) each.

    attn: the layer that it replaces; heads and spatial offsets are the same.
    """

    def __init__(self, attn: nn.Module, proj: nn.Linear):
        super().__init__()
        self.num_heads, self.offsets, self.proj = attn.num_heads, getattr(attn, "offsets", None), proj

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor, attn_mask: None = None, is_causal: bool = False) -> torch.Tensor:
        queries, keys, values = self.project(x)
        if self.offsets:
            values = self.offsets(values.transpose(1, 2)).transpose(1, 2)
        y = (queries @ keys.transpose(2, 3)).softmax(-1) @ values
        return self.proj(y.transpose(1, 2).flatten(2).flatten(0, 1)).unflatten(0, (-1, x.shape[1]))


class PlainGKA(PlainAttention):
    """Gaussian kernel attention of the block. Changes the block's first norm."""

    def __init__(self, block: Block):
        attn: GKA = block.attn
        norm, proj = block.norm1, attn.proj
        if norm.weight is None:  # it gets one, of ones
            norm = block.norm1 = nn.LayerNorm(attn.dim, eps=norm.eps)
        inverse_sigma = inverse_variance(attn._log_sigma().double()).sqrt().repeat_interleave(attn.head_dim)
        bias = norm.bias.double()
        with torch.no_grad():
            norm.weight.copy_(norm.weight.double() * inverse_sigma)
            norm.bias.zero_()
        super().__init__(attn, linear(proj.weight / inverse_sigma, moved(proj, bias)))
        scale = None if attn.log_scale is None else attn.log_scale.detach().exp().unflatten(0, (attn.num_heads, 1, -1))
        self.register_buffer("scale", scale)

    def project(self, x):
        heads = self.heads(x)
        features = heads if self.scale is None else heads * self.scale
        squares = (features * features).sum(-1, keepdim=True)
        return F.pad(features, (0, 1), value=-0.5), torch.cat([features, squares], dim=-1), heads


class PlainSoftmax(PlainAttention):
    """Softmax attention of the block, timm's or VLT, whose values are the features. Each matrix is by itself, so that
    its product needs no splitting.
    """

    def __init__(self, block: Block):
        attn = block.attn
        scale = (block.attn.proj.in_features // block.attn.num_heads) ** -0.5
        if isinstance(attn, VLT):
            (query, key), (query_bias, _) = parts(attn.qk, 2)
            value_bias = query.new_zeros(len(query)) if attn.value_bias is None else attn.value_bias.double()
        else:
            (query, key, value), (query_bias, _, value_bias) = parts(attn.qkv, 3)
        super().__init__(attn, linear(attn.proj.weight, moved(attn.proj, value_bias)))
        self.q = ByToken(linear(query * scale, query_bias * scale))
        self.k = ByToken(linear(key, None))
        self.v = nn.Identity() if isinstance(attn, VLT) else ByToken(linear(value, None))

    def project(self, x):
        return self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))


def parts(layer: nn.Linear, count: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The matrices and biases, in float64, that a layer holds `count` of in one; biases it lacks are 0."""
    bias = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
    return layer.weight.double().chunk(count), bias.double().chunk(count)


def moved(proj: nn.Linear, shift: torch.Tensor) -> torch.Tensor:
    """The bias of W_O, in float64, if its input has lost the `shift`, (C,)."""
    added = proj.weight.double() @ shift
    return added if proj.bias is None else proj.bias.double() + added


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A float32 layer of these."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


FORMS = {Attention: PlainSoftmax, Softmax: PlainSoftmax, GKA: PlainGKA, VLT: PlainSoftmax}
