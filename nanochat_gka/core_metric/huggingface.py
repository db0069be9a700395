"""Hugging Face's causal language models on CORE: the same questions and scorer, so that scores compare with ours.

As nanochat's --hf-path does it: the model's tokenizer, every prompt opened by <|bos|> or <|endoftext|> (beyond it:
another tokenizer's BOS), long prompts cut on the left, float32 weights, bfloat16 arithmetic on CUDA.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import torch

from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.model.checkpoints import Loaded
from trainkit_gka import extras
from trainkit_gka.checkpoint import fingerprint
from trainkit_gka.cli import PassingFault, UserError

BOS_TOKENS = ("<|bos|>", "<|endoftext|>")  # the first that a vocabulary has
# Names of the longest sequence in a configuration; the first is ours.
LENGTHS = ("rotary_positions", "max_position_embeddings", "n_positions", "max_seq_len")
UNLIMITED = 2**30


class Causal:
    """A transformers model as a GPT for the scorer. Padding is on the right, where a causal mask hides it."""

    def __init__(self, model, device: torch.device):
        self.model, self.device = model.to(device).eval(), device
        self.config = SimpleNamespace(vocab_size=model.get_input_embeddings().num_embeddings)
        lengths = (getattr(model.config.get_text_config(), key, None) for key in LENGTHS)
        limit = next((length for length in lengths if isinstance(length, int) and length > 1), UNLIMITED)
        self.rotary = SimpleNamespace(length=limit)
        self.can_limit_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def hidden(self, ids: torch.Tensor, tree: PromptTree) -> torch.Tensor:
        """Logits (1, n, vocab_size) of the tokens that predict the judged ones."""
        rows = ids[0][tree.copies]
        count = rows.shape[1] - tree.first_query
        options = {"logits_to_keep": count} if self.can_limit_logits else {}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(input_ids=rows, **options).logits
        return logits[:, -count:].flatten(0, 1)[None, tree.output_of_predictor]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()


def load_hugging_face(path: str, device: torch.device) -> Loaded:
    """The model and tokenizer in a folder, or of that name on the hub; nothing of it is executed or unpickled.

    Raises UserError if transformers is not installed, and for whatever keeps the model from being loaded; PassingFault
    if the hub does not answer.
    """
    if reason := extras.missing("hf", "transformers"):
        raise UserError(f"--hf-path {path}: {reason}")
    import transformers
    from huggingface_hub.errors import LocalEntryNotFoundError  # no answer, and nothing of an earlier one

    with contextlib.suppress(ImportError):  # older transformers read other models
        importlib.import_module("nanochat_gka.hf")  # ours, trained further or not
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    weights = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **weights)
    except Exception as error:  # transformers raises whatever its parts do
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        refused = "no causal language model that can be loaded from safetensors"
        kind = PassingFault if isinstance(error.__cause__, LocalEntryNotFoundError) else UserError
        raise kind(f"--hf-path {path}: {refused} ({reason})") from None
    model.config.use_cache = False
    causal = Causal(model, device)
    vocabulary = tokenizer.get_vocab()
    largest = max(vocabulary.values())
    embeddings = causal.config.vocab_size
    if largest >= embeddings:
        problem = f"the tokenizer has ids up to {largest}, the model has {embeddings} embeddings"
        raise UserError(f"--hf-path {path}: {problem}")
    beginnings = [vocabulary[token] for token in (*BOS_TOKENS, tokenizer.bos_token) if token in vocabulary]
    if not beginnings:
        missing = f"neither {' nor '.join(BOS_TOKENS)} nor a BOS token of its own"
        raise UserError(f"the tokenizer of {path} has {missing}, so no document can begin")
    encode = functools.partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    name = Path(path).resolve().name if Path(path).is_dir() else path.replace("/", "-")
    encoder = SimpleNamespace(bos_id=beginnings[0], encode=encode)
    identity = f"{sorted(vocabulary.items())} {fingerprint(model.state_dict())}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return Loaded(causal, encoder, name, step=None, sha256=digest, training={})
