"""What the page shows of a language model: kernel rows over tokens, and the next token, for any scaling of σ."""

import functools
from dataclasses import dataclass

import torch

from nanochat_gka.figures.maps import LayerMaps, extract
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.checkpoints import Loaded
from nanochat_gka.model.gpt import GPT
from runs.explore.scaling import Scaling, scaled
from trainkit_gka.cli import UserError

MAX_CHARACTERS, MAX_TOKENS = 1000, 128
CONTINUATION = Sampling(max_tokens=24, temperature=0)
KEPT = 16  # results that a model remembers


@dataclass(frozen=True)
class Read:
    """What a model did with a text. tokens: as text. probabilities: of the next token, (vocabulary,)."""

    tokens: list[str]
    layers: list[LayerMaps]
    probabilities: torch.Tensor


class LanguageModel:
    """A model and its last results."""

    def __init__(self, loaded: Loaded):
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        shape = loaded.model.config
        self.about = f"{loaded.name}: {shape.attention}, depth {shape.n_layer}, step {loaded.step:,}"
        self.read = functools.lru_cache(KEPT)(self._read)

    @property
    def shape(self) -> tuple[int, int, str]:
        """Layers, heads, tokenizer: what a twin must share."""
        return self.model.config.n_layer, self.model.config.n_head, self.tokenizer.sha256

    @property
    def has_sigma(self) -> bool:
        return bool(self.model.bandwidths())

    def name(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def count(self, text: str) -> int:
        """The number of tokens of a text. Raises UserError if it is too long for the page."""
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the text has {len(text):,} characters; the page takes at most {MAX_CHARACTERS:,}")
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(text)]
        if len(ids) > MAX_TOKENS:
            raise UserError(f"the text has {len(ids)} tokens; the page takes at most {MAX_TOKENS}: shorten it")
        return ids

    def _read(self, text: str, scaling: Scaling) -> Read:
        """Run the model on a text with scaled bandwidths; UserError if it is too long. Cached as `read`."""
        ids, logits = self._ids(text), []
        model = scaled(self.model, _attentions, scaling)
        model.register_forward_hook(lambda module, inputs, output: logits.append(output))
        layers = extract(model, ids)
        return Read([self.name(token) for token in ids], layers, logits[0][0, -1].softmax(-1))

    def row(self, read: Read, layer: int, head: int | None, token: int) -> torch.Tensor:
        """How much the outputs of a head, or the mean of them, take from each token, (T,)."""
        weights = read.layers[layer].reads
        return (weights.mean(0) if head is None else weights[head])[token]

    def continuation(self, text: str, scaling: Scaling) -> str:
        """The most likely next tokens, one after another."""
        self.count(text)
        engine = Engine(scaled(self.model, _attentions, scaling), self.tokenizer, max_rows=1)
        return engine.complete([text], CONTINUATION)[0][0]


def _attentions(model: GPT):
    return model.attentions
