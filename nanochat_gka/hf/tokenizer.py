"""What transformers asks for the tokenizer of a folder that has no tokenizer_config.json, as our first exports."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast


class UnnamedTokenizer(PreTrainedTokenizerFast):
    """Transformers' own tokenizer, unless the folder's tokenizer.json is in our form, which it cannot read."""

    @classmethod
    def from_pretrained(cls, folder, *arguments, **options):
        """As transformers'. Raises ValueError for an export from before 2026-11-22."""
        file = Path(folder) / "tokenizer.json"
        if file.is_file() and "added_tokens" not in json.loads(file.read_text()):
            advice = "export the model again (python -m nanochat_gka.export)"
            raise ValueError(f"{file} is in our own form, from before 2026-11-22, not Hugging Face's: {advice}")
        return PreTrainedTokenizerFast.from_pretrained(folder, *arguments, **options)
