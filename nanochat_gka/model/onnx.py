"""A language model as ONNX: tokens and the cache of those before in, logits and the longer cache out.

An empty cache makes it the prefill. All rows of a call have the same number of tokens. In GKA layers the cache is one
tensor, as in `cache.KVCache`. Attention is written as plain matrix operations with a mask, which every runtime knows.
Legend: B rows, T new tokens, P past tokens, n = P + T, H heads, D head_dim.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from gka.bandwidth import inverse_variance
from gka.masking import Mask
from nanochat_gka.model.attention import Attention
from nanochat_gka.model.context import Context
from nanochat_gka.model.gpt import GPT
from trainkit_gka import onnx

MOST_ROWS = 4096  # of a batch, for the exporter; runtimes do not check it
TOKENS, LOGITS = "ids", "logits"


class PlainCache(Context):
    """The context of T tokens of every row after P past ones.

    It reads `past` and makes `present`: lists of tensors (B, P, H, D) and (B, n, H, D), layer by layer.
    """

    longest = 0  # lengths are free: the caller keeps them within the rotary table

    def __init__(self, past: list[torch.Tensor]):
        self.past, self.present = list(past), []
        self.num_past, self.masks = past[0].shape[1], {}

    def begin(self, num_tokens):
        self.everyone = torch.arange(self.num_past + num_tokens)[None]
        self.positions = self.everyone[:, self.num_past :]

    def attend(self, layer: Attention, rotary, queries, new):
        first, count = len(self.present), layer.cached_tensors
        stored = tuple(torch.cat(pair, 1) for pair in zip(self.past[first : first + count], new[:count]))
        self.present += stored
        keys, values = layer.keys_and_values(rotary, self.everyone.shape[1], stored)
        if layer.kind.has_bandwidth:  # features of constant norm: plain attention (docs/mathematics.md)
            queries = queries * inverse_variance(layer.log_sigma)[:, None]
        else:
            queries = queries * layer.config.head_dim**-0.5
        queries, keys, values = (t.transpose(1, 2) for t in (queries, keys, values))
        weights = (queries @ keys.transpose(2, 3) + self._mask(layer.window)).softmax(-1)
        return (weights @ values).transpose(1, 2)

    def _mask(self, window: int) -> torch.Tensor:
        """0 where a query sees a key, -inf elsewhere, (T, n)."""
        if window not in self.masks:
            visible = Mask(causal=True, window=window).visible(self.positions[0][:, None], self.everyone)
            self.masks[window] = torch.where(visible, 0.0, -torch.inf)
        return self.masks[window]


@torch.no_grad()
def write(model: GPT, folder: Path, about: dict[str, Any]) -> Path:
    """Write model.onnx to `folder` and return its path.

    Inputs: ids (B, T) int64 and past.LAYER.NUMBER (B, P, H, D) float32, P 0 or more. Outputs: logits (B, T, vocab_size)
    float32 and present.LAYER.NUMBER (B, P + T, H, D), the next call's past. P + T is at most the rotary table, 10 times
    the training length. about: the file's metadata. Raises UserError if the extra is not installed, or if the
    file's logits are not the model's; it is deleted then.
    """
    simple = copy.deepcopy(model).cpu().float().eval()
    simple.rounded_to = None
    simple.rotary.cos, simple.rotary.sin = simple.rotary.cos.float(), simple.rotary.sin.float()
    rows, tokens, past = Dim("rows", max=MOST_ROWS), Dim("tokens", max=model.rotary.length), Dim("past")
    ids = torch.randint(model.config.vocab_size, (2, 5))
    cache = [torch.randn_like(t) for t in empty_cache(model, 2, 3)]
    names = cache_names(model)
    inputs, outputs = [TOKENS, *(f"past.{name}" for name in names)], [LOGITS, *(f"present.{name}" for name in names)]
    shapes = ({0: rows, 1: tokens}, [{0: rows, 1: past}] * len(cache))
    path = folder / onnx.MODEL
    onnx.write(Step(simple), (ids, cache), path, (inputs, outputs), shapes, about)
    onnx.check(path, simple(ids), ids, *empty_cache(model, 2))
    return path


class Step(nn.Module):
    """(ids (B, T), past...) -> (logits (B, T, vocab_size), present...)."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, past: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        cache = PlainCache(past)
        logits = self.model(ids, context=cache)
        return logits, *cache.present


def cache_names(model: GPT) -> list[str]:
    """The cache's tensors in order, LAYER.NUMBER each; inputs are past.NAME, outputs present.NAME."""
    return [f"{attn.layer}.{number}" for attn in model.attentions for number in range(attn.cached_tensors)]


def empty_cache(model: GPT, rows: int, tokens: int = 0) -> list[torch.Tensor]:
    """The cache's tensors, (rows, tokens, H, D) of zeros."""
    shape = (rows, tokens, model.config.n_head, model.config.head_dim)
    return [torch.zeros(shape) for _ in cache_names(model)]
