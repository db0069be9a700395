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
PLAN = "plan.json"
MUCH_CROPPED = 0.2


def shard_path(folder: Path, shard: dict) -> Path:
    """The rows of one of the manifest's shards."""
    return folder / f"{shard['name']}.bin"


def find_damage(folder: Path, manifest: dict) -> str | None:
    """Which shard is missing or truncated, or None. Contents are not read."""
    for shard in manifest["shards"]:
        path, expected = shard_path(folder, shard), shard["rows"] * (manifest["sequence_len"] + 1) * 2
        if not path.is_file():
            return f"shard {path} is missing"
        if path.stat().st_size != expected:
            return f"shard {path} is truncated: {path.stat().st_size} bytes instead of {expected}"
    return None


def read_intact(folder: Path) -> dict | None:
    """The manifest of a folder where no shard is missing or truncated, or None if there is something to pack."""
    try:
        manifest = read_json(folder / MANIFEST, "manifest")
    except UserError:
        return None
    return manifest if find_damage(folder, manifest) is None else None


def splits_documents(manifest: dict[str, Any]) -> bool:
    """Whether documents of these rows, of a plan or a manifest, go on where a row ends."""
    return manifest.get("split_documents", False)


def read_plan(folder: Path) -> dict[str, Any] | None:
    """What is or was packed into `folder`, None if nothing. Raises UserError if that cannot be read."""
    return read_json(folder / PLAN, "packing plan") if (folder / PLAN).exists() else None


def check_plan(folder: Path, identity: dict) -> None:
    """Raise UserError if `folder` holds rows of another tokenizer, length, corpus or cut than `identity` says."""
    plan = read_plan(folder)
    if plan is None:
        return
    differences = {
        "tokenizer_sha256": "another tokenizer",
        "sequence_len": f"sequence length {plan.get('sequence_len')}",
        "source": "other corpus files",
        "format": "another format",
    }
    for key, words in differences.items():
        if plan.get(key) != identity[key]:
            raise UserError(f"{folder} was packed with {words}; {start_anew(folder)}")
    if splits_documents(plan) != splits_documents(identity):
        before = "yes" if splits_documents(plan) else "no"
        raise UserError(f"{folder} was packed with --split-documents {before}; {start_anew(folder)}")


def start_anew(folder: Path) -> str:
    """What to do where `folder` holds rows, or a tokenizer, of something else: in words."""
    delete = f"delete it (rm -r {shlex.quote(str(folder))}), which ends the runs trained with it"
    return f"choose another --out, or {delete}, and run the same command again"


def begin(folder: Path, identity: dict) -> None:
    """Note what is packed into `folder`, which is incomplete from now on."""
    (folder / MANIFEST).unlink(missing_ok=True)
    write_json(folder / PLAN, identity)


def finish(folder: Path, manifest: dict) -> None:
    """Make the shards of `manifest` the content of `folder`.

    Raises UserError, and deletes them, if they leave a split without rows.
    """
    records = manifest["shards"]
    if not all(any(record["rows"] for record in records if record["split"] == split) for split in SPLITS):
        files = [f"{record['name']}.{suffix}" for record in records for suffix in ("bin", "json")]
        for name in (*files, PLAN):  # the plan last: it guards the others
            (folder / name).unlink()
        problem = f"the corpus is too small for rows of {manifest['sequence_len']} tokens: {describe(manifest)}"
        raise UserError(f"{problem}; lower --sequence-len, or give more text")
    write_json(folder / MANIFEST, manifest)


def describe(manifest: dict) -> str:
    """Rows of each split, what they are made of, and the share of the tokens that packing cropped."""
    shards = [shard for shard in manifest["shards"] if shard["split"] in SPLITS]
    rows = {split: sum(shard["rows"] for shard in shards if shard["split"] == split) for split in SPLITS}
    documents, tokens = (sum(shard[key] for shard in shards) for key in ("documents", "tokens"))
    made_of = f"{documents:,} documents"
    if splits_documents(manifest):
        made_of += f" in {sum(shard['pieces'] for shard in shards):,} pieces"
    counts = f"{rows['train']:,} training and {rows['val']:,} validation rows of {manifest['sequence_len']} tokens"
    return f"{counts} from {made_of}, {cropped(manifest):.0%} of {tokens:,} tokens cropped"


def cropped(manifest: dict) -> float:
    """The share of the documents' tokens that are in no row. Each piece of a document that was split has one more."""
    shards = [shard for shard in manifest["shards"] if shard["split"] in SPLITS]
    packed = sum(shard["rows"] * (manifest["sequence_len"] + 1) for shard in shards)
    tokens = sum(shard["tokens"] for shard in shards)
    if splits_documents(manifest):  # without BOS on both sides
        packed -= sum(shard["pieces"] for shard in shards)
        tokens -= sum(shard["documents"] for shard in shards)
    return 1 - packed / max(1, tokens)
