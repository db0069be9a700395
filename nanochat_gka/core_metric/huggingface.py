"""Hugging Face's causal language models on CORE: the same questions and scorer, so that scores compare with ours.

As nanochat's --hf-path does it: the model's own tokenizer, every prompt opened by <|bos|> or <|endoftext|>, long
prompts cut on the left, float32 weights, bfloat16 arithmetic on CUDA. Beyond it: other tokenizers' own BOS, and the
length limit of any model, not of GPT-2 alone.
"""

import contextlib
import hashlib
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import torch

from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.core_metric.score_file import EvaluatedModel
from trainkit_gka import extras
from trainkit_gka.cli import PassingFault, UserError

BOS_TOKENS = ("<|bos|>", "<|endoftext|>")  # the first that a vocabulary has
# Names of the longest sequence in a configuration; the first is ours.
LENGTHS = ("rotary_positions", "max_position_embeddings", "n_positions", "max_seq_len")
UNLIMITED = 2**30


class Causal:
    """A transformers model with what the scorer needs of a GPT.

    Prompts are padded on the right, where a causal model's mask hides the padding.
    """

    def __init__(self, model, device: torch.device):
        self.model, self.device = model.to(device).eval(), device
        self.config = SimpleNamespace(vocab_size=model.get_input_embeddings().num_embeddings)
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


class Encoder:
    """A transformers tokenizer with what questions need. Raises UserError if it has no token that begins a document."""

    def __init__(self, tokenizer, path: str):
        vocabulary, self.tokenizer = tokenizer.get_vocab(), tokenizer
        self.largest = max(vocabulary.values())
        known = [vocabulary[token] for token in (*BOS_TOKENS, tokenizer.bos_token) if token in vocabulary]
        if not known:
            missing = f"neither {' nor '.join(BOS_TOKENS)} nor a BOS token of its own"
            raise UserError(f"the tokenizer of {path} has {missing}, so no document can begin")
        self.bos_id = known[0]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)


def load_hugging_face(path: str, device: torch.device) -> EvaluatedModel:
    """The model and tokenizer in a folder, or of that name on the hub.

    Nothing of it is executed or unpickled: safetensors and known architectures only. Raises UserError if transformers
    is not installed, and for whatever keeps the model from being loaded; PassingFault if the hub does not answer.
    """
    if reason := extras.missing("hf", "transformers"):
        raise UserError(f"--hf-path {path}: {reason}")
    import transformers
    from huggingface_hub.errors import LocalEntryNotFoundError  # no answer, and nothing of an earlier one

    with contextlib.suppress(ImportError):  # older transformers read other models
        importlib.import_module("nanochat_gka.hf")  # ours, trained further or not
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    safely = {"trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **safely)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, use_safetensors=True, **safely
        )
    except Exception as error:  # transformers raises whatever its parts do
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        refused = "no causal language model that can be loaded from safetensors"
        kind = PassingFault if isinstance(error.__cause__, LocalEntryNotFoundError) else UserError
        raise kind(f"--hf-path {path}: {refused} ({reason})") from None
    model.config.use_cache = False
    causal, encoder = Causal(model, device), Encoder(tokenizer, path)
    if encoder.largest >= causal.config.vocab_size:
        embeddings = f"the model has {causal.config.vocab_size} embeddings"
        raise UserError(f"--hf-path {path}: the tokenizer has ids up to {encoder.largest}, {embeddings}")
    shape = model.config.get_text_config()
    lengths = (getattr(shape, key, None) for key in LENGTHS)
    limit = next((length for length in lengths if isinstance(length, int) and length > 1), UNLIMITED)
    name = Path(path).resolve().name if Path(path).is_dir() else path.replace("/", "-")
    count = sum(parameter.numel() for parameter in model.parameters())
    about = f"{name}: {type(model).__name__}, {count:,} parameters"
    about += f", prompts of at most {limit:,} tokens" if limit < UNLIMITED else ""
    return EvaluatedModel(causal, encoder, name, None, _digest(model, tokenizer), limit, about)


def _digest(model, tokenizer) -> str:
    """Identity of weights and vocabulary, whatever files they came from."""
    digest = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
