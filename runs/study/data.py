"""The text of the study: prepared once by the project's own chain, in rows of 512 tokens; and what identifies it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat_gka.data.loader import SAME_ROWS
from nanochat_gka.data.shards import MANIFEST
from runs.launch import command, run
from runs.names import Problem, check_corpus, names
from trainkit.cli import UserError
from trainkit.files import read_json

VOCAB, SEQUENCE_LEN = 4096, 512


@dataclass(frozen=True)
class Text:
    """Packed rows. identity: what two folders of the same rows have in common, which is part of every cell's key."""

    packed: Path
    sequence_len: int
    vocab_size: int
    identity: dict[str, Any]


def packed_folder(base: Path, corpus: str, shards: int) -> Path:
    """Where the chain puts the rows."""
    return Path(_names(base, corpus, shards)["PACKED"])


def corpus_name(corpus: str, shards: int) -> str:
    """What the corpus is called on every machine: builtin, fineweb-170, or the folder's own name."""
    return {"builtin": corpus, "fineweb": f"fineweb-{shards}"}.get(corpus, Path(corpus).resolve().name)


def prepare(base: Path, corpus: str, shards: int) -> None:
    """Make the corpus, the tokenizer and the rows, where `make tokenize` makes them. What is finished is kept.

    Raises UserError for a corpus that is not there.
    """
    try:
        check_corpus({"CORPUS": corpus})
    except Problem as problem:
        raise UserError(str(problem)) from None
    named = _names(base, corpus, shards)
    if named["PREPARED"] and not Path(named["PREPARED"]).exists():
        raise UserError(f"the corpus is not there yet; run make data {_settings(base, corpus, shards)} first")
    if (packed_folder(base, corpus, shards) / MANIFEST).exists():
        return
    read, tokenizer = named["READ_CORPUS"].split(" ", 1), named["TOKENIZER"]
    if not Path(tokenizer, "tokenizer.json").exists():
        run(command("nanochat_gka.tokenizer", [*read, "--vocab-size", VOCAB, "--out", tokenizer]))
    rows = ["--tokenizer", tokenizer, "--sequence-len", SEQUENCE_LEN, "--out", named["PACKED"]]
    run(command("nanochat_gka.pack", [*read, *rows]))


def load(packed: Path) -> Text:
    """The rows in a folder. Raises UserError if there are none."""
    manifest = read_json(packed / MANIFEST, "manifest of packed rows")
    identity = {name: manifest[name] for name in SAME_ROWS}
    return Text(packed, manifest["sequence_len"], manifest["vocab_size"], identity)


def _given(base: Path, corpus: str, shards: int) -> dict[str, str]:
    return {"BASE": str(base), "CORPUS": corpus, "SHARDS": str(shards), "VOCAB": str(VOCAB), "SEQ": str(SEQUENCE_LEN)}


def _settings(base: Path, corpus: str, shards: int) -> str:
    return " ".join(f"{name}={value}" for name, value in _given(base, corpus, shards).items() if name != "SEQ")


def _names(base: Path, corpus: str, shards: int) -> dict[str, str]:
    return names(_given(base, corpus, shards))
