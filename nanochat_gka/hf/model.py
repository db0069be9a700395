"""A GPT as a transformers model: it calls ours, and translates arguments, masks, caches and results.

Legend: B rows, T tokens of the pass in each, n tokens so far, padding included, H heads, D head_dim.
"""

from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from nanochat_gka.model.blocks import ROTARY_OVERALLOCATION, Rotary
from nanochat_gka.model.checkpoints import FACTS_OF_THE_FILES, MODEL_TYPE
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context, Tensors, map_distinct
from nanochat_gka.model.gpt import GPT
from trainkit_gka.exports import check_files

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # from 5.24 on: cache
LAYERS = (DynamicLayer, StaticLayer)  # these and no subclass: others cut, quantise or compress what they are given
NOT_AVAILABLE = {
    "inputs_embeds": "value embeddings are looked up by token; pass input_ids",
    "output_hidden_states": "call model.gpt.hidden(ids) for the last ones",
    "output_attentions": "fused operators do not build them; nanochat_gka.figures.maps computes them",
}


def _of_shape(field: str) -> property:
    return property(lambda config: getattr(config.shape(), field))


class GKAConfig(PreTrainedConfig):
    """A model's shape, `GPTConfig`, in the field `model`; where it comes from in `name`, `step` and `training`.

    What the export says of its files and weights is left out: it would be wrong once the model is trained further.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    model: dict[str, Any] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **settings):
        """Raises ValueError for settings of the model that are given beside `model`, where nothing would read them."""
        names = {field.name for field in fields(GPTConfig)}
        # The list of kinds, `attention`, is a fact of the file.
        if stray := sorted(name for name, value in settings.items() if name in names and not isinstance(value, list)):
            raise ValueError(f"{', '.join(stray)} are settings of the model: give them in model={{...}}")
        super().__post_init__(**{key: value for key, value in settings.items() if key not in FACTS_OF_THE_FILES})

    def shape(self) -> GPTConfig:
        """The model's shape; nanochat's defaults without one. Raises TypeError or ValueError for an impossible one."""
        return GPTConfig.from_saved(self.model or {})

    # What generate(), pipelines and other libraries ask of any configuration.
    vocab_size = _of_shape("vocab_size")
    hidden_size = _of_shape("n_embd")
    num_hidden_layers = _of_shape("n_layer")
    num_attention_heads = _of_shape("n_head")
    head_dim = _of_shape("head_dim")
    max_position_embeddings = _of_shape("sequence_len")

    @property
    def rotary_positions(self) -> int:
        """Where the model's positions end: far beyond the length it was trained on."""
        return ROTARY_OVERALLOCATION * self.shape().sequence_len


