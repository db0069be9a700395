"""Text <-> token ids: byte-level BPE trained by rustbpe with nanochat's split pattern, encoded by tiktoken, stored as JSON.

python -m nanochat_gka.tokenizer --corpus out/corpus/fineweb --out out/tokenizer
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import tiktoken
import torch

from nanochat_gka.corpus import ParquetCorpus
from trainkit.cli import Bounds, Count, CountOrAll, UserError, run
from trainkit.files import locked, read_json, write_json
from trainkit.progress import progress_bar

# GPT-4's pattern with at most two digits to a chunk.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)  # fmt: skip
SPECIAL_TOKENS = tuple(
    f"<|{name}|>"
    for name in (
        "bos",
        "user_start",
        "user_end",
        "assistant_start",
        "assistant_end",
        "python_start",
        "python_end",
        "output_start",
        "output_end",
    )
)
VOCAB = Bounds(256 + len(SPECIAL_TOKENS), 2**16)  # bytes and special tokens at least; ids are stored as uint16
FILE_NAME = "tokenizer.json"
RECIPE = "train.json"


class Tokenizer:
    """A trained vocabulary. Special tokens follow the merges; `bos_id` opens every document."""

    def __init__(
        self, ranks: dict[bytes, int], pattern: str = SPLIT_PATTERN, special_tokens: tuple[str, ...] = SPECIAL_TOKENS
    ):
        self.ranks, self.pattern = ranks, pattern
        self.special = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
        self.encoding = tiktoken.Encoding("gka", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special)
        self.bos_id = self.special[SPECIAL_TOKENS[0]]

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train on `documents`. A text with too few distinct pairs gives a smaller vocabulary. Raises UserError for an impossible size."""
        import rustbpe

        VOCAB.check("--vocab-size", vocab_size)
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(iter(documents), vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
        return cls({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json. Raises UserError if it is absent or not a tokenizer."""
        path = Path(folder) / FILE_NAME
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

    def save(self, folder: Path) -> None:
        write_json(Path(folder) / FILE_NAME, self.to_json())

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
        return np.concatenate([np.array([self.bos_id], dtype=np.uint16), ids.astype(np.uint16)])

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode(list(ids))

    def token_bytes(self) -> torch.Tensor:
        """(vocab_size,) int64: UTF-8 length of every token's decoded string, 0 for special tokens.

        A token that is no valid UTF-8 decodes to U+FFFD and counts 3 bytes, as in nanochat, to keep its bits per byte comparable.
        """
        lengths = [len(self.decode([i]).encode()) for i in range(len(self.ranks))]
        return torch.tensor(lengths + [0] * len(self.special))


def training_documents(corpus: ParquetCorpus, doc_cap: int, max_chars: int) -> Iterator[str]:
    """Training documents cut to doc_cap characters, up to the one that takes the sum above max_chars (-1 = all). Shows progress."""
    total = 0
    with progress_bar() as bar:
        task = bar.add_task(
            "reading text for the tokenizer", total=max_chars if max_chars > 0 else None, status="characters"
        )
        for document in corpus.documents("train"):
            total += len(document[:doc_cap])
            bar.update(task, completed=total)
            yield document[:doc_cap]
            if 0 < max_chars < total:
                break


@dataclass
class TokenizerConfig:
    """Train the BPE tokenizer on the training split of a corpus."""

    corpus: Path = Path("out/corpus/builtin")
    """folder of parquet files"""
    out: Path = Path("out/tokenizer")
    """folder for tokenizer.json (and train.json: what it was trained on)"""
    vocab_size: Annotated[int, VOCAB] = 32768
    """tokens, the 9 special ones included"""
    max_chars: CountOrAll = 2_000_000_000
    """characters to train on; -1 = all"""
    doc_cap: Count = 10_000
    """characters taken of one document"""


def main(config: TokenizerConfig) -> None:
    corpus = ParquetCorpus(config.corpus)
    recipe = {
        "vocab_size": config.vocab_size,
        "doc_cap": config.doc_cap,
        "max_chars": config.max_chars,
        "corpus": [[path.name, path.stat().st_size] for path in corpus.files("train")],
    }
    with locked(config.out, "training a tokenizer in"):
        if (config.out / FILE_NAME).exists():
            _check_recipe(config.out, recipe)
            print(f"{config.out}: already there, vocabulary {Tokenizer.load(config.out).vocab_size}")
            return
        if not any(corpus.documents("train")):
            raise UserError(f"{config.corpus} has no text to train a tokenizer on")
        write_json(config.out / RECIPE, recipe)
        tokenizer = Tokenizer.train(training_documents(corpus, config.doc_cap, config.max_chars), config.vocab_size)
        tokenizer.save(config.out)
        sample = next(corpus.documents("val"), "")
        ratio = len(sample.encode()) / max(1, len(tokenizer.encode(sample)))
        print(f"{config.out}: vocabulary {tokenizer.vocab_size}, {ratio:.2f} bytes per token on a validation document")


def _check_recipe(out: Path, recipe: dict) -> None:
    """Refuse to pass off a tokenizer that was made otherwise."""
    try:
        there = read_json(out / RECIPE, "recipe")
    except UserError:
        raise UserError(
            f"{out} holds a tokenizer and nothing that says what it was trained on; choose another --out or delete it"
        ) from None
    for key, value in recipe.items():
        if there.get(key) != value:
            words = "other corpus files" if key == "corpus" else f"--{key.replace('_', '-')} {there.get(key)}"
            raise UserError(f"{out} holds a tokenizer trained with {words}; choose another --out or delete it")


if __name__ == "__main__":
    run(main, TokenizerConfig)
