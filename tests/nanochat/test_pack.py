"""Packing: nanochat's rows are upstream's, people's own text is not cropped, folders of earlier versions serve."""

import itertools
import json
import os
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
from runs import make
from tiny_pack import automatic, bins, config, cut, rewrite_json, write_parquet

BOS = 50_000


# The rules


def make_document(bos: int, token: int, length: int) -> np.ndarray:
    return np.array([bos] + [token] * length, dtype=np.uint16)


def test_rows_are_upstreams():
    want = golden.GOLDEN["packing"]
    documents = [make_document(BOS, k, 3 + (k * k * 31 + 17 * k) % 61) for k in range(400)]
    rows = best_fit_rows(cut(documents, want["tokenizer_batch_size"]), want["T"] + 1, buffer_size=want["buffer_size"])
    expected = [[token for token, count in runs for _ in range(count)] for runs in want["rows"]]
    assert [next(rows).tolist() for _ in expected] == expected


@given(st.lists(st.lists(st.integers(0, 200), max_size=9), max_size=12), st.integers(2, 60), st.integers(1, 30))
def test_every_token_of_split_documents_is_in_a_row_once(lengths, capacity, buffer_size):
    """But those of the last row. Tokens are numbered through the documents, so the rows show where each went."""
    numbers = iter(range(BOS))
    batches = [[[BOS, *(next(numbers) for _ in range(length))] for length in batch] for batch in lengths]
    firsts = [document[1] for batch in batches for document in batch if len(document) > 1]
    arrays = [[np.array(document, dtype=np.uint16) for document in batch] for batch in batches]
    rows = [row.tolist() for row in best_fit_rows(iter(arrays), capacity, buffer_size, split_documents=True)]
    assert all(len(row) == capacity and row[0] == BOS for row in rows)
    tokens = [token for row in rows for token in row if token != BOS]
    assert len(set(tokens)) == len(tokens)
    assert next(numbers) - len(tokens) < capacity
    for row in rows:  # within a row, what follows a token without a BOS between them follows it in its document
        for before, after in itertools.pairwise(row):
            assert BOS in (before, after) or (after == before + 1 and after not in firsts)


def test_a_long_document_becomes_whole_rows_and_a_rest():
    documents = [np.array([BOS, *range(22)]), np.array([BOS, *range(90, 94)])]
    rows = [row.tolist() for row in best_fit_rows([documents], 10, split_documents=True)]
    assert rows == [[BOS, *range(9)], [BOS, *range(9, 18)], [BOS, *range(90, 94), BOS, *range(18, 22)]]


# nanochat's rows


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
    pack.main(config(root, root / "packed"))
    return root


def first_rows(data: PackedData, split: str, count: int) -> list[list[int]]:
    """The first rows that an evaluation reads, with their last targets."""
    ids, targets = data.eval_rows(split, count * 32).batch(range(count))
    return torch.cat([ids, targets[:, -1:]], dim=1).tolist()


@pytest.mark.parametrize("split,name", [("val", "val"), ("train", "train_first")])
def test_rows_for_evaluation_are_upstreams(odd, split, name):
    data = PackedData(odd / "packed")
    (record,) = (shard for shard in data.manifest["shards"] if shard["split"] == name)
    count = record["upstream_rows"]
    assert len(data.split(name)) > count > 500
    paths = sorted((odd / "corpus").glob("*.parquet"))
    want = upstream_rows(paths[-1:] if split == "val" else paths[:-1], data.tokenizer, 33, count)
    assert first_rows(data, split, count) == want


def test_a_warning_when_more_rows_are_asked_than_are_upstreams(odd):
    """The first of two training files is kept, and nanochat reads a file again before the buffer runs empty."""
    data, said = PackedData(odd / "packed"), []
    kept = len(data.split("train_first"))
    covered = min(shard["upstream_rows"] for shard in data.manifest["shards"] if shard["split"] != "train")
    assert covered < kept < len(data.split("train")) - 1
    all_kept = data.split("train_first").batch(range(kept))[0]
    assert torch.equal(data.eval_rows("train", kept * 32).batch(range(kept))[0], all_kept)
    for rows, choice in ((covered, "upstream"), (covered + 1, "spaced"), (kept + 1, "spaced")):
        data.warn_of_rows(choice, rows * 32, said.append)
        assert not said and data.name_rows(rows * 32, choice) == choice
    for rows, named in ((covered + 1, f"{covered:,}"), (kept + 1, f"{kept:,}")):
        data.warn_of_rows("upstream", rows * 32, said.append)
        assert named in said[0] and data.name_rows(rows * 32) == "first"
        said.clear()


