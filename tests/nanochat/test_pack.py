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


# People's own text


LONG = "\n\n".join(" ".join(tiny.documents(3, number)) for number in range(120))
TEXTS = [LONG, LONG.upper(), *tiny.documents(30, 1)]


@pytest.fixture
def own(packed, tmp_path):
    """A folder with a corpus of two books of 360 sentences and some notes, and the tokenizer."""
    write_parquet(tmp_path / "corpus", shard_00000=TEXTS, shard_00001=[LONG.title()])
    shutil.copytree(packed / "tokenizer", tmp_path / "tokenizer")
    return tmp_path


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
    assert data.name_rows(320) == "spaced"


def test_rows_of_fineweb_stay_nanochats(own):
    """By the note of the command that fetches FineWeb-Edu: in the folder it was fetched to and in one of links."""
    pack.main(config(own, own / "theirs"))
    for source in ("fineweb", "other"):
        folder = shutil.copytree(own / "corpus", own / source)
        (folder / "source.json").write_text(json.dumps({"source": source}))
    corpus.main(corpus.CorpusConfig("fineweb", own / "fineweb-2", 2, downloads=own / "fineweb"))
    for name in ("fineweb", "fineweb-2", "other"):
        pack.main(automatic(own, own / f"packed-{name}", corpus=own / name))
        assert (bins(own / f"packed-{name}") == bins(own / "theirs")) == (name != "other")


def test_a_run_is_not_continued_on_other_rows_of_the_same_text(own):
    """Split where the run's were not, or packed in another way."""
    run = own / "run"
    for folder, choice in (("split", "yes"), ("whole", "no"), ("others", "no")):
        pack.main(config(own, own / folder, split_documents=choice))
    shards = json.loads((own / "others/manifest.json").read_text())["shards"]
    next(shard for shard in shards if shard["split"] == "train")["sha256"] = "0" * 64
    rewrite_json(own / "others/manifest.json", shards=shards)
    split, whole, others = (PackedData(own / name, verify=False) for name in ("split", "whole", "others"))
    for data, saved, message in (
        (split, whole, "another --split-documents"),
        (whole, split, "another --split-documents"),
        (others, whole, "other rows"),
    ):
        saved.check_same(saved.identity(run), run)
        with tiny.one_line_error(message):
            data.check_same(saved.identity(run), run)


REFUSED = [
    ({"sequence_len": 33}, "sequence length 32; choose another --out"),
    ({"tokenizer": "tokenizer"}, "another tokenizer"),
    ({"corpus": "corpus"}, r"2 changed \(shard_00000.parquet, shard_00001.parquet"),
    ({"split_documents": "yes"}, "--split-documents no"),
]


def test_what_a_folder_was_not_packed_with_is_refused(packed, tmp_path):
    out = shutil.copytree(packed / "packed", tmp_path / "packed")
    tokenizer.main(tokenizer.TokenizerConfig(corpus=packed / "corpus", out=tmp_path / "tokenizer", vocab_size=290))
    tiny.write_corpus(tmp_path / "corpus", docs=401)
    for changes, message in REFUSED:
        changes = {key: tmp_path / value if key == value else value for key, value in changes.items()}
        with tiny.one_line_error(message):
            pack.main(config(packed, out, **changes))
    assert bins(out) == bins(packed / "packed")
    pack.main(config(packed, out))


def test_a_small_corpus_packs_at_a_lower_length(packed, tmp_path):
    with tiny.one_line_error("too small for rows of 100000 tokens.*lower --sequence-len"):
        pack.main(config(packed, tmp_path / "packed", sequence_len=100_000))
    pack.main(config(packed, tmp_path / "packed"))
    assert bins(tmp_path / "packed") == bins(packed / "packed")
