"""Packing: the rows are upstream's, folders of earlier versions serve, and what cannot be packed is one line."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import golden
import tiny
from nanochat_gka import pack, tokenizer
from nanochat_gka.data import units
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.packing import best_fit_rows
from nanochat_gka.data.shards import TRAIN_FIRST
from nanochat_gka.data.tokenizer import Tokenizer
from tiny_pack import bins, config, cut, literal_best_fit
from trainkit_gka.cli import UserError

BOS = 50000


def make_document(bos: int, token: int, length: int) -> np.ndarray:
    return np.array([bos] + [token] * length, dtype=np.uint16)


def test_rows_are_upstreams():
    want = golden.GOLDEN["packing"]
    documents = [make_document(BOS, k, 3 + (k * k * 31 + 17 * k) % 61) for k in range(400)]
    rows = best_fit_rows(cut(documents, want["tokenizer_batch_size"]), want["T"] + 1, buffer_size=want["buffer_size"])
    expected = [[token for token, count in runs for _ in range(count)] for runs in want["rows"]]
    assert [next(rows).tolist() for _ in expected] == expected


@given(st.lists(st.lists(st.integers(0, 40), max_size=9), max_size=12), st.integers(1, 30), st.integers(1, 30))
def test_rows_follow_the_rule(lengths, capacity, buffer_size):
    """Every document opens with its own id, so the rows show which documents were chosen. Batches are of any size."""
    number = iter(range(1000))
    batches = [[make_document(BOS + (k := next(number)), k, length) for length in batch] for batch in lengths]
    rows = [row.tolist() for row in best_fit_rows(iter(batches), capacity, buffer_size)]
    assert rows == literal_best_fit([[doc.tolist() for doc in batch] for batch in batches], capacity, buffer_size)
    assert all(row[0] >= BOS for row in rows)


def upstream_rows(paths: list[Path], vocabulary: Tokenizer, capacity: int, count: int) -> list[list[int]]:
    """The first rows of nanochat's loader with one process, which begins again when the files have been read."""

    def batches():
        while True:
            for path in paths:
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):
                    texts = file.read_row_group(group).column("text").to_pylist()
                    yield from cut([[vocabulary.bos_id, *vocabulary.encode(text)] for text in texts], 128)

    source, buffer, rows = batches(), [], []
    while len(rows) < count:
        row = []
        while len(row) < capacity:
            while len(buffer) < 1000:
                buffer += next(source)
            room = capacity - len(row)
            fitting = [doc for doc in buffer if len(doc) <= room]
            chosen = max(fitting, key=len) if fitting else min(buffer, key=len)  # both give the first among equals
            del buffer[next(place for place, doc in enumerate(buffer) if doc is chosen)]
            row += chosen[:room]
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Row groups of sizes that 128 does not divide, empty documents, documents longer than a row."""
    root = tmp_path_factory.mktemp("odd")
    for number in range(3):
        documents = enumerate(tiny.documents(2500, number))
        texts = ["" if k % 11 == 3 else text * (9 if k % 13 == 5 else 1) for k, text in documents]
        schema = pa.schema([("text", pa.string())])
        (root / "corpus").mkdir(exist_ok=True)
        with pq.ParquetWriter(root / "corpus" / f"{number}.parquet", schema) as writer:
            sizes = [1, 77, 130, 300, 129, 513] * 3
            for first, size in zip(np.cumsum([0, *sizes]), sizes):
                writer.write_table(pa.table({"text": texts[first : first + size]}, schema))
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(config(root, root / "packed", workers=1))
    return root


@pytest.mark.parametrize("split,name", [("val", "val"), ("train", "train_first")])
def test_rows_for_evaluation_are_upstreams(odd, split, name):
    data = PackedData(odd / "packed")
    (record,) = (shard for shard in data.manifest["shards"] if shard["split"] == name)
    count = record["upstream_rows"]
    assert len(data.split(name)) > count > 500
    paths = sorted((odd / "corpus").glob("*.parquet"))
    want = upstream_rows(paths[-1:] if split == "val" else paths[:-1], data.tokenizer, 33, count)
    ids, targets = data.eval_rows(split, count * 32).batch(range(count))
    assert torch.cat([ids, targets[:, -1:]], dim=1).tolist() == want


def test_note_when_more_rows_are_asked_than_kept(odd):
    """The first of two training files is kept, and nanochat reads a file again before the buffer runs empty."""
    data, said = PackedData(odd / "packed"), []
    kept, whole = len(data.split("train_first")), len(data.split("train"))
    theirs = {shard["split"]: shard["upstream_rows"] for shard in data.manifest["shards"] if shard["split"] != "train"}
    covered = min(theirs["val"], theirs["train_first"])
    assert theirs["val"] != theirs["train_first"] and covered < kept and kept + 1 < whole
    for rows, choice in ((covered, "upstream"), (covered + 1, "spaced"), (kept + 1, "spaced")):
        data.warn_of_rows(choice, rows * 32, said.append)
        assert data.name_rows(rows * 32, choice) == choice
    assert not said
    data.warn_of_rows("upstream", (covered + 1) * 32, said.append)
    assert len(said) == 1 and f"of the {covered + 1:,} " in said[0] and f" {covered:,} are those of" in said[0]
    said.clear()
    data.warn_of_rows("upstream", (kept + 1) * 32, said.append)
    assert f"first {kept:,} rows of the training text, and {kept + 1:,} are evaluated" in said[0]
    assert {data.name_rows(tokens) for tokens in ((covered + 1) * 32, (kept + 1) * 32, -1)} == {"first"}


def test_small_first_file_is_not_an_earlier_version(odd, tmp_path):
    shutil.copytree(odd / "corpus", tmp_path / "corpus")
    pq.write_table(pa.table({"text": ["short"]}), tmp_path / "corpus" / "0.parquet")
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=odd / "tokenizer"))
    data, said = PackedData(tmp_path / "packed"), []
    assert len(data.split("train_first")) == 0 and data.has_upstream_rows
    data.warn_of_rows("upstream", 320, said.append)
    assert len(said) == 1 and "keeps nanochat's first 0 rows" in said[0]
    ids, targets = data.eval_rows("val", 50 * 32).batch(range(50))
    want = upstream_rows([tmp_path / "corpus" / "2.parquet"], data.tokenizer, 33, 50)
    assert torch.cat([ids, targets[:, -1:]], dim=1).tolist() == want


def test_training_rows_kept_for_evaluation_are_limited(odd, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "FIRST_TOKENS", 100 * 32)
    unit = next(unit for unit in units.plan_units(ParquetCorpus(odd / "corpus")) if unit.split == TRAIN_FIRST)
    record = units.pack_unit(unit, odd / "corpus", Tokenizer.load(odd / "tokenizer"), 32, tmp_path)
    assert record["rows"] == record["upstream_rows"] == 100
    whole = (odd / "packed" / "train_first_000000.bin").read_bytes()
    assert (tmp_path / "train_first_000000.bin").read_bytes() == whole[: 100 * 33 * 2]


def test_a_folder_of_an_earlier_version_serves(odd, tmp_path, capsys):
    """Its validation split came in units of eight row groups, and it had no rows for evaluation.

    Packing again replaces those units alone.
    """
    out = tmp_path / "packed"
    shutil.copytree(odd / "packed", out)
    manifest = json.loads((out / "manifest.json").read_text())
    vocabulary, shards = Tokenizer.load(out), []
    for shard in manifest["shards"]:
        if shard["split"] == "train":
            shards.append({key: value for key, value in shard.items() if key != "upstream_rows"})
        else:
            for end in ("bin", "json"):
                (out / f"{shard['name']}.{end}").unlink()
    for number, first in enumerate((0, 8, 16)):
        unit = units.Unit(f"val_{number:06d}", "val", "2.parquet", first, min(first + 8, 18))
        shards.append({**units.pack_unit(unit, odd / "corpus", vocabulary, 32, out), "new": True})
    (out / "manifest.json").write_text(json.dumps({**manifest, "shards": shards}))
    old = PackedData(out)
    assert not old.has_upstream_rows and PackedData(odd / "packed").has_upstream_rows
    said: list[str] = []
    old.warn_of_rows("spaced", 320, said.append)
    PackedData(odd / "packed").warn_of_rows("upstream", 320, said.append)
    assert not said
    old.warn_of_rows("upstream", 320, said.append)
    assert len(said) == 1 and "take evenly spaced rows" in said[0] and str(out / "manifest.json") in said[0]
    for split in ("train", "val"):
        rows, spaced = old.split(split), old.eval_rows(split, 50 * 32, "spaced")
        for choice in ("upstream", "spaced"):
            assert torch.equal(old.eval_rows(split, 50 * 32, choice).batch(range(50))[0], spaced.batch(range(50))[0])
        assert torch.equal(spaced.batch([49])[0], rows.batch([49 * len(rows) // 50])[0])
    pack.main(config(odd, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    pack.main(config(odd, out))
    names = [{path.name for path in folder.iterdir()} for folder in (out, odd / "packed")]
    assert bins(out) == bins(odd / "packed") and names[0] == names[1]


def test_older_validation_rows_are_packed_again(tmp_path):
    """A file of at most eight row groups was one unit then, too, of other rows.

    Batches went across row groups, and empty documents were left out.
    """
    tiny.write_corpus(tmp_path / "corpus", docs=60, row_group=10)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=tmp_path / "corpus", out=tmp_path / "tokenizer", vocab_size=300))
    out = tmp_path / "packed"
    pack.main(config(tmp_path, out, workers=1))
    want = bins(out)
    rows, record = out / "val_000000.bin", json.loads((out / "val_000000.json").read_text())
    older = bytes(len(want["val_000000.bin"]))
    rows.write_bytes(older)
    del record["upstream_rows"]
    (out / "val_000000.json").write_text(json.dumps({**record, "sha256": hashlib.sha256(older).hexdigest()}))
    (out / "manifest.json").unlink()
    pack.main(config(tmp_path, out, workers=1))
    assert bins(out) == want


def test_another_tokenizer_length_or_corpus_is_refused(packed, tmp_path):
    out, corpus = tmp_path / "packed", tmp_path / "corpus"
    shutil.copytree(packed / "packed", out)
    with pytest.raises(
        UserError, match=r"was packed with sequence length 32; choose another --out \(with make, BASE\), or delete it"
    ):
        pack.main(config(packed, out, sequence_len=33))
    tokenizer.main(tokenizer.TokenizerConfig(corpus=packed / "corpus", out=tmp_path / "tokenizer", vocab_size=290))
    with pytest.raises(UserError, match="was packed with another tokenizer"):
        pack.main(config(packed, out, tokenizer=tmp_path / "tokenizer"))
    tiny.write_corpus(corpus, docs=401)
    changed = r"was packed with other corpus files: 2 changed \(shard_00000.parquet, shard_00001.parquet\); choose"
    with pytest.raises(UserError, match=changed):
        pack.main(config(packed, out, corpus=corpus))
    assert bins(out) == bins(packed / "packed")
    pack.main(config(packed, out))


def test_small_corpus_packs_at_a_lower_length(packed, tmp_path):
    counts = "0 training and 0 validation rows"
    with pytest.raises(UserError, match=f"too small for rows of 100000 tokens: {counts}.*lower --sequence-len"):
        pack.main(config(packed, tmp_path / "packed", sequence_len=100_000))
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {".lock", "tokenizer.json"}
    pack.main(config(packed, tmp_path / "packed"))
    assert bins(tmp_path / "packed") == bins(packed / "packed")
