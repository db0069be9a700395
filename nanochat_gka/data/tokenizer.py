"""Text <-> token ids: byte-level BPE with nanochat's split pattern, trained by rustbpe, encoded by tiktoken."""

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import tiktoken
import torch

from trainkit.cli import Bounds, UserError
from trainkit.files import read_json, write_json

# GPT-4's pattern with at most two digits to a chunk.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_NAMES = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"
SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in _NAMES.split())
VOCAB = Bounds(256 + len(SPECIAL_TOKENS), 2**16)  # bytes and special tokens at least; ids are stored as uint16
FILE_NAME = "tokenizer.json"
EXPORTED_NAME = "gka_tokenizer.json"  # in an exported folder, where tokenizer.json is Hugging Face's


class Tokenizer:
    """A trained vocabulary. Special tokens follow the merges; `bos_id` opens every document."""

    def __init__(self, ranks: dict[bytes, int], pattern: str = SPLIT_PATTERN, special_tokens=SPECIAL_TOKENS):
        self.ranks, self.pattern = ranks, pattern
        self.special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
        self.encoding = tiktoken.Encoding("gka", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special)
        self.bos_id = self.special[SPECIAL_TOKENS[0]]

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train on `documents`. A text with too few distinct pairs gives a smaller vocabulary.

        Raises UserError for an impossible size.
        """
        import rustbpe

        VOCAB.check("--vocab-size", vocab_size)
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(documents), vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        return cls({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})

    @classmethod
    def load(cls, folder: Path, name: str = FILE_NAME) -> "Tokenizer":
        """Read the file `name` in `folder`. Raises UserError if it is absent or is not a tokenizer."""
        path = Path(folder) / name
        data = read_json(path, "tokenizer")
        try:
            ranks = {base64.b64decode(token): rank for rank, token in enumerate(data["tokens"])}
            return cls(ranks, data["pattern"], tuple(data["special_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not a tokenizer ({error!r}); train one with make tokenizer") from None

    def to_json(self) -> dict:
        ordered = sorted(self.ranks, key=self.ranks.__getitem__)
        return {
            "pattern": self.pattern,
            "special_tokens": list(self.special),
            "tokens": [base64.b64encode(token).decode() for token in ordered],
        }

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
        return self.encoding.encode_ordinary(text)

    def encode_document(self, text: str) -> np.ndarray:
        """uint16 ids of a document, opened by BOS."""
        ids = self.encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
        document = np.empty(len(ids) + 1, dtype=np.uint16)
        document[0], document[1:] = self.bos_id, ids
        return document

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode(list(ids))

    def token_bytes(self) -> torch.Tensor:
        """(vocab_size,) int64: UTF-8 length of every token's decoded string, 0 for special tokens.

        A token that is not valid UTF-8 decodes to U+FFFD and counts 3 bytes: as in nanochat, to which bits per byte are
        compared.
        """
        lengths = [len(self.decode([i]).encode()) for i in range(len(self.ranks))]
        return torch.tensor(lengths + [0] * len(self.special))
