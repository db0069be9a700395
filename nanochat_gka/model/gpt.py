"""The GPT: embed -> blocks -> logits.

Unusual in it, all of it nanochat's: no biases, no learned norms, a norm right after the embedding, every block sees the
embedding again (x0_lambdas), relu^2, value embeddings on every second layer, logits capped at +-20.

A softmax model has nanochat's parameter names, initialisation and arithmetic: its checkpoints give the same logits.
"""

import torch
from torch import nn

from nanochat_gka.model.attention import Attention, build_attention
from nanochat_gka.model.blocks import MLP, ROTARY_OVERALLOCATION, Linear, Rotary, fill_uniform, norm
from nanochat_gka.model.cache import KVCache
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context, PackedRows
from nanochat_gka.model.loss import capped, cross_entropy


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = build_attention(config, layer)
        self.mlp = MLP(config.n_embd)

    def forward(self, x, value_embedding, rotary: Rotary, context: Context) -> torch.Tensor:
        """(B, T, n_embd) to the outputs of the tokens that the context selects, (B, T, n_embd) for all."""
        x = context.select(self.attn, x) + self.attn(norm(x), value_embedding, rotary, context)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Build on the meta device or a real one, then call `init_weights`."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        rows, width = config.padded_vocab_size, config.n_embd
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(rows, width), "h": blocks})
        self.lm_head = Linear(width, rows)
        layers = [layer for layer in range(config.n_layer) if config.has_value_embedding(layer)]
        self.value_embeds = nn.ModuleDict({str(layer): nn.Embedding(rows, width) for layer in layers})
        self.rotary = Rotary(config.head_dim, config.sequence_len)
        self.rounded_to: torch.dtype | None = None  # dtype of activations; None: the tables'

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill every parameter and buffer, drawing in nanochat's order; on CUDA embedding tables become bfloat16."""
        nn.init.normal_(self.transformer.wte.weight, std=1.0)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        for block in self.transformer.h:
            block.attn.init_weights()
            block.mlp.init_weights()
        self.resid_lambdas.fill_(1.0)
        self.x0_lambdas.fill_(0.1)
        for embedding in self.value_embeds.values():
            fill_uniform(embedding.weight, self.config.n_embd)
        self.rotary.init_weights()
        if self.device.type == "cuda":
            self.embeddings_to(torch.bfloat16)

    def embeddings_to(self, dtype: torch.dtype) -> None:
        """Set the dtype of the embedding tables, which is the dtype of everything between them and the logits."""
        for embedding in (self.transformer.wte, *self.value_embeds.values()):
            embedding.to(dtype)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Set the dtype of everything between the embedding tables and the logits. Matrices stay float32.

        On CUDA the tables have it too, as upstream's. On a CPU they stay float32: there the gradient of a bfloat16
        table is summed in bfloat16, and a frequent token's stops growing after some hundred addends.
        """
        if self.device.type == "cuda":
            self.embeddings_to(dtype)
        else:
            self.rounded_to = dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of everything between the embedding tables and the logits."""
        return self.rounded_to or self.transformer.wte.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.transformer.wte.weight.device

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        reduction: str = "mean",
        context: Context | None = None,
    ) -> torch.Tensor:
        """Capped float32 logits of token ids (B, T) or, with targets (B, T), their cross-entropy in nats.

        Targets of -1 are ignored. reduction: mean, sum or none, as in torch. context: None for whole rows, whose
        documents are apart if the configuration says so; a cache from `new_cache` for tokens that follow those in its
        rows, and join them. Returns logits (B, T, vocab_size), of the tokens that the context selects; or the loss.
        Raises ValueError if positions exceed the rotary table.
        """
        hidden = self.hidden(ids, context)
        return self.logits(hidden) if targets is None else self.loss(hidden, targets, reduction)

    def hidden(self, ids: torch.Tensor, context: Context | None = None) -> torch.Tensor:
        """The first part of `forward`: the head's input, (B, T, n_embd). For callers who need few of the logits."""
        if context is None:
            is_packed = self.config.document_start >= 0 and len(ids)
            context = PackedRows(ids, self.config.document_start) if is_packed else Context()
        context.begin(ids.shape[1])
        if context.longest > self.rotary.length:
            limit = f"at most {self.rotary.length} tokens ({ROTARY_OVERALLOCATION} x sequence_len)"
            raise ValueError(f"ids must have {limit}, got {context.longest}")
        x = x0 = norm(self.transformer.wte(ids).to(self.dtype))
        for layer, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[layer].to(x.dtype) * x + self.x0_lambdas[layer].to(x.dtype) * x0
            tables = self.value_embeds
            value_embedding = tables[str(layer)](ids).to(x.dtype) if str(layer) in tables else None
            x = block(x, value_embedding, self.rotary, context)
        context.end()
        return norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The second part of `forward`: capped float32 logits (..., vocab_size) of hidden states (..., n_embd)."""
        return capped(self.raw_logits(hidden))

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """The other second part: the cross-entropy of hidden states (B, T, n_embd) and targets (B, T), in nats."""
        return cross_entropy(self.raw_logits(hidden).flatten(0, 1), targets.flatten(), reduction)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits before the cap, in the dtype of the hidden states."""
        return self.lm_head(hidden)[..., : self.config.vocab_size]

    def new_cache(
        self, rows: int, capacity: int, in_use: int | None = None, keep_keys: bool = False, last_only: bool = False
    ) -> KVCache:
        """An empty cache for `rows` sequences of at most `capacity` tokens, in the dtype of the activations.

        in_use: rows to begin with, None for all. keep_keys: store keys too in layers that otherwise derive them from
        values; ValueError if there are none. last_only: the model returns the last token's logits alone.
        """
        if keep_keys and not self.derives_keys:
            raise ValueError("keep_keys is for gka layers whose values are not rotated, and this model has none")
        shape = (rows, capacity, self.config.n_head, self.config.head_dim)
        counts = [attn.cached_tensors + (keep_keys and attn.derives_keys) for attn in self.attentions]
        layers = [tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(n)) for n in counts]
        return KVCache(layers, rows if in_use is None else in_use, last_only)

    @property
    def attentions(self) -> list[Attention]:
        """The attention of every layer."""
        return [block.attn for block in self.transformer.h]

    @property
    def derives_keys(self) -> bool:
        """Whether some layer derives keys from values while decoding, unless a cache keeps them."""
        return any(attn.derives_keys for attn in self.attentions)

    def operators(self) -> list[str]:
        """The implementations of the operator that train this model's layers, without repetition."""
        return sorted({attn.operator(self.dtype) for attn in self.attentions} - {None})

    def bandwidths(self) -> dict[int, torch.Tensor]:
        """Learned sigma per head, (H,), of every layer that has them."""
        return {a.layer: a.log_sigma.detach().exp() for a in self.attentions if a.kind.has_bandwidth}


def build(config: GPTConfig, device: torch.device | str) -> GPT:
    """A freshly initialised model on `device`; draws from the device's global generator."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    return model