class PaddedBatch(Context):
    """The context of `model(ids, context=batch)`, ids (B, T), for one pass.

    cache: a transformers cache that holds the past. mask: (B, n), 0 for padding. positions: (1 or B, T), what the
    caller takes positions to be, which is checked. keep: how many last tokens of each row the model returns; 0 for all.
    A layer that stores one tensor (GKA) keeps it as a cache's keys, beside values of no width: half the bytes.
    """

    def __init__(self, cache: Cache | None, mask: torch.Tensor | None, positions: torch.Tensor | None, keep: int):
        self.cache, self.mask, self.stated, self.keep = cache, mask, positions, keep
        for layer in cache.layers if cache is not None else ():
            if type(layer) not in LAYERS:
                usable = "DynamicCache (the default), StaticCache and their offloaded kinds hold what this model stores"
                raise ValueError(f"{usable}, got a cache with a {type(layer).__name__}")

    def begin(self, num_tokens):
        """Raises ValueError for a mask or positions that rows padded on one side cannot have, or for a full cache."""
        self.seen = int(self.cache.get_seq_length()) if self.cache is not None else 0
        self.total = self.seen + num_tokens
        room = self.cache.get_max_length() if self.cache is not None and self.cache.layers else -1
        if 0 < room < self.total:
            raise ValueError(f"the cache holds {room} tokens a row, got {self.total}")
        pads = padding(self.mask, self.total)
        self.longest, self.positions = self.total - min(pads, default=0), slice(self.seen, self.total)
        every = torch.arange(self.seen, self.total, device=self.mask.device if pads else None)
        if any(pads):
            every = (every - torch.tensor(pads, device=every.device)[:, None]).clamp(min=0)
            self.positions = every
        if self.stated is not None:
            real = self.mask is None or self.mask[:, self.seen : self.total] != 0  # padding may have any position
            if bool(((self.stated != every.to(self.stated.device)) & real).any()):
                advice = "rows that hold several documents are not supported: give each document a row"
                raise ValueError(f"position_ids must count the tokens of each row from its first one ({advice})")
        # Neighbours with as much padding, and how much that is.
        parts = [(list(rows), pad) for pad, rows in groupby(range(len(pads)), key=pads.__getitem__)]
        self.groups = [(slice(rows[0], rows[-1] + 1), pad) for rows, pad in parts] or [(slice(None), 0)]

    def attend(self, layer, rotary, queries, new):
        stored = self._store(layer, new)
        if self.keep and layer.is_last:
            queries = queries[:, -self.keep :]
        mixed = []
        for rows, pad in self.groups:
            tokens = min(new[0].shape[1], self.total - pad)  # of this pass that are not padding
            if tokens <= 0:
                mixed.append(torch.zeros_like(queries[rows]))
                continue
            real, *visible = map_distinct(lambda t, rows=rows, tokens=tokens: t[rows, -tokens:], queries, *new)
            if self.seen > pad:
                visible = [tensor[rows, pad : self.total] for tensor in stored]
            out = layer.attend(rotary, real, tuple(visible))
            mixed.append(F.pad(out, (0, 0, 0, 0, queries.shape[1] - out.shape[1], 0)))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def select(self, layer, x):
        return x[:, -self.keep :] if self.keep and layer.is_last else x

    def _store(self, layer, new: Tensors) -> Tensors:
        """Put what a layer must keep of the new tokens into the cache; returns what it holds, (B, n or more, H, D)."""
        if self.cache is None:
            return new
        tensors = [tensor.transpose(1, 2) for tensor in new[: layer.cached_tensors]]
        if len(tensors) > 2:
            raise ValueError(f"a transformers cache has two tensors a layer, layer {layer.layer} stores {len(tensors)}")
        values = tensors[1] if len(tensors) == 2 else tensors[0][..., :0]
        content = self.cache.update(tensors[0], values, layer.layer)
        return tuple(tensor.transpose(1, 2) for tensor in content[: len(tensors)])


def padding(mask: torch.Tensor | None, total: int) -> list[int]:
    """Columns of padding on the left of each row of a mask, (B, total); [] without a mask.

    Padding on the right needs nothing: no token attends to later ones. Raises ValueError for any other mask.
    """
    if mask is None:
        return []
    if mask.ndim != 2 or mask.shape[1] != total:
        raise ValueError(f"attention_mask must be (rows, {total}), past tokens included, got {tuple(mask.shape)}")
    real = (mask != 0).int()
    starts = (F.pad(real, (1, 0)).diff(dim=1) == 1).sum(1)
    if bool((starts > 1).any()):
        raise ValueError("attention_mask must not hide tokens between others: pad on the left (padding_side='left')")
    return torch.where(starts == 0, total, real.argmax(dim=1)).tolist()


