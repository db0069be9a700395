"""Text <-> token ids: byte-level BPE with nanochat's split pattern, trained by rustbpe, encoded by tiktoken."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
import torch

from trainkit_gka.cli import Bounds, UserError
from trainkit_gka.files import read_json, write_json

# GPT-4's pattern with at most two digits to a chunk.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Blanks inside a line. The pattern's engine remembers every blank of a run, and a run of a million ends the process.
BLANKS = re.compile("[\t\v\f \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{64,}")
LONG_TEXT = 2**18  # characters; a shorter text is far from that
_NAMES = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"
SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _NAMES.split())
BYTES = {bytes([byte]) for byte in range(256)}
VOCAB = Bounds(256 + len(SPECIAL_TOKENS), 2**16)  # bytes and special tokens at least; ids are stored as uint16
FILE_NAME = "tokenizer.json"
EXPORTED_NAME = "gka_tokenizer.json"  # in an exported folder, where tokenizer.json is Hugging Face's


class Tokenizer:
    """A trained vocabulary. Special tokens follow the merges; `bos_id` opens every document."""

    def __init__(self, ranks: dict[bytes, int], special_tokens: Sequence[str] = SPECIAL_TOKENS):
        self.ranks = ranks
        self.tokens = sorted(ranks, key=ranks.__getitem__)
        self.special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
        self.encoding = tiktoken.Encoding(
            "gka", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )
        self.bos_id = self.special[SPECIAL_TOKENS[0]]

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train on `documents`. A text with too few distinct pairs gives a smaller vocabulary.

        Raises UserError for an impossible size.
        """
        import rustbpe

        VOCAB.check("--vocab-size", vocab_size)
        trainer = rustbpe.Tokenizer()
        texts = (text for document in documents for text in _texts_to_learn(document))
        trainer.train_from_iterator(texts, vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        return cls({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})

    @classmethod
    def load(cls, folder: Path, name: str = FILE_NAME) -> "Tokenizer":
        """Read the file `name` in `folder`. Raises UserError if it is absent or is not a tokenizer."""
        path = Path(folder) / name
        data = read_json(path, "tokenizer")
        try:
            tokens = [base64.b64decode(token, validate=True) for token in data["tokens"]]
            special = data["special_tokens"]
            names = {*tokens, *map(str.encode, special)}
            if len(names) > VOCAB.most:  # packed rows would hold ids modulo 2^16
                raise ValueError(f"it has {len(names):,} tokens, and ids are stored in 16 bits: at most {VOCAB.most:,}")
            if len(names) < len(tokens) + len(special) or not names.issuperset(BYTES):
                raise ValueError("a token is there twice, or a byte has none")
            if data["pattern"] != SPLIT_PATTERN:
                raise ValueError("its pattern is not nanochat's")
            return cls({token: rank for rank, token in enumerate(tokens)}, special)
        except (KeyError, TypeError, ValueError) as error:
            advice = "train one by python -m nanochat_gka.tokenizer"
            raise UserError(f"{path} is not a tokenizer that can be used ({error!r}); {advice}") from None

    def to_json(self) -> dict:
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"pattern": SPLIT_PATTERN, "special_tokens": list(self.special), "tokens": tokens}

    def save(self, folder: Path, name: str = FILE_NAME) -> None:
        write_json(Path(folder) / name, self.to_json())

    @cached_property
    def sha256(self) -> str:
        """Identity of the vocabulary, whatever file it came from."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self.encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; strings that look like special tokens are ordinary text."""
        return [number for part, encoding in self._parts(text) for number in encoding.encode_ordinary(part)]

    def encode_document(self, text: str) -> np.ndarray:
        """uint16 ids of a document, opened by BOS."""
        kinds = {"allowed_special": set(), "disallowed_special": ()}
        parts = [encoding.encode_to_numpy(part, **kinds) for part, encoding in self._parts(text)]
        return np.concatenate([[self.bos_id], *parts], dtype=np.uint16, casting="unsafe")

    def _parts(self, text: str) -> Iterator[tuple[str, tiktoken.Encoding]]:
        """Parts of `text` and what encodes each, so that their ids are those of the whole."""
        return ((part, self._one_chunk if blank else self.encoding) for part, blank in split_at_blanks(text))

    @cached_property
    def _one_chunk(self) -> tiktoken.Encoding:
        """Encodes white space as one chunk, however long it is."""
        return tiktoken.Encoding("gka-blank", pat_str=r"\s+", mergeable_ranks=self.ranks, special_tokens={})

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode(list(ids))

    def token_bytes(self) -> torch.Tensor:
        """(vocab_size,) int64: UTF-8 length of every token's decoded string, 0 for special tokens, as in nanochat.

        A token that is not valid UTF-8, as a part of a character is, decodes to U+FFFD and counts 3 bytes. In a text
        that is not ASCII that is up to 3 times too many.
        """
        lengths = [len(self.decode([i]).encode()) for i in range(len(self.ranks))]
        return torch.tensor(lengths + [0] * len(self.special))

    def utf8_bytes(self) -> torch.Tensor:
        """(vocab_size,) int64: the bytes that every token stands for, 0 for special tokens. A text's sum to its own."""
        return torch.tensor([*map(len, self.tokens)] + [0] * len(self.special))


def split_at_blanks(text: str) -> Iterator[tuple[str, bool]]:
    """`text` in parts, of which those marked True are one chunk of SPLIT_PATTERN; the others have the text's chunks.

    A short text is one part. In a long one, a long run of blanks that no line end follows is a part, for the pattern
    makes it one chunk, but for its last blank if a word follows: that belongs to the word. What stands before a run or
    after it is split as if the run were not there, since the pattern never looks back.
    """
    done = 0
    if len(text) >= LONG_TEXT:
        for run in BLANKS.finditer(text):
            following = text[run.end() : run.end() + 1]
            if following not in ("\r", "\n"):
                end = run.end() - len(following)
                yield text[done : run.start()], False
                yield text[run.start() : end], True
                done = end
    yield text[done:], False


def _texts_to_learn(document: str) -> Iterator[str]:
    """`document`, with long runs of blanks in pieces, for rustbpe has the same engine."""
    for part, blank in split_at_blanks(document):
        yield from (part[first : first + LONG_TEXT] for first in range(0, len(part), LONG_TEXT)) if blank else (part,)
