"""The text of the study: a folder of packed rows, and what identifies them on every machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat_gka.data.loader import same_rows
from nanochat_gka.data.shards import MANIFEST
from trainkit_gka.cli import UserError
from trainkit_gka.files import read_json


@dataclass(frozen=True)
class Text:
    """Packed rows. name: of the corpus. identity: what two folders of the same rows have in common."""

    packed: Path
    name: str
    sequence_len: int
    vocab_size: int
    identity: dict[str, Any]


def load(packed: Path) -> Text:
    """The rows in a folder. Raises UserError if there are none."""
    if not (packed / MANIFEST).exists():
        raise UserError(f"no packed rows in {packed}; make study packs them (CORPUS=builtin, fineweb or a folder)")
    manifest = read_json(packed / MANIFEST, "manifest of packed rows")
    name, length = Path(manifest["corpus"]).name, manifest["sequence_len"]
    return Text(packed, name, length, manifest["vocab_size"], same_rows(manifest))
