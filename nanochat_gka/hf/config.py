"""The configuration of a model as transformers reads it from an exported config.json."""

from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from nanochat_gka.model.blocks import ROTARY_OVERALLOCATION
from nanochat_gka.model.checkpoints import FACTS_OF_THE_FILES, MODEL_TYPE
from nanochat_gka.model.config import GPTConfig


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

    @property
    def vocab_size(self) -> int:
        return self.shape().vocab_size

    @property
    def hidden_size(self) -> int:
        return self.shape().n_embd

    @property
    def num_hidden_layers(self) -> int:
        return self.shape().n_layer

    @property
    def num_attention_heads(self) -> int:
        return self.shape().n_head

    @property
    def head_dim(self) -> int:
        return self.shape().head_dim

    @property
    def max_position_embeddings(self) -> int:
        return self.shape().sequence_len

    @property
    def rotary_positions(self) -> int:
        """Where the model's positions end: far beyond the length it was trained on."""
        return ROTARY_OVERALLOCATION * self.shape().sequence_len
