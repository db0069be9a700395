"""Packing: nanochat's rows are upstream's, people's own text is not cropped."""

import itertools
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
from nanochat_gka import corpus, pack, tokenizer
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.packing import best_fit_rows
from nanochat_gka.data.tokenizer import Tokenizer
from tiny_pack import bins, config, rewrite_json, write_parquet

BOS = 50_000


# The rules


def cut(documents: list, size: int) -> list[list]:
    """Batches of `size`, the last one shorter."""
    return [documents[first : first + size] for first in range(0, len(documents), size)]


def test_rows_are_upstreams():
    want = golden.GOLDEN["packing"]
    lengths = [3 + (k * k * 31 + 17 * k) % 61 for k in range(400)]
    documents = [np.array([BOS] + [k] * length, dtype=np.uint16) for k, length in enumerate(lengths)]
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


# nanochat's rows


def upstream_rows(paths: list[Path], vocabulary: Tokenizer, capacity: int, count: int) -> list[list[int]]:
    """The first rows of nanochat's loader with one process, which begins again when the files have been read."""
    files = (pq.ParquetFile(path) for path in itertools.cycle(paths))
    groups = (file.read_row_group(group).column("text") for file in files for group in range(file.num_row_groups))
    documents = ([[vocabulary.bos_id, *vocabulary.encode(text)] for text in texts.to_pylist()] for texts in groups)
    source, buffer, rows = (batch for group in documents for batch in cut(group, 128)), [], []
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


def test_rows_for_evaluation_are_upstreams_and_are_called_so(tmp_path):
    """As far as nanochat's loader reads a file before its buffer runs empty, and as far as they are stored.

    Row groups have sizes that 128 does not divide, empty documents, and documents longer than a row.
    """
    schema, sizes = pa.schema([("text", pa.string())]), [1, 77, 130, 300, 129, 513] * 3
    paths = [write_parquet(tmp_path / "corpus") / f"{number}.parquet" for number in range(3)]
    for number, path in enumerate(paths):
        documents = enumerate(tiny.documents(2500, number))
        texts = ["" if k % 11 == 3 else text * (9 if k % 13 == 5 else 1) for k, text in documents]
        with pq.ParquetWriter(path, schema) as writer:
            for first, size in zip(np.cumsum([0, *sizes]), sizes):
                writer.write_table(pa.table({"text": texts[first : first + size]}, schema))
    tokenizer.main(tokenizer.TokenizerConfig(tmp_path / "corpus", tmp_path / "tokenizer", vocab_size=300))
    pack.main(config(tmp_path, tmp_path / "packed"))
    data = PackedData(tmp_path / "packed")
    shards = {shard["name"]: shard for shard in data.manifest["shards"]}
    counts = {}
    for split, name, files in (("val", "val", paths[-1:]), ("train", "train_first", paths[:-1])):
        counts[split] = count = shards[f"{name}_000000"]["upstream_rows"]
        assert len(data.split(name)) > count > 500
        ids, targets = data.eval_rows(split, count * 32).batch(range(count))
        rows = torch.cat([ids, targets[:, -1:]], dim=1).tolist()
        assert rows == upstream_rows(files, data.tokenizer, 33, count)
    covered, stored = min(counts.values()), len(data.split("train_first"))
    assert covered < stored < len(data.split("train"))
    for tokens, name, count in (
        (1, "train_first", 1),
        (320, "train_first", 10),
        (-1, "train", len(data.split("train"))),
    ):
        rows = data.eval_rows("train", tokens)
        assert len(rows) == count and torch.equal(rows.batch(range(count))[1], data.split(name).batch(range(count))[1])
    names = [data.name_rows(count * 32) for count in (covered, covered + 1, stored + 1)]
    assert names == ["upstream", "first", "first"] and data.name_rows(covered * 32, "spaced") == "spaced"


# People's own text


LONG = "\n\n".join(" ".join(tiny.documents(3, number)) for number in range(120))
TEXTS = [LONG, LONG.upper(), *tiny.documents(30, 1)]