class GKAForCausalLM(PreTrainedModel, GenerationMixin):
    """Any model of this project (softmax, GKA, VLT, hybrids) for generate(), pipelines, Trainer, PEFT and accelerate.

    `gpt` is ours. Other weights than a GPT's are not accepted, nor fewer.
    """

    config_class = GKAConfig
    base_model_prefix = "gpt"
    _supports_sdpa = True  # scripts ask for it; which operator runs is the layer's own choice
    _no_split_modules = ("GPT",)  # a forward pass mixes tensors of all layers: accelerate places them together

    def __init__(self, config: GKAConfig):
        super().__init__(config)
        self.gpt = GPT(config.shape())
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments, **options):
        """As transformers', from safetensors alone: nothing is unpickled.

        Raises ValueError for weights left over, UserError for an exported folder that is damaged.
        """
        check_files(Path(str((*arguments, options.get("pretrained_model_name_or_path"))[0])))
        with_info = {"use_safetensors": True, **options, "output_loading_info": True}
        model, info = super().from_pretrained(*arguments, **with_info)
        if unknown := sorted(info["unexpected_keys"]):
            raise ValueError(f"the file has {len(unknown)} unknown weights, first {unknown[0]}")
        return (model, info) if options.get("output_loading_info") else model

    def _init_weights(self, module):
        """Fill what was not read from a file: the rotary tables, or a whole new model."""
        if isinstance(module, Rotary):
            module.init_weights()
            return
        weights = dict(self.gpt.named_parameters())  # on the meta device: they are read from the disk when needed
        missing = [name for name, w in weights.items() if not (hasattr(w, "_is_hf_initialized") or w.is_meta)]
        if len(missing) == len(weights):
            if module is self.gpt:
                self.gpt.init_weights()
        elif missing:
            problem = f"{len(missing)} of {len(weights)} weights are missing, first {missing[0]}"
            raise ValueError(f"{problem}; copy the model or export it again")

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        cache: Cache | None = None,
        **loss_arguments,
    ) -> CausalLMOutputWithPast:
        """Capped float32 logits (B, T, vocab_size) of token ids (B, T), or of the `logits_to_keep` last.

        attention_mask: (B, past and new tokens), 0 for padding, on the left where text is generated. labels: (B, T),
        -100 ignored; they are shifted here, and the loss is their mean cross-entropy in nats. cache: past_key_values by
        its name from transformers 5.24 on. Raises ValueError for what the model cannot give.
        """
        for name, advice in NOT_AVAILABLE.items():
            value = loss_arguments.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name} is not available: {advice}")
        if input_ids is None or input_ids.ndim != 2:
            raise ValueError(f"input_ids must be (rows, tokens), got {getattr(input_ids, 'shape', None)}")
        if attention_mask is not None and attention_mask.shape[0] != len(input_ids):
            raise ValueError(f"attention_mask has {len(attention_mask)} rows, input_ids {len(input_ids)}")
        if input_ids.numel():
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        cache = past_key_values if cache is None else cache
        if cache is None and (use_cache or (use_cache is None and self.config.use_cache and not self.training)):
            cache = DynamicCache(config=self.config)
        keep = logits_to_keep if isinstance(logits_to_keep, int) else 0
        logits = self.gpt(input_ids, context=PaddedBatch(cache, attention_mask, position_ids, keep))
        if not isinstance(logits_to_keep, int):
            logits = logits[:, logits_to_keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    def get_input_embeddings(self):
        return self.gpt.transformer.wte

    def set_input_embeddings(self, value):
        self.gpt.transformer.wte = value

    def get_output_embeddings(self):
        return self.gpt.lm_head

    def resize_token_embeddings(self, new_num_tokens=None, *arguments, **options):
        """Returns the embedding as it is. Raises ValueError for another size than the vocabulary's."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(f"the vocabulary keeps its size, {self.config.vocab_size}: value embeddings share it")
        return self.get_input_embeddings()

    @staticmethod
    def create_masks_for_generate(attention_mask=None, **arguments):
        """The mask as it is, where transformers would build one of all pairs of tokens for a static cache."""
        return attention_mask

    def _valid_auto_compile_criteria(self, *arguments) -> bool:
        return False  # lengths are numbers in the code: every new token would compile again
