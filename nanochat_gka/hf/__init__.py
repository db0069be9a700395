"""Our language models in Hugging Face's transformers. Importing this registers them; nothing remote is executed.

AutoModelForCausalLM.from_pretrained(folder) then reads a folder that nanochat_gka.export wrote.
"""

from trainkit_gka.extras import require, require_version

require(__name__, "hf", "transformers")
require_version(__name__, "hf", "transformers", "5.23")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from nanochat_gka.hf.model import GKAConfig, GKAForCausalLM  # noqa: E402

__all__ = ["GKAConfig", "GKAForCausalLM"]

AutoConfig.register(GKAConfig.model_type, GKAConfig)
AutoModelForCausalLM.register(GKAConfig, GKAForCausalLM)
