"""The GPT: embed -> blocks -> logits. Unusual in it (all nanochat's): no biases, no learned norms, norm right after the embedding,
every block sees the embedding again (x0_lambdas), relu^2, value embeddings on every second layer, logits capped at +-20.

A softmax model has nanochat's parameter names, initialisation and arithmetic, so its checkpoints load and give the same logits.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanochat_gka.model.attention import ATTENTION, Past
from nanochat_gka.model.blocks import MLP, Linear, Rotary, fill_uniform, norm
from nanochat_gka.model.cache import KVCache
from nanochat_gka.model.config import GPTConfig

LOGIT_CAP = 20.0
IGNORE_INDEX = -1


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = ATTENTION[config.layer_attention(layer)](config, layer)
        self.mlp = MLP(config.n_embd)

    def forward(self, x, value_embedding, rotary, past: Past | None = None, wanted_only: bool = False):
        """(B, T, n_embd) to the same, or, wanted_only, to the tokens that `past` wants, (1, n, n_embd)."""
        mixed = self.attn(norm(x), value_embedding, rotary, past, wanted_only)
        x = (x[:, past.wanted] if wanted_only else x) + mixed
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Build on the meta device or a real one, then call `init_weights`."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        rows, width = config.padded_vocab_size, config.n_embd
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(rows, width),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            }
        )
        self.lm_head = Linear(width, rows)
        layers = [layer for layer in range(config.n_layer) if config.has_value_embedding(layer)]
        self.value_embeds = nn.ModuleDict({str(layer): nn.Embedding(rows, width) for layer in layers})
        self.rotary = Rotary(config.head_dim, config.sequence_len)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill every parameter and buffer, drawing in nanochat's order; on CUDA the embedding tables become bfloat16."""
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
        """Set the dtype of the embedding tables, which is the dtype everything between them and the logits is computed in."""
        for embedding in (self.transformer.wte, *self.value_embeds.values()):
            embedding.to(dtype)

    @property
    def device(self) -> torch.device:
        return self.transformer.wte.weight.device

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        reduction: str = "mean",
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """ids: (B, T) token ids. Returns capped float32 logits (B, T, vocab_size), or, with targets (B, T), their cross-entropy in nats.

        Targets of -1 are ignored. reduction: mean, sum or none, as in torch. With a cache the tokens follow those in its rows, and join them.
        Raises ValueError if positions exceed the rotary table.
        """
        logits = self.logits(self.hidden(ids, cache.begin(ids.shape[1]) if cache is not None else None))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)

    def hidden(self, ids: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """What the head reads, (B, T, n_embd), of token ids (B, T); past: None for whole sequences. Raises ValueError as `forward`.

        Where `past` wants some tokens only, the last layer leaves out the others: (1, n, n_embd).
        """
        longest = ids.shape[1] if past is None else past.longest
        if longest > self.rotary.length:
            raise ValueError(f"ids must have at most {self.rotary.length} tokens (10 x sequence_len), got {longest}")
        x = x0 = norm(self.transformer.wte(ids))
        last = self.config.n_layer - 1
        for layer, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[layer].to(x.dtype) * x + self.x0_lambdas[layer].to(x.dtype) * x0
            value_embedding = self.value_embeds[str(layer)](ids) if str(layer) in self.value_embeds else None
            x = block(
                x,
                value_embedding,
                self.rotary,
                past,
                wanted_only=layer == last and past is not None and past.wanted is not None,
            )
        if past is not None:
            past.end()
        return norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Capped float32 logits (..., vocab_size) of hidden states (..., n_embd)."""
        logits = self.lm_head(hidden)[..., : self.config.vocab_size].float()
        return LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)

    def operators(self) -> list[str]:
        """Which implementations of the operator train this model's gka layers where they are, without repetition."""
        layers = [block.attn for block in self.transformer.h if hasattr(block.attn, "chosen_impl")]
        return sorted({layer.chosen_impl(self.transformer.wte.weight.dtype) for layer in layers})

    @property
    def derives_keys(self) -> bool:
        """Whether decoding computes keys again in some layer (`GKAAttention.derives_keys`): a cache may keep them for speed."""
        return any(block.attn.derives_keys for block in self.transformer.h)

    def bandwidths(self) -> dict[int, torch.Tensor]:
        """Learned sigma per head, (H,), of every gka layer."""
        return {
            i: block.attn.log_sigma.detach().exp()
            for i, block in enumerate(self.transformer.h)
            if hasattr(block.attn, "log_sigma")
        }


def build(config: GPTConfig, device: torch.device | str) -> GPT:
    """A freshly initialised model on `device`; draws from the device's global generator."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    return model
