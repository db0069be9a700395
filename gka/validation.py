"""Checks at the operator's door: a wrong argument is named, with what was expected, before anything is computed."""

import itertools
import math
from typing import Any

import torch

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def check_features_and_mask(features: Three, causal: bool, window: int | None, names: tuple[str, str, str]) -> None:
    """Queries, keys and values that go together, (B, T, H, D) each, and a mask for their lengths: it aligns the last
    query with the last key, so it needs at least as many keys as queries.
    """
    x, keys, values = features
    check_features(names[0], x)
    check_mask(causal, window)
    if keys is not x:
        check_features(names[1], keys, like=x)
    if values is not keys:
        check_features(names[2], values, like=x)
    num_queries, num_keys, num_values = (t.shape[1] for t in features)
    if num_values != num_keys:
        raise ValueError(f"values must have as many tokens as keys, {num_keys}, got {num_values}")
    if (causal or window is not None) and num_keys < num_queries:
        raise ValueError(
            f"keys must have at least as many tokens as the queries, {num_queries}, when causal or window is used, "
            f"got {num_keys}"
        )


def check_features(name: str, t: object, like: torch.Tensor | None = None) -> None:
    """`t` must be a floating (B, T, H, D) tensor, empty in B alone; matching `like` in everything but T if given.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or device.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape (B, T, H, D), got {type(t).__name__}")
    if t.dtype not in FLOATING:
        raise TypeError(f"{name} must be a floating tensor (float64, float32, bfloat16 or float16), got {t.dtype}")
    if t.dim() != 4:
        raise ValueError(f"{name} must have shape (B, T, H, D), got {t.dim()} dimensions: {tuple(t.shape)}")
    if 0 in t.shape[1:]:
        raise ValueError(f"{name} must have tokens, heads and channels, got shape {tuple(t.shape)}")
    if like is None:
        return
    if t.dtype != like.dtype:
        raise TypeError(f"{name} must have the dtype of the queries, {like.dtype}, got {t.dtype}")
    if t.device != like.device:
        raise ValueError(f"{name} must be on the device of the queries, {like.device}, got {t.device}")
    if t.shape[0] != like.shape[0] or t.shape[2:] != like.shape[2:]:
        batch, _, heads, head_dim = like.shape
        expected = f"({batch}, *, {heads}, {head_dim})"
        raise ValueError(f"{name} must have shape (B, T, H, D) = {expected}, got {tuple(t.shape)}")


def check_padding_and_mask(x: torch.Tensor, num_keys: int, options: Any) -> None:
    """Of `Options`: lengths, (B,) whole numbers up to num_keys, or key_padding_mask, (B, Tk) bool; attn_mask, bool or
    float, broadcastable to (B, H, Tq, Tk); or cu_seqlens, (documents + 1,). All on the features' device.
    """
    lengths, key_padding_mask, attn_mask = options.lengths, options.key_padding_mask, options.attn_mask
    batch, num_queries, num_heads, _ = x.shape
    if options.cu_seqlens is not None:
        for name in ("lengths", "key_padding_mask", "attn_mask"):
            if getattr(options, name) is not None:
                raise ValueError(f"cu_seqlens and {name} do not go together: give one of them")
        check_cu_seqlens(options.cu_seqlens, x, num_keys)
    if lengths is not None and key_padding_mask is not None:
        raise ValueError("lengths and key_padding_mask both say which keys are padding: give one of them")
    if lengths is not None:
        _check_tensor("lengths", lengths, x, "(B,)", (batch,), (torch.int64, torch.int32), "int64 or int32")
        if readable(lengths) and not all(0 <= n <= num_keys for n in lengths.tolist()):
            raise ValueError(f"lengths must be from 0 to the number of keys, {num_keys}, got {lengths.tolist()}")
    if key_padding_mask is not None:
        kind = "bool, True for padding (of a mask that is 1 for tokens, ~mask.bool())"
        _check_tensor("key_padding_mask", key_padding_mask, x, "(B, Tk)", (batch, num_keys), (torch.bool,), kind)
    if attn_mask is not None:
        dtypes, kind = (torch.bool, *FLOATING), "bool, True = visible, or float"
        _check_tensor("attn_mask", attn_mask, x, "(B, H, Tq, Tk)", None, dtypes, kind)
        scores = (batch, num_heads, num_queries, num_keys)
        sizes = zip(reversed(attn_mask.shape), reversed(scores))
        if attn_mask.dim() > 4 or any(size not in (1, full) for size, full in sizes):
            hint = "; of one mask for each sequence give mask[:, None]" if attn_mask.dim() == 3 else ""
            raise ValueError(
                f"attn_mask must broadcast to (B, H, Tq, Tk) = {scores}, got {tuple(attn_mask.shape)}{hint}"
            )


def check_cu_seqlens(cu_seqlens: torch.Tensor, x: torch.Tensor, num_keys: int) -> None:
    """cu_seqlens, (documents + 1,) int32 on the features' device, from 0 to the number of tokens and never falling,
    beside one row of tokens that are queries and keys.
    """
    _check_tensor("cu_seqlens", cu_seqlens, x, "(documents + 1,)", None, (torch.int32,), "int32")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape (documents + 1,), got {tuple(cu_seqlens.shape)}")
    batch, num_tokens = x.shape[:2]
    if batch != 1:
        raise ValueError(f"cu_seqlens needs all tokens in one row, x of shape (1, N, H, D), got {tuple(x.shape)}")
    if num_keys != num_tokens:
        raise ValueError(f"cu_seqlens is for keys of the same tokens as the queries, {num_tokens}, got {num_keys}")
    if readable(cu_seqlens):
        check_boundaries(cu_seqlens.tolist(), num_tokens)


def check_boundaries(numbers: list[int], num_tokens: int) -> None:
    """The numbers of cu_seqlens begin with 0, end with num_tokens and never fall."""
    if numbers[0] != 0 or numbers[-1] != num_tokens or any(b < a for a, b in itertools.pairwise(numbers)):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {num_tokens}, got {numbers}")


def _check_tensor(
    name: str, t: object, x: torch.Tensor, form: str, shape: tuple[int, ...] | None, dtypes: tuple, kind: str
) -> None:
    """`t` must be a tensor of one of the dtypes, on the device of x and, unless shape is None, of that shape. form and
    kind: shape and dtypes in words.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {form}, got {type(t).__name__}")
    if t.dtype not in dtypes:
        raise TypeError(f"{name} must be {kind}, got {t.dtype}")
    if shape is not None and tuple(t.shape) != shape:
        raise ValueError(f"{name} must have shape {form} = {shape}, got {tuple(t.shape)}")
    if t.device != x.device:
        raise ValueError(f"{name} must be on the device of the features, {x.device}, got {t.device}")


