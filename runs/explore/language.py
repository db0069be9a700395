"""What the page shows of a language model: kernel rows over tokens, and the next token, for any scaling of σ."""

import functools
from dataclasses import dataclass

import torch

from nanochat_gka.figures.maps import LayerMaps, extract
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.checkpoints import Loaded
from nanochat_gka.model.gpt import GPT
from runs.explore import markup
from runs.explore.scaling import Scaling, before_and_after, scaled, sigma_in_words
from trainkit_gka.cli import UserError

MAX_CHARACTERS, MAX_TOKENS = 1000, 128
CONTINUATION = Sampling(max_tokens=24, temperature=0)
NEXT, NAMED = 8, 4  # tokens that are listed: likely to come next, and read most
KEPT = 16  # results that a model remembers


@dataclass(frozen=True)
class Read:
    """What a model did with a text. tokens: as they are shown. probabilities: of the next token, (vocabulary,)."""

    tokens: list[str]
    layers: list[LayerMaps]
    probabilities: torch.Tensor


class LanguageModel:
    """A model and its last results."""

    def __init__(self, loaded: Loaded):
        self.model, self.tokenizer, config = loaded.model, loaded.tokenizer, loaded.model.config
        self.about = f"{loaded.name}: {config.attention}, depth {config.n_layer}, step {loaded.step:,}"
        self.shape = config.n_layer, config.n_head, loaded.tokenizer.sha256  # what a twin must share
        self.has_sigma = bool(loaded.model.bandwidths())
        self.read = functools.lru_cache(KEPT)(self._read)

    def name(self, token: int) -> str:
        """A token whose spaces and line breaks can be seen."""
        return self.tokenizer.decode([token]).replace(" ", "␣").replace("\n", "⏎") or "∅"

    def ids(self, text: str) -> list[int]:
        """The tokens of a text. Raises UserError if it is too long for the page."""
        if len(text) > MAX_CHARACTERS:
            raise UserError(f"the text has {len(text):,} characters; the page takes at most {MAX_CHARACTERS:,}")
        ids = [self.tokenizer.bos_id, *self.tokenizer.encode(text)]
        if len(ids) > MAX_TOKENS:
            raise UserError(f"the text has {len(ids)} tokens; the page takes at most {MAX_TOKENS}: shorten it")
        return ids

    def _scaled(self, scaling: Scaling) -> GPT:
        return scaled(self.model, self.model.attentions, scaling)

    @torch.inference_mode()
    def _read(self, text: str, scaling: Scaling) -> Read:
        """Run the model on a text with scaled bandwidths; UserError if it is too long. Cached as `read`."""
        ids, model = self.ids(text), self._scaled(scaling)
        probabilities = model(torch.tensor([ids]))[0, -1].softmax(-1)
        return Read([self.name(token) for token in ids], extract(model, ids), probabilities)

    def show(self, text: str, token: float, layer: int, head: int | None, scaling: Scaling) -> list[str]:
        """The tokens in the colours of a row of W, what the row says, and the likeliest next tokens. token: from 1.

        The row is how much the outputs of a head, or the mean of them, take from each token.
        """
        read = self.read(text, scaling)
        place, maps = min(int(token), len(read.tokens)) - 1, read.layers[layer]
        row = (maps.reads.mean(0) if head is None else maps.reads[head])[place]
        most = row.topk(min(NAMED, place + 1))
        shares = ", ".join(f"“{read.tokens[index]}” {row[index]:.3f}" for index in most.indices)
        note = f"Token {place + 1}, “{read.tokens[place]}”, takes most from: {shares}. "
        note += sigma_in_words(maps, head)
        columns = before_and_after(scaling, lambda scaling: self.read(text, scaling).probabilities)
        table = markup.chances("Next token", columns, self.name, NEXT)
        return [markup.tokens(read.tokens, row, place), markup.note(note), table]

    def continuation(self, text: str, scaling: Scaling) -> str:
        """The most likely next tokens, one after another, as the model is and with scaled bandwidths if they are."""
        self.ids(text)

        def written(scaling: Scaling) -> str:
            engine = Engine(self._scaled(scaling), self.tokenizer, max_rows=1)
            return engine.complete([text], CONTINUATION)[0][0]

        both = before_and_after(scaling, written)
        return "".join(markup.text(f"Continuation, {heading}", words) for heading, words in both.items())
