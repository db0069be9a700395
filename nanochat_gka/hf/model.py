"""A GPT as a transformers model: it calls ours, and translates arguments, masks, caches and results."""

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from nanochat_gka.hf.config import GKAConfig
from nanochat_gka.hf.context import PaddedBatch
from nanochat_gka.model.blocks import Rotary
from nanochat_gka.model.gpt import GPT

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # from 5.24 on: cache
NOT_AVAILABLE = {
    "inputs_embeds": "value embeddings are looked up by token; pass input_ids",
    "output_hidden_states": "call model.gpt.hidden(ids) for the last ones",
    "output_attentions": "fused operators do not build them; nanochat_gka.figures.maps computes them",
}


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
        shape = config.shape()
        self.gpt = GPT(shape)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments, **options):
        """As transformers', from safetensors alone: nothing is unpickled. Raises ValueError for weights left over."""
        with_info = {"use_safetensors": True, **options, "output_loading_info": True}
        model, info = super().from_pretrained(*arguments, **with_info)
        if unknown := sorted(info["unexpected_keys"]):
            count = f"{len(unknown)} weight{'s' if len(unknown) > 1 else ''}"
            raise ValueError(f"the file has {count} that this model does not have, first {unknown[0]}")
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
            advice = "copy the model or export it again"
            raise ValueError(f"{len(missing)} of {len(weights)} weights are missing, first {missing[0]}; {advice}")

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
        -100 ignored; they are shifted here, and the loss is their mean cross-entropy in nats. cache: the same as
        past_key_values, by its name from transformers 5.24 on. others: what transformers' loss takes. Raises ValueError
        for what the model cannot give.
        """
        for name, advice in NOT_AVAILABLE.items():
            value = loss_arguments.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name} is not available: {advice}")
        if input_ids is None or input_ids.ndim != 2:
            got = "none" if input_ids is None else f"a tensor of shape {tuple(input_ids.shape)}"
            raise ValueError(f"input_ids must be (rows, tokens), got {got}")
        if attention_mask is not None and attention_mask.shape[0] != len(input_ids):
            raise ValueError(f"attention_mask has {len(attention_mask)} rows, input_ids {len(input_ids)}")
        if input_ids.numel():
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
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