def test_training_rows_kept_for_evaluation_are_limited(odd, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "FIRST_TOKENS", 100 * 32)
    unit = next(unit for unit in units.plan_units(ParquetCorpus(odd / "corpus")) if unit.split == TRAIN_FIRST)
    record = units.pack_unit(unit, odd / "corpus", Tokenizer.load(odd / "tokenizer"), 32, tmp_path)
    assert record["rows"] == record["upstream_rows"] == 100
    whole = (odd / "packed" / "train_first_000000.bin").read_bytes()
    assert (tmp_path / "train_first_000000.bin").read_bytes() == whole[: 100 * 33 * 2]


# Folders of earlier versions


def test_a_folder_without_rows_for_evaluation_serves(odd, tmp_path, capsys):
    """Its validation split came in units of eight row groups. Packing again replaces those units alone."""
    out, vocabulary, shards = tmp_path / "packed", Tokenizer.load(odd / "packed"), []
    shutil.copytree(odd / "packed", out)
    for shard in PackedData(out).manifest["shards"]:
        if shard["split"] == "train":
            shards.append({key: value for key, value in shard.items() if key != "upstream_rows"})
        else:
            for end in ("bin", "json"):
                (out / f"{shard['name']}.{end}").unlink()
    for number, first in enumerate((0, 8, 16)):
        unit = units.Unit(f"val_{number:06d}", "val", "2.parquet", first, min(first + 8, 18))
        shards.append({**units.pack_unit(unit, odd / "corpus", vocabulary, 32, out), "new": True})
    rewrite_json(out / "manifest.json", shards=shards)
    old, said = PackedData(out), []
    assert not old.has_upstream_rows and PackedData(odd / "packed").has_upstream_rows
    old.warn_of_rows("spaced", 320, said.append)
    assert not said
    old.warn_of_rows("upstream", 320, said.append)
    assert len(said) == 1 and str(out / "manifest.json") in said[0]
    for split in ("train", "val"):
        rows, spaced = old.split(split), old.eval_rows(split, 50 * 32, "spaced")
        assert torch.equal(old.eval_rows(split, 50 * 32).batch(range(50))[0], spaced.batch(range(50))[0])
        assert torch.equal(spaced.batch([49])[0], rows.batch([49 * len(rows) // 50])[0])
    pack.main(config(odd, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    pack.main(config(odd, out))
    names = [{path.name for path in folder.iterdir()} for folder in (out, odd / "packed")]
    assert bins(out) == bins(odd / "packed") and names[0] == names[1]


def test_a_folder_that_does_not_say_whether_documents_are_split_goes_on(own, capsys):
    """None were."""
    out = own / "packed"
    pack.main(config(own, out))
    for name in ("plan.json", "manifest.json"):
        assert json.loads((out / name).read_text())["split_documents"] is False
        rewrite_json(out / name, split_documents=None)
    want = bins(out)
    pack.main(automatic(own, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    (out / "train_000000.bin").unlink()
    pack.main(automatic(own, out))
    assert bins(out) == want


# People's own text


LONG = "\n\n".join(" ".join(tiny.documents(3, number)) for number in range(120))
TEXTS = [LONG, LONG.upper(), *tiny.documents(30, 1)]


@pytest.fixture
def own(packed, tmp_path):
    """A folder with a corpus of two books of 360 sentences and some notes, and the tokenizer."""
    write_parquet(tmp_path / "corpus", shard_00000=TEXTS, shard_00001=[LONG.title()])
    shutil.copytree(packed / "tokenizer", tmp_path / "tokenizer")
    return tmp_path


def test_files_in_no_split_are_named(own, tmp_path, capsys):
    """Where others say by their names what is held out."""
    texts = {name: [f"{name} " * 400] * 4 for name in ("cooking", "dev-notes", "training-manual")}
    write_parquet(tmp_path / "named", **texts)
    pack.main(automatic(own, tmp_path / "packed", corpus=tmp_path / "named"))
    assert f"{tmp_path / 'named'}: not read: 1 .parquet\n" in capsys.readouterr().out


def test_own_text_is_not_cropped(own, capsys):
    """nanochat's rows hold the beginning of a book and throw the rest away, and then packing says what to change."""
    pack.main(config(own, own / "theirs"))
    assert "pack with --split-documents yes" in capsys.readouterr().out
    pack.main(automatic(own, own / "ours"))
    data, said = PackedData(own / "ours"), capsys.readouterr().out
    pieces = sum(shard["pieces"] for shard in data.manifest["shards"])
    assert "in no row" not in said and pieces > 33
    rows = np.fromfile(data.folder / "train_000000.bin", "<u2").reshape(-1, data.sequence_len + 1)
    kept, given_ids = np.sum(rows != data.tokenizer.bos_id), sum(len(data.tokenizer.encode(text)) for text in TEXTS)
    assert given_ids - 33 < kept <= given_ids and (rows[:, 0] == data.tokenizer.bos_id).all()
    assert not data.has_upstream_rows and data.name_rows(320) == "spaced"


def test_rows_of_fineweb_stay_nanochats(own):
    """In the folder it was fetched to, in make's folder of links, and in one that an earlier make wrote."""
    pack.main(config(own, own / "theirs"))
    home = own / "base" / "corpus" / "fineweb"
    home.parent.mkdir(parents=True)
    shutil.copytree(own / "corpus", home)
    (home / "source.json").write_text(json.dumps({"source": "fineweb"}))
    linked, earlier, other = (home.with_name(name) for name in ("fineweb-2", "fineweb-old", "other"))
    make.finish_corpus(home, linked, 2)
    shutil.copytree(linked, earlier, copy_function=os.link)
    (earlier / "source.json").unlink()
    shutil.copytree(own / "corpus", other)
    for corpus in (home, linked, earlier, other):
        out = own / f"packed-{corpus.name}"
        pack.main(automatic(own, out, corpus=corpus))
        assert PackedData(out).has_upstream_rows == (bins(out) == bins(own / "theirs")) == (corpus != other)


def test_a_run_is_not_continued_on_other_rows_of_the_same_text(own):
    """Split where the run's were not, or cut by another version. Checkpoints of earlier versions do not say which."""
    run = own / "run"
    for folder, choice in (("split", "yes"), ("whole", "no"), ("others", "no")):
        pack.main(config(own, own / folder, split_documents=choice))
    shards = json.loads((own / "others/manifest.json").read_text())["shards"]
    next(shard for shard in shards if shard["split"] == "train")["sha256"] = "0" * 64
    rewrite_json(own / "others/manifest.json", shards=shards)
    split, whole = PackedData(own / "split"), PackedData(own / "whole")
    others = PackedData(own / "others", verify=False)
    for data in (split, whole):
        data.check_same(data.identity(run), run)
    for data, saved in ((split, whole), (whole, split)):
        with tiny.one_line_error("was packed with another --split-documents than the run in"):
            data.check_same(saved.identity(run), run)
    saved = whole.identity(run)
    with tiny.one_line_error("has other rows than the run in .*, though they are of the same text"):
        others.check_same(saved, run)
    del saved["train_rows"]
    others.check_same(saved, run)


# Refusals


def test_what_a_folder_was_not_packed_with_is_refused(packed, tmp_path):
    out = tmp_path / "packed"
    shutil.copytree(packed / "packed", out)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=packed / "corpus", out=tmp_path / "tokenizer", vocab_size=290))
    tiny.write_corpus(tmp_path / "corpus", docs=401)
    for changes, message in (
        ({"sequence_len": 33}, r"was packed with sequence length 32; choose another --out \(with make, BASE\), or del"),
        ({"tokenizer": tmp_path / "tokenizer"}, "was packed with another tokenizer"),
        ({"corpus": tmp_path / "corpus"}, r"other corpus files: 2 changed \(shard_00000.parquet, shard_00001.parquet"),
        ({"split_documents": "yes"}, "was packed with --split-documents no"),
    ):
        with tiny.one_line_error(message):
            pack.main(config(packed, out, **changes))
    assert bins(out) == bins(packed / "packed")
    pack.main(config(packed, out))


def test_a_small_corpus_packs_at_a_lower_length(packed, tmp_path):
    counts = "0 training and 0 validation rows"
    with tiny.one_line_error(f"too small for rows of 100000 tokens: {counts}.*lower --sequence-len"):
        pack.main(config(packed, tmp_path / "packed", sequence_len=100_000))
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {".lock", "tokenizer.json"}
    pack.main(config(packed, tmp_path / "packed"))
    assert bins(tmp_path / "packed") == bins(packed / "packed")