@pytest.fixture(scope="module")
def books(packed, tmp_path_factory):
    """A corpus of two books of 360 sentences and some notes, the tokenizer, and rows of both kinds."""
    root = tmp_path_factory.mktemp("books")
    write_parquet(root / "corpus", shard_00000=TEXTS, shard_00001=[LONG.title()])
    shutil.copytree(packed / "tokenizer", root / "tokenizer")
    for name, choice in (("unsplit", "no"), ("split", "auto")):
        pack.main(config(root, root / name, split_documents=choice))
    return root


def test_own_text_is_not_cropped(books, capsys):
    """nanochat's rows hold the beginning of a book and drop its rest, and then packing prints what to change."""
    for name, choice in (("unsplit", "no"), ("split", "auto")):
        pack.main(config(books, books / name, split_documents=choice))
        output = capsys.readouterr().out
        assert ("--split-documents yes" in output) == ("in no row" in output) == (name == "unsplit")
    data = PackedData(books / "split")
    rows = np.fromfile(data.folder / "train_000000.bin", "<u2").reshape(-1, data.sequence_len + 1)
    in_rows = np.sum(rows != data.tokenizer.bos_id)
    tokens = sum(len(data.tokenizer.encode(text)) for text in TEXTS)
    assert tokens - 33 < in_rows <= tokens and (rows[:, 0] == data.tokenizer.bos_id).all()
    assert sum(shard["pieces"] for shard in data.manifest["shards"]) > 33
    assert data.name_rows(320) == "spaced"


def test_rows_of_fineweb_stay_nanochats(books, tmp_path):
    """By the note of the command that fetches FineWeb-Edu: in the folder it was fetched to and in one of links."""
    for source in ("fineweb", "other"):
        folder = shutil.copytree(books / "corpus", tmp_path / source)
        (folder / "source.json").write_text(json.dumps({"source": source}))
    corpus.main(corpus.CorpusConfig("fineweb", tmp_path / "linked", 2, downloads=tmp_path / "fineweb"))
    for name in ("fineweb", "linked", "other"):
        out = tmp_path / f"packed-{name}"
        pack.main(config(books, out, corpus=tmp_path / name, split_documents="auto"))
        assert (bins(out) == bins(books / "unsplit")) == (name != "other")


def test_a_run_is_not_continued_on_other_rows_of_the_same_text(books, tmp_path):
    """Split where the run's were not, or packed in another way."""
    shutil.copytree(books / "unsplit", tmp_path / "other")
    shards = json.loads((tmp_path / "other/manifest.json").read_text())["shards"]
    next(shard for shard in shards if shard["split"] == "train")["sha256"] = "0" * 64
    rewrite_json(tmp_path / "other/manifest.json", shards=shards)
    folders = {"split": books / "split", "unsplit": books / "unsplit", "other": tmp_path / "other"}
    data = {name: PackedData(folder, verify=False) for name, folder in folders.items()}
    for now, before in itertools.permutations(data, 2):
        saved = data[before].identity(tmp_path)
        data[before].check_same(saved, tmp_path)
        with tiny.one_line_error("another --split-documents" if "split" in (now, before) else "another version"):
            data[now].check_same(saved, tmp_path)


def test_rows_of_something_else_are_refused(packed, tmp_path):
    out = shutil.copytree(packed / "packed", tmp_path / "packed")
    tokenizer.main(tokenizer.TokenizerConfig(corpus=packed / "corpus", out=tmp_path / "tokenizer", vocab_size=290))
    tiny.write_corpus(tmp_path / "corpus", docs=401)
    for changes, message in (
        ({"sequence_len": 33}, "sequence length 32; choose another --out"),
        ({"tokenizer": tmp_path / "tokenizer"}, "another tokenizer"),
        ({"corpus": tmp_path / "corpus"}, r"2 changed \(shard_00000.parquet, shard_00001.parquet"),
        ({"split_documents": "yes"}, "--split-documents no"),
    ):
        with tiny.one_line_error(message):
            pack.main(config(packed, out, **changes))
    assert bins(out) == bins(packed / "packed")
    pack.main(config(packed, out))


def test_a_small_corpus_packs_at_a_lower_length(packed, tmp_path):
    with tiny.one_line_error("too small for rows of 100000 tokens.*lower --sequence-len"):
        pack.main(config(packed, tmp_path / "packed", sequence_len=100_000))
    pack.main(config(packed, tmp_path / "packed"))
    assert bins(tmp_path / "packed") == bins(packed / "packed")
