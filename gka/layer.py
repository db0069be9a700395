"""GaussianKernelAttention: the drop-in layer.

Split heads, mix with the kernel, project with W_O (paper section 3.2).
"""

import math
from numbers import Integral
from typing import Any

import torch
from torch import nn

from gka import validation
from gka.api import gaussian_attention, gaussian_weights, select_impl
from gka.autocast import autocasts
from gka.bandwidth import at_least_float32, initial_log_sigma
from gka.dispatch import check_impl
from gka.masking import document_bounds
from gka.offsets import head_offsets as build_offsets
from gka.offsets import neighbours, spatial_pattern
from gka.options import Options
from gka.padding_and_masks import in_order, in_place, mask_in_order, tokens_first, weights_in_place
from gka.parts import GATE_CHANNELS, add_value_embedding, head_gates, rotate_to, scaled, settings_of
from gka.request import Tables

# torch.fx records each call as one node, as its tensors have no shapes and dtypes to look at.
NODES = ["split_heads", "cleared", "tokens_first", "in_order", "mask_in_order", "in_place", "weights_in_place"]
NODES += ["checked_context", "document_starts", "positions_since", "at_least_float32", "checked_embedding"]
NODES += ["rotate_to", "scaled", "neighbours"]
for name in (*NODES, "gaussian_attention", "gaussian_weights"):
    torch.fx.wrap(name)


