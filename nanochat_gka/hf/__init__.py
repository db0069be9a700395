"""Our language models in Hugging Face's transformers. Importing this registers them; nothing remote is executed.

import nanochat_gka.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("d20-gka")  # a folder that nanochat_gka.export wrote
tokenizer = AutoTokenizer.from_pretrained("d20-gka")
"""

from trainkit_gka.extras import require, require_version

require(__name__, "hf", "transformers")
require_version(__name__, "hf", "transformers", "5.23")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from nanochat_gka.hf.config import GKAConfig  # noqa: E402
from nanochat_gka.hf.model import GKAForCausalLM  # noqa: E402

__all__ = ["GKAConfig", "GKAForCausalLM"]

AutoConfig.register(GKAConfig.model_type, GKAConfig)
AutoModelForCausalLM.register(GKAConfig, GKAForCausalLM)
