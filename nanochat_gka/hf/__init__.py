"""Our language models in Hugging Face's transformers. Importing this registers them; nothing remote is executed.

import nanochat_gka.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("d20-gka")  # a folder that nanochat_gka.export wrote
tokenizer = AutoTokenizer.from_pretrained("d20-gka")
"""

from trainkit.cli import UserError

try:
    from transformers import AutoConfig, AutoModelForCausalLM

    from nanochat_gka.hf.config import GKAConfig
    from nanochat_gka.hf.model import GKAForCausalLM
except ImportError as error:
    if not (error.name or "").startswith("transformers"):
        raise
    raise UserError('nanochat_gka.hf needs transformers 5: pip install "gka[hf]"') from None

__all__ = ["GKAConfig", "GKAForCausalLM"]

AutoConfig.register(GKAConfig.model_type, GKAConfig)
AutoModelForCausalLM.register(GKAConfig, GKAForCausalLM)