class GaussianKernelAttention(nn.Module):
    """Multi-head attention without W_Q, W_K and W_V: `log_sigma` (num_heads, float32) and the output projection are
    learned, and what the options below add.

    Args:
      dim: model width C; num_heads: H, must divide dim (ValueError otherwise). head_dim = dim / num_heads.
      preset: None, the paper's form; "text", the form that the study recommends for it; or "image", the paper's form
        with spatial offsets. Every other argument that is not None wins over the preset.
      bias: give W_O a bias. None: True, in "text" False.
      sigma_squared: starting sigma^2 of every head. None: sqrt(head_dim), the temperature of standard attention, in
        "text" head_dim / 4, as head offsets need it.
      causal, window, impl: as in `gaussian_attention`.

    Not the paper's; None: what the preset has, as said, without one nothing:
      head_norm ("text"): RMS-normalise every head first. Norms are then constant and the kernel needs no |x|^2 term (as
        nanochat's QK norm). A token of zeros has no such norm: hide it with key_padding_mask.
      channel_bandwidths ("text"): the kernel compares features times exp(log_scale), (dim,) in float32, learned from 0,
        normalised again with head_norm; the values stay as they are. It is a Gaussian with a diagonal metric (automatic
        relevance determination: MacKay 1994, Neal 1996), for tokens whose norm has no weight per channel.
      head_offsets ("text": "PS"): a letter per head, tiled (`gka.offsets`): with PS half of the heads read the value of
        the token before a match, half that of the token after it. In a batch with padding every token has the one
        before it as its predecessor, whatever lies between them. Take head_norm with it, without which Triton has no
        gradients for heads with S, and sigma_squared = head_dim / 4.
      head_gates ("text"): every head's output times 2 sigmoid(0.1 G x), with `head_gate` = G, (num_heads, dim), learned
        from 0 (gated attention, arXiv 2505.06708).
      rotary ("text": 10000.0): what is compared is rotated by its position (RoPE); values are not. The base theta, or
        tables (cos, sin), (length, head_dim / 2) each; False: none. The halves of a head are turned by minus the angle,
        nanochat's direction, the opposite way to Llama's: for Llama's tables give (cos, -sin). Rotation keeps norms, so
        it goes with head_norm and without. Positions count the tokens of a row, not its padding.
      spatial_offsets ("image": "LRUB"): for patches on a grid, a letter per head, tiled (`gka.offsets`): a head's
        values are those of the patch left of each, right of it, above, below. With neither head_offsets, rotary nor
        causal, which are for tokens in a row. ValueError for fewer heads than letters, four for the preset.
      value_embeddings: `forward` gets another vector for each token, nanochat's second table of embeddings, which is
        added to the values times 2 sigmoid(V x[:32]), with `ve_gate` = V, (num_heads, 32 or dim if that is less),
        learned from 0. In no preset, though the study's for text has them in every second layer.

    In order, of a token x: v = norm(heads of x); k = norm(rotary(v exp(log_scale))); v + gate * value embedding;
    offsets; the operator; times the gates; W_O.

    Input and output: (B, T, dim) in the weights' dtype, or autocast is on; TypeError for another dtype, ValueError for
    another shape. Expects normalised tokens (the paper's: after the block's LayerNorm). `.bfloat16()` and `.half()`
    work, but `log_sigma` is best kept float32: rounded, it learns in steps of 2^-8 or coarser. Keep it and `log_scale`
    out of weight decay; they are 1-D, as the usual rule for biases and norms expects.
    """

    rotary_cos: torch.Tensor
    rotary_sin: torch.Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        preset: str | None = None,
        bias: bool | None = None,
        sigma_squared: float | None = None,
        causal: bool = False,
        window: int | None = None,
        head_norm: bool | None = None,
        channel_bandwidths: bool | None = None,
        head_offsets: str | None = None,
        spatial_offsets: str | None = None,
        head_gates: bool | None = None,
        rotary: float | Tables | None = None,
        value_embeddings: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        if not all(isinstance(size, Integral) for size in (dim, num_heads)):
            raise TypeError(f"dim and num_heads must be ints, got {type(dim).__name__} and {type(num_heads).__name__}")
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide dim, got dim={dim} and num_heads={num_heads}")
        validation.check_mask(causal, window)
        check_impl(impl)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        given = dict(
            bias=bias, sigma_squared=sigma_squared, head_norm=head_norm, channel_bandwidths=channel_bandwidths,
            head_offsets=head_offsets, spatial_offsets=spatial_offsets, head_gates=head_gates, rotary=rotary,
        )  # fmt: skip
        settings = settings_of(preset, self.head_dim, given)
        self.sigma_squared, self.head_norm = settings["sigma_squared"], settings["head_norm"]
        self.channel_bandwidths, self.head_gates = settings["channel_bandwidths"], settings["head_gates"]
        self.value_embeddings = value_embeddings
        self.causal, self.window, self.impl = causal, window, impl
        self.log_sigma = nn.Parameter(initial_log_sigma(num_heads, self.sigma_squared))
        self.log_scale = nn.Parameter(torch.zeros(dim)) if self.channel_bandwidths else None
        self.head_offsets = settings["head_offsets"]
        self.pairing = build_offsets(self.head_offsets, num_heads)
        if (letters := len(self.head_offsets)) > num_heads:
            raise ValueError(f"head_offsets {self.head_offsets} has {letters} letters but there are {num_heads} heads")
        self.rotary = checked_rotary(settings["rotary"], self.head_dim)
        tables = self.rotary if isinstance(self.rotary, tuple) else (None, None)
        for name, table in zip(("rotary_cos", "rotary_sin"), tables):
            self.register_buffer(name, table, persistent=False)
        self.spatial_offsets = settings["spatial_offsets"]
        if self.spatial_offsets:
            self.spatial_offsets = spatial_pattern(self.spatial_offsets, num_heads)
            self._check_is_no_row(causal)
        self.proj = nn.Linear(dim, dim, bias=settings["bias"])
        self.head_gate = nn.Linear(dim, num_heads, bias=False) if self.head_gates else None
        self.ve_gate = nn.Linear(min(GATE_CHANNELS, dim), num_heads, bias=False) if value_embeddings else None
        self._clear_gates()

    def reset_parameters(self) -> None:
        """Refill all that is learned, and tables of rotary, for example after building on the meta device."""
        with torch.no_grad():
            self.log_sigma.copy_(initial_log_sigma(self.num_heads, self.sigma_squared))
            if self.log_scale is not None:
                self.log_scale.zero_()
            if isinstance(self.rotary, tuple):
                self.rotary_cos.copy_(self.rotary[0])
                self.rotary_sin.copy_(self.rotary[1])
        self.proj.reset_parameters()
        self._clear_gates()

    def _clear_gates(self) -> None:
        for gate in (self.head_gate, self.ve_gate):
            if gate is not None:
                nn.init.zeros_(gate.weight)

    def _check_is_no_row(self, causal: bool, cu_seqlens: torch.Tensor | None = None) -> None:
        """Raises ValueError where what spatial offsets exclude is asked for."""
        if causal or self.pairing is not None or self.rotary or cu_seqlens is not None:
            excluded = "causal attention, head_offsets, rotary or cu_seqlens, which are for tokens in a row"
            raise ValueError(f"spatial_offsets, which are for patches on a grid, do not go with {excluded}")

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        value_embedding: torch.Tensor | None = None,
        grid: tuple[int, int] | None = None,
        prefix: int = 1,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Mix and project x, (B, T, dim), which looks at itself or, in cross attention, at `context`, (B, Tk, dim).

        key_padding_mask, attn_mask: as in `gaussian_attention`; padding of x, or of the context. For padded tokens of x
        W_O's bias comes out. cu_seqlens: as in `gaussian_attention`, for x of (1, N, dim) and self-attention; head
        offsets and rotary positions begin anew in each document. is_causal: for this call, as timm's blocks say it.
        need_weights: return W too, (B, H, T, Tk), which is built in O(T * Tk) memory; with offsets column j is what is
        read of slot j (`gka.offsets`).

        value_embedding: (B, T, dim), for a layer with value_embeddings. grid, prefix: for one with spatial_offsets: x
        is `prefix` tokens, such as a class token, then (rows, columns) patches, row by row; None: a square.

        Raises TypeError or ValueError naming the argument. Rotary positions, spatial offsets, gates and value
        embeddings are for self-attention, and refused with a context.
        """
        causal, own_keys = self.causal or is_causal, context is None
        self._check_call(context, value_embedding, grid, causal, cu_seqlens)
        mask: dict[str, Any] = dict(key_padding_mask=key_padding_mask, attn_mask=attn_mask, cu_seqlens=cu_seqlens)
        in_a_row = self.pairing is not None or self.rotary
        padding = key_padding_mask if in_a_row else None
        if padding is not None and not own_keys and (causal or self.window is not None):
            raise ValueError("head_offsets with a padded context need a layer that is not causal and has no window")
        if key_padding_mask is not None and (padding is not None or self._computes_with_tokens):
            tokens = cleared(x, context, mask, self.dim, self.num_heads)
            if value_embedding is not None:
                value_embedding = checked_embedding(value_embedding, x, weight_of(self.proj))
                value_embedding = value_embedding.masked_fill(key_padding_mask[..., None], 0)
            if padding is not None:  # the tokens come first, so that each follows the one before it
                order, queries = tokens_first(padding), x.shape[1]
                tokens = in_order(tokens, order)
                value_embedding = None if value_embedding is None else in_order(value_embedding, order)
                mask["attn_mask"] = None if attn_mask is None else mask_in_order(attn_mask, order, queries, own_keys)
                # Under a causal mask no token sees padding.
                mask |= dict(key_padding_mask=None, lengths=None if own_keys and causal else (~padding).sum(1))
            x, context = (tokens, None) if own_keys else (x, tokens)
        restarts = cu_seqlens is not None and in_a_row and own_keys
        starts = document_starts(x, mask, self.dim, self.num_heads) if restarts else None
        positions = None if starts is None else positions_since(starts)
        features, values = self.features_and_values(x, value_embedding, positions)
        keys = None
        if context is not None:
            keys, values = self._features_and_values("context", checked_context(context, x, self.dim, cu_seqlens))
        if self.pairing is not None:
            keys, values = self.pairing(features if keys is None else keys, values, starts)
        if self.spatial_offsets:
            values = neighbours(values, self.spatial_offsets, grid, prefix, key_padding_mask)
        mask |= dict(keys=keys, causal=causal, window=self.window)
        log_sigma = at_least_float32(self.log_sigma)
        apart = None if values is (features if keys is None else keys) else values
        y = gaussian_attention(features, log_sigma, values=apart, constant_norm=self.head_norm, impl=self.impl, **mask)
        y = self.gated(y, x)
        weights = gaussian_weights(features, log_sigma, **mask) if need_weights else None
        if padding is not None:
            y = in_place(y, order, padding) if own_keys else y
            weights = None if weights is None else weights_in_place(weights, order, padding, own_keys)
        y = self.proj(y.flatten(-2))
        return y if weights is None else (y, weights)

    def _check_call(
        self,
        context: torch.Tensor | None,
        value_embedding: torch.Tensor | None,
        grid: tuple[int, int] | None,
        causal: bool,
        cu_seqlens: torch.Tensor | None,
    ) -> None:
        """Raises ValueError for arguments of `forward` that do not go with the layer's settings."""
        if context is not None:
            names = "rotary", "spatial_offsets", "head_gates", "value_embeddings"
            if of_itself := ", ".join(name for name in names if getattr(self, name)):
                raise ValueError(f"a layer with {of_itself} is for self-attention and takes no context")
        if value_embedding is None and self.ve_gate is not None:
            raise ValueError("value_embedding is needed: the layer has value_embeddings=True")
        if value_embedding is not None and self.ve_gate is None:
            raise ValueError("value_embedding is for layers with value_embeddings=True")
        if grid is not None and not self.spatial_offsets:
            raise ValueError("grid is for layers with spatial_offsets")
        if self.spatial_offsets:
            self._check_is_no_row(causal, cu_seqlens)

    @property
    def _computes_with_tokens(self) -> bool:
        """Whether the layer does more with tokens than to hand them to the operator, which hides padding."""
        return self.head_norm or self.channel_bandwidths or self.head_gates or self.value_embeddings

    def features_and_values(
        self, x: torch.Tensor, value_embedding: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(What the kernel compares, the values) of tokens x, (B, T, dim), before offsets: (B, T, H, D) each.

        For decoding: they are what `decode_attention` takes, with the delays of `pairing`. positions: of the tokens,
        whole numbers (T,), for rotary; None: 0 to T - 1.
        """
        features, values = self._features_and_values("x", x, positions)
        if self.ve_gate is not None:
            embedding = checked_embedding(value_embedding, x, weight_of(self.proj))
            heads = embedding.unflatten(-1, (self.num_heads, self.head_dim))
            values = add_value_embedding(values, self.ve_gate(x[..., :GATE_CHANNELS]), heads)
        return features, values

    def _features_and_values(
        self, name: str, x: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._normalised(split_heads(name, x, self.dim, self.num_heads, weight_of(self.proj)))
        if self.log_scale is None and not self.rotary:
            return values, values
        features = self.scaled(values)
        if self.rotary:
            is_theta = isinstance(self.rotary, float)
            features = rotate_to(features, self.rotary if is_theta else (self.rotary_cos, self.rotary_sin), positions)
        return self._normalised(features), values

    def _normalised(self, heads: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(heads, (self.head_dim,)) if self.head_norm else heads

    def gated(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The heads' outputs y, (B, T, H, D), times the gates of their tokens x, (B, T, dim)."""
        return y if self.head_gate is None else y * head_gates(self.head_gate(x))[..., None]

    def scaled(self, heads: torch.Tensor) -> torch.Tensor:
        """heads, (B, T, H, D), with every channel on the scale on which the kernel compares it."""
        if self.log_scale is None:
            return heads
        return scaled(heads, self.log_scale.unflatten(-1, (self.num_heads, self.head_dim)))

    def chosen_impl(self, num_tokens: int) -> str:
        """Which implementation trains this layer on `num_tokens` tokens, in its weights' dtype and on their device."""
        x = self.proj.weight.new_empty((1, num_tokens, self.num_heads, self.head_dim), requires_grad=True)
        keys = torch.empty_like(x) if self.pairing is not None and self.pairing.moves_keys else None
        return select_impl(
            x, keys=keys, causal=self.causal, window=self.window, constant_norm=self.head_norm, impl=self.impl
        )

    def extra_repr(self) -> str:
        names = ["num_heads", "head_dim", "causal", "window", "head_norm"]
        options = "channel_bandwidths", "head_offsets", "spatial_offsets", "head_gates", "rotary", "value_embeddings"
        settings = {name: getattr(self, name) for name in (*names, *options)}
        if isinstance(self.rotary, tuple):
            settings["rotary"] = "tables"
        parts = [f"{name}={value}" for name, value in settings.items() if name in names or value]
        return ", ".join(parts).removeprefix("num_")


def checked_rotary(rotary: Any, head_dim: int) -> float | Tables | None:
    """The base of rotary positions, or their tables; None without. TypeError or ValueError for anything else."""
    if rotary is None or rotary is False:
        return None
    if head_dim % 2:
        raise ValueError(f"rotary needs an even head_dim, whose halves it turns, got {head_dim}")
    if isinstance(rotary, (tuple, list)) and len(rotary) == 2 and all(isinstance(t, torch.Tensor) for t in rotary):
        shapes = [tuple(table.shape) for table in rotary]
        if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][1] * 2 != head_dim:
            raise ValueError(f"rotary must be two tables of (length, {head_dim // 2}) numbers, got {shapes}")
        return tuple(rotary)
    if isinstance(rotary, bool) or not isinstance(rotary, (int, float)):
        raise TypeError(f"rotary must be theta, a number, or tables (cos, sin), got {rotary!r}")
    if not 0 < rotary < math.inf:
        raise ValueError(f"rotary, theta, must be positive and finite, got {rotary}")
    return float(rotary)