def check_mask(causal: object, window: object) -> None:
    """causal is a bool; window is None or an int >= 0."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int):
        raise TypeError(f"window must be an int or None, got {type(window).__name__}")
    if window < 0:
        raise ValueError(f"window must be >= 0 (tokens before the query that stay visible) or None, got {window}")


def check_log_sigma(log_sigma: torch.Tensor, x: torch.Tensor) -> None:
    """One finite float32 value per head (float64 also accepted beside float64 features), on the features' device."""
    dtypes = (torch.float32, *[torch.float64] * (x.dtype == torch.float64))
    kind = "float32 whatever the features are"
    _check_tensor("log_sigma", log_sigma, x, "(H,)", (x.shape[2],), dtypes, kind)
    if readable(log_sigma) and not all(map(math.isfinite, values := log_sigma.tolist())):
        raise ValueError(f"log_sigma must be finite, got {values}")


def readable(t: torch.Tensor) -> bool:
    """Whether t's values can be looked at: on an accelerator that would stall every call, in a graph, under torch.func
    and of torch's fake tensors it cannot be done. What is not looked at shows in y.
    """
    return (
        t.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not isinstance(t, torch._subclasses.FakeTensor)
    )


def check_eps(eps: object) -> None:
    """eps is a finite number >= 0."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, got {type(eps).__name__}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and >= 0, got {eps}")


def check_cache_options(x: torch.Tensor, num_keys: int, options: Any) -> None:
    """What `decode_attention` takes beside `gaussian_attention`'s arguments, of its `Options`; all errors are
    ValueErrors.
    """
    batch, num_queries, num_heads, head_dim = x.shape
    channel_scales, lengths = options.channel_scales, options.cache_lengths
    for table in options.rotary or ():
        if head_dim % 2 or table.dim() != 2 or len(table) < num_keys or table.shape[1] * 2 != head_dim:
            expected = f"({num_keys} or more, {head_dim} / 2)"
            raise ValueError(f"rotary must be two tables of {expected} numbers, got {tuple(table.shape)}")
        if table.device != x.device:
            raise ValueError(f"rotary must be on the device of the queries, {x.device}, got {table.device}")
    if channel_scales is not None:
        shape, dtype = tuple(channel_scales.shape), channel_scales.dtype
        if shape != (num_heads, head_dim) or dtype != torch.float32:
            expected = f"(H, D) = ({num_heads}, {head_dim}) in float32"
            raise ValueError(f"channel_scales must be {expected}, got {shape} in {dtype}")
        if channel_scales.device != x.device:
            raise ValueError(f"channel_scales must be on the device of the queries, {x.device}")
    if lengths is not None and not (len(lengths) == batch and all(num_queries <= n <= num_keys for n in lengths)):
        raise ValueError(f"lengths must be {batch} numbers from {num_queries} to {num_keys}, got {list(lengths)}")
    for name in ("key_delays", "value_delays"):
        numbers = getattr(options, name)
        if numbers and not (len(numbers) == num_heads and min(numbers) >= 0 and max(numbers) < 2**31):
            raise ValueError(f"{name} must be {num_heads} numbers from 0 to 2^31 - 1, one a head, got {list(numbers)}")
