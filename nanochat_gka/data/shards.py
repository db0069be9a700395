"""A folder of packed rows: shards of uint16 ids, and the manifest that makes them training data.

`<name>.bin` holds rows of T + 1 ids back to back, little-endian, and `<name>.json` the record of how they were packed.
plan.json says what is being packed, so that a run that was killed continues with nothing else. manifest.json is written
last; the folder then holds everything a training run needs, tokenizer.json included.
"""

import shlex
from pathlib import Path
from typing import Any

from nanochat_gka.data import SPLITS
from trainkit_gka.cli import UserError
from trainkit_gka.files import read_json, write_json

FORMAT = 1
TRAIN_FIRST = "train_first"  # a third split: the beginning of the training text, packed again for evaluation
MANIFEST = "manifest.json"
FIELDS = {"sequence_len": int, "tokenizer_sha256": str, "source": list, "shards": list}  # of a manifest
PLAN = "plan.json"


def shard_path(folder: Path, shard: dict) -> Path:
    """The rows of one of the manifest's shards."""
    return folder / f"{shard['name']}.bin"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a folder of packed rows. Raises UserError if it is none of this format."""
    path = folder / MANIFEST
    manifest = read_json(path, "manifest")
    if (format := manifest.get("format")) != FORMAT:
        raise UserError(f"{folder} has format {format}, this version reads {FORMAT}")
    shards, is_split = manifest.get("shards"), splits_documents(manifest)
    fits = has_fields(manifest, FIELDS) and type(is_split) is bool
    fits = fits and all(has_fields(shard, shard_fields(is_split)) for shard in shards)
    if not fits or not {*SPLITS} <= {shard["split"] for shard in shards if shard["rows"]} <= {*SPLITS, TRAIN_FIRST}:
        raise UserError(f"{path} is damaged: a field is missing, or is not of its type")
    return manifest


def shard_fields(split_documents: bool) -> dict[str, type]:
    """The fields of a shard's record that are read, and their types."""
    counts = ("rows", "upstream_rows", "documents", "tokens", *["pieces"] * split_documents)
    return {"name": str, "split": str, "sha256": str, **dict.fromkeys(counts, int)}


def has_fields(value: Any, fields: dict[str, type]) -> bool:
    """Whether a value of JSON is an object with these fields, of these types; counts are not negative."""
    items = [(value.get(name), kind) for name, kind in fields.items()] if isinstance(value, dict) else [(None, int)]
    return all(type(item) is kind and (kind is not int or item >= 0) for item, kind in items)


def find_damage(folder: Path, manifest: dict) -> str | None:
    """Which shard is missing or truncated, or None. Contents are not read."""
    for shard in manifest["shards"]:
        path, expected = shard_path(folder, shard), shard["rows"] * (manifest["sequence_len"] + 1) * 2
        if not path.is_file():
            return f"shard {path} is missing"
        if path.stat().st_size != expected:
            return f"shard {path} is truncated: {path.stat().st_size} bytes instead of {expected}"
    return None


def splits_documents(manifest: dict[str, Any]) -> bool:
    """Whether documents of these rows, of a plan or a manifest, go on where a row ends."""
    return manifest.get("split_documents", False)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """What is or was packed into `folder`, None if nothing. Raises UserError if that cannot be read."""
    return read_json(folder / PLAN, "packing plan") if (folder / PLAN).exists() else None


def check_plan(folder: Path, identity: dict[str, Any]) -> None:
    """Raise UserError if `folder` holds rows of another tokenizer, length, corpus or cut than `identity` says."""
    from nanochat_gka.data.corpora import file_changes  # imports pyarrow, which training does without

    plan = read_plan(folder)
    if plan is None:
        return
    changes = file_changes(plan, identity)
    was_split = splits_documents(plan)
    names = {
        "tokenizer_sha256": "another tokenizer",
        "sequence_len": f"sequence length {plan.get('sequence_len')}",
        "format": "another format",
        "split_documents": f"--split-documents {'yes' if was_split else 'no'}",
    }
    differences = [f"other corpus files: {changes}"] if changes else []
    before = {**plan, "split_documents": was_split}
    differences += [name for key, name in names.items() if before.get(key) != identity[key]]
    if differences:
        raise UserError(f"{folder} was packed with {differences[0]}; {start_anew(folder)}")


def start_anew(folder: Path) -> str:
    """What to do where `folder` holds rows, or a tokenizer, of something else: in words."""
    delete = f"delete it (rm -r {shlex.quote(str(folder))}), which ends the runs trained with it"
    return f"choose another --out, or {delete}, and run the same command again"


def finish(folder: Path, manifest: dict[str, Any]) -> None:
    """Make the shards of `manifest` the content of `folder`.

    Raises UserError, and deletes them, if they leave a split without rows.
    """
    if not {*SPLITS} <= {record["split"] for record in manifest["shards"] if record["rows"]}:
        for path in (*folder.glob("*_*.bin"), *folder.glob("*_*.json"), folder / PLAN):  # the plan guards the others
            path.unlink()
        problem = f"the corpus is too small for rows of {manifest['sequence_len']} tokens: {describe(manifest)[0]}"
        raise UserError(f"{problem}; lower --sequence-len, or give more text")
    write_json(folder / MANIFEST, manifest)


def describe(manifest: dict[str, Any]) -> tuple[str, float]:
    """In words the rows of each split, their documents and tokens; and the share of these tokens that is in no row.

    BOS is not counted where documents are split, for every piece of a document has one.
    """
    shards = [shard for shard in manifest["shards"] if shard["split"] in SPLITS]
    rows = {split: sum(shard["rows"] for shard in shards if shard["split"] == split) for split in SPLITS}
    documents, tokens = (sum(shard[key] for shard in shards) for key in ("documents", "tokens"))
    packed = sum(rows.values()) * (manifest["sequence_len"] + 1)
    to_pack = tokens
    if splits_documents(manifest):
        packed = packed - sum(shard["pieces"] for shard in shards)
        to_pack = tokens - documents
    cropped = 1 - packed / max(1, to_pack)
    counts = f"{rows['train']:,} training and {rows['val']:,} validation rows of {manifest['sequence_len']} tokens"
    return f"{counts} from {documents:,} documents, {cropped:.0%} of {tokens:,} tokens cropped", cropped
