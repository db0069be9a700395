"""Text from a model: a prompt is run once, its continuations grow from a cache, many at a time.

Engine(model, tokenizer).complete(["Once upon a time"], Sampling(num_samples=3)) returns [[text, text, text]]; `stream`
yields the pieces as they come.
"""

import codecs
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.generation.sampling import Sampling, pick
from nanochat_gka.model.cache import KVCache
from nanochat_gka.model.gpt import GPT
from trainkit_gka.cli import UserError, check_bounds


@dataclass(frozen=True)
class TextPiece:
    """What one token adds to one continuation; `text` is held back while it may become a character or a stop text."""

    prompt: int
    sample: int
    token: int
    text: str
    is_done: bool


class Continuation:
    """One sample while it grows: its last token, its random numbers, and the text that is held back."""

    def __init__(self, prompt: int, sample: int, draws: random.Random, room: int, stop_texts: Sequence[str]):
        self.prompt, self.sample, self.draws, self.room, self.stop_texts = prompt, sample, draws, room, stop_texts
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.last, self.held, self.is_done = -1, "", False

    def add(self, token: int, text: bytes | None) -> TextPiece:
        """Take the next token and its bytes; None in place of bytes ends the text."""
        self.last, self.room = token, self.room - 1
        is_last = text is None or self.room == 0
        self.held += self.decoder.decode(text or b"", final=is_last)
        stops = [place for stop in self.stop_texts if (place := self.held.find(stop)) >= 0]
        self.is_done = is_last or bool(stops)
        ready = min(stops, default=len(self.held) - (0 if is_last else self._undecided()))
        released, self.held = self.held[:ready], self.held[ready:]
        return TextPiece(self.prompt, self.sample, token, released, self.is_done)

    def _undecided(self) -> int:
        """Number of characters at the end that may be the beginning of a stop text."""
        beginnings = (stop[:n] for stop in self.stop_texts for n in range(1, len(stop)))
        return max((len(text) for text in beginnings if self.held.endswith(text)), default=0)


class Engine:
    """Continues prompts. At most max_rows continuations run at once; the next takes the place of one that has ended.

    keep_keys: for models whose values are not rotated, faster decoding for twice the cache in GKA layers; UserError for
    other models. None: on GPUs, where computing keys again takes 13 times as long as softmax attention. The same seed
    gives the same continuations whatever max_rows and the other prompts are, up to rounding of the logits.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, max_rows: int = 32, keep_keys: bool | None = None):
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        if keep_keys and not model.derives_keys:
            advice = "this model's keys are kept anyway; leave it out"
            raise UserError(f"--keep-keys is for models of --gka-values unrotated, and {advice}")
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        self.keep_keys = model.derives_keys and model.device.type != "cpu" if keep_keys is None else keep_keys

    def complete(self, prompts: Sequence[str], sampling: Sampling, stop: Sequence[str] = ()) -> list[list[str]]:
        """`sampling.num_samples` continuations of every prompt, without the prompt. Arguments, errors as `stream`."""
        texts = [[""] * sampling.num_samples for _ in prompts]
        for piece in self.stream(prompts, sampling, stop):
            texts[piece.prompt][piece.sample] += piece.text
        return texts

    @torch.inference_mode()
    def stream(self, prompts: Sequence[str], sampling: Sampling, stop: Sequence[str] = ()) -> Iterator[TextPiece]:
        """The same token by token, as they come, continuations interleaved.

        A continuation ends with a special token (such as the end of a document), before the first text of `stop`, after
        max_tokens, or where the model's positions end. Raises UserError for a bad sampling value, a prompt longer than
        the model takes or an empty stop text; TypeError for a text in place of a list.
        """
        check_bounds(sampling)
        if isinstance(prompts, str) or isinstance(stop, str):
            raise TypeError("prompts and stop must be lists of texts, got one text")
        if not all(stop):
            raise UserError("a stop text must not be empty")
        starts = [self.tokens(prompt) for prompt in prompts]
        waiting = deque((prompt, sample) for prompt in range(len(prompts)) for sample in range(sampling.num_samples))
        longest = max(map(len, starts), default=0) + sampling.max_tokens
        cache = self._new_cache(min(self.max_rows, len(waiting)), min(longest, self.model.rotary.length), in_use=0)
        rows: list[Continuation] = []
        prefilled = -1  # the prompt that was run last; its cache and the logits after it, (1, 1, V)
        while waiting or rows:
            while waiting and len(rows) < self.max_rows:
                prompt, sample = waiting.popleft()
                if prompt != prefilled:
                    ids = torch.tensor([starts[prompt]], device=self.model.device)
                    prefilled = prompt
                    prompt_cache = self._new_cache(1, ids.shape[1])
                    logits = self.model(ids, context=prompt_cache)
                room = min(sampling.max_tokens, self.model.rotary.length - len(starts[prompt]))
                row = Continuation(prompt, sample, sampling.draws(prompts[prompt], sample), room, stop)
                yield self._extend(row, pick(logits[:, -1], [row.draws], sampling)[0])
                if not row.is_done:
                    rows.append(row)
                    cache.take(prompt_cache)
            if not rows:
                continue
            ids = torch.tensor([[row.last] for row in rows], device=self.model.device)
            tokens = pick(self.model(ids, context=cache)[:, -1], [row.draws for row in rows], sampling)
            for row, token in zip(rows, tokens):
                yield self._extend(row, token)
            for place in reversed(range(len(rows))):
                if rows[place].is_done:
                    cache.drop(place)
                    rows[place] = rows[-1]
                    rows.pop()

    def fits(self, prompt: str) -> bool:
        """Whether the model has room for the prompt, and for a token after it."""
        return 1 + len(self.tokenizer.encode(prompt)) < self.model.rotary.length

    def tokens(self, prompt: str) -> list[int]:
        """Token ids of a prompt. Raises UserError if it cannot be continued: it is too long, or is not Unicode text."""
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise UserError(f"a prompt is not Unicode text: {prompt!r}") from None
        ids, limit = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)], self.model.rotary.length
        if len(ids) >= limit:
            most = f"the model takes at most {limit - 1} and one to continue; give it the end of the text"
            raise UserError(f"the prompt has {len(ids)} tokens, {most}")
        return ids

    def _new_cache(self, rows: int, capacity: int, in_use: int | None = None) -> KVCache:
        return self.model.new_cache(rows, capacity, in_use, self.keep_keys, last_only=True)

    def _extend(self, row: Continuation, token: int) -> TextPiece:
        special = token >= self.tokenizer.bos_id
        return row.add(token, None if special else self.tokenizer.encoding.decode_single_token_bytes(token))