def weight_of(projection: nn.Module) -> torch.Tensor | None:
    """The weight that multiplies what the projection gets, as it is; None for one that casts or quantises by itself."""
    weight = projection._parameters.get("weight") if isinstance(projection, nn.Linear) else None
    return weight if type(weight) in (torch.Tensor, nn.Parameter) else None


def split_heads(
    name: str, x: torch.Tensor | None, dim: int, num_heads: int, weight: torch.Tensor | None
) -> torch.Tensor:
    """(B, T, dim) as (B, T, H, D). TypeError or ValueError, with `name`, for an x that `weight` cannot multiply."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape (B, T, dim), got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"{name} must have shape (B, T, dim) with dim={dim}, got {tuple(x.shape)}")
    if weight is not None and weight.dtype in validation.FLOATING and x.dtype != weight.dtype:
        casts = autocasts(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)  # float64 stays what it is
        if not (casts and x.dtype in validation.FLOATING):
            raise TypeError(
                f"{name} must have the dtype of the layer's weights, {weight.dtype}, got {x.dtype}: cast it or the "
                "layer with .to(), or use torch.autocast, which leaves float64 alone"
            )
    return x.unflatten(-1, (num_heads, dim // num_heads))


def cleared(x: torch.Tensor, context: torch.Tensor | None, mask: dict, dim: int, num_heads: int) -> torch.Tensor:
    """The context, or x without one, with zeros for padding: a NaN there would reach the gradient of a scale or norm.

    Raises TypeError or ValueError, naming the argument.
    """
    queries = split_heads("x", x, dim, num_heads, None)
    tokens = x if context is None else checked_context(context, x, dim)
    validation.check_padding_and_mask(queries, tokens.shape[1], Options(**mask))
    return tokens.masked_fill(mask["key_padding_mask"][..., None], 0)


def document_starts(x: torch.Tensor, mask: dict, dim: int, num_heads: int) -> torch.Tensor:
    """Where the document of every token begins, (T,), from cu_seqlens. Raises TypeError or ValueError."""
    validation.check_padding_and_mask(split_heads("x", x, dim, num_heads, None), x.shape[1], Options(**mask))
    return document_bounds(mask["cu_seqlens"], x.shape[1])[0]


def positions_since(starts: torch.Tensor) -> torch.Tensor:
    """The position of every token in its document, (T,)."""
    return torch.arange(starts.shape[0], device=starts.device) - starts  # len() would fix it in exports


def checked_embedding(
    value_embedding: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    """The value embedding, if it is (B, T, dim) as x is, in a dtype that goes with `weight`."""
    heads = split_heads("value_embedding", value_embedding, x.shape[-1], 1, weight)
    if heads.shape[:2] != x.shape[:2]:
        shape = (*heads.shape[:2], x.shape[-1])
        raise ValueError(f"value_embedding must have the shape of x, {tuple(x.shape)}, got {shape}")
    return heads.flatten(-2)


def checked_context(
    context: torch.Tensor, x: torch.Tensor, dim: int, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """The context, if it is features beside x, (B, T, dim). TypeError or ValueError otherwise, such as for a mask."""
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens is for self-attention: give no context with it")
    is_tensor = isinstance(context, torch.Tensor)
    has_dtype = is_tensor and context.is_floating_point()
    if has_dtype and context.dim() == 3 and context.shape[0] == x.shape[0] and context.shape[2] == dim:
        return context
    actual = f"{tuple(context.shape)} in {context.dtype}" if is_tensor else type(context).__name__
    raise (ValueError if has_dtype else TypeError)(
        f"context, the second argument, must be features of shape (B, Tk, dim) = ({x.shape[0]}, *, {dim}), "
        f"got {actual}; masks are given by name: key_padding_mask=... or attn_mask=..."
    )
