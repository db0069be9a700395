"""Parquet as other tools write it: any column of strings is text, and no row group is too large for the memory."""

import json
import random
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from nanochat_gka import pack, tokenizer
from nanochat_gka.data import units
from nanochat_gka.data.corpora import ParquetCorpus, document_batches
from nanochat_gka.data.units import plan_units
from tiny_pack import bins, config, write_parquet

TEXTS = tiny.documents(300, 0)


def words(root, **changes) -> tokenizer.TokenizerConfig:
    return tokenizer.TokenizerConfig(
        **{"corpus": root / "corpus", "out": root / "tokenizer", "vocab_size": 300, **changes}
    )


# What is read


STRINGS = {
    "string_view": pa.array(TEXTS, pa.string_view()),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "large dictionary": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
}


@pytest.mark.parametrize("column", STRINGS.values(), ids=STRINGS)
def test_every_column_of_strings_is_text(tmp_path, column):
    tables = {"a": pa.table({"id": range(300), "text": column}), "b": pa.table({"text": column})}
    corpus = ParquetCorpus(write_parquet(tmp_path / "corpus", **tables))
    assert [list(corpus.documents(split)) for split in ("train", "val")] == [TEXTS, TEXTS]


def test_nulls_are_no_documents_and_empty_texts_are(packed, tmp_path):
    """Empty documents count as in nanochat's loader, which refuses nulls."""
    texts = pq.read_table(packed / "corpus" / "shard_00000.parquet").column("text").to_pylist()
    counts = []
    for name, holes in (("nulls", (None, None)), ("empty", (None, ""))):
        table = pa.table({"text": [item for text in texts for item in (holes[0], text, holes[1])]})
        root = tmp_path / name
        write_parquet(root / "corpus", a=table, b=table)
        assert list(ParquetCorpus(root / "corpus").documents("train")) == texts
        pack.main(config(root, root / "packed", tokenizer=packed / "tokenizer"))
        shards = json.loads((root / "packed/manifest.json").read_text())["shards"]
        counts += [(shard["documents"], shard["tokens"]) for shard in shards if shard["split"] == "train"]
    (documents, tokens), (more_documents, more_tokens) = counts
    assert documents == len(texts) and more_documents - documents == more_tokens - tokens == len(texts)


@pytest.mark.parametrize(
    "names, train, val",
    [
        (("train-00000-of-00002", "train-00001-of-00002", "validation"), 2, ["validation"]),
        (("test-00000-of-00001", "train-00000-of-00001"), 1, ["test-00000-of-00001"]),
        (("wiki.train", "wiki.valid.1", "wiki.valid.2"), 1, ["wiki.valid.1", "wiki.valid.2"]),
        (("testament", "trainspotting", "validity"), 2, ["validity"]),
        (("my-train-notes", "our-val-notes", "zebra"), 2, ["zebra"]),  # nor does a word inside
    ],
)
def test_names_that_say_train_and_validation_decide(tmp_path, names, train, val):
    corpus = ParquetCorpus(write_parquet(tmp_path, **{name: [name] for name in names}))
    assert [path.stem for path in corpus.files("val")] == val == list(corpus.documents("val"))
    assert len(list(corpus.documents("train"))) == train


# Units of work


def test_parts_of_a_row_group_hold_it_once(packed, tmp_path, monkeypatch):
    """A large row group gives work to several processes; the documents are all there, in their order."""
    monkeypatch.setattr(units, "DOCUMENTS_PER_PART", 500)
    corpus = write_parquet(tmp_path / "corpus", a=tiny.documents(4000, 1), b=TEXTS)

    def train_units(**how):
        return [unit for unit in plan_units(ParquetCorpus(corpus), **how) if unit.split == "train"]

    assert [(unit.name, unit.first, unit.last) for unit in train_units()] == [("train_000000", 0, 1)]  # nanochat's
    parts = train_units(cut=True)
    assert [unit.name for unit in parts] == [f"train_{number:06d}" for number in range(8)]
    batches = [batch for unit in parts for batch in unit.batches(corpus)]
    assert batches == list(document_batches(corpus / "a.parquet"))
    assert [text for batch in batches for text in batch] == tiny.documents(4000, 1)

    def pack_with(out, **how):
        pack.main(config(tmp_path, out, tokenizer=packed / "tokenizer", **how))
        return bins(out)

    one = pack_with(tmp_path / "one", split_documents="yes")
    assert len(one) == 9 and pack_with(tmp_path / "two", split_documents="yes", workers=2) == one
    assert pack_with(tmp_path / "whole").keys() == {"train_000000.bin", "train_first_000000.bin", "val_000000.bin"}
    (tmp_path / "one/manifest.json").unlink()
    (tmp_path / "one/train_000003.bin").unlink()
    assert pack_with(tmp_path / "one", split_documents="yes") == one


def test_small_row_groups_make_the_units_of_ever(tmp_path):
    """Packed rows of today stay valid: their records have these fields and no others."""
    corpus = ParquetCorpus(tiny.write_corpus(tmp_path, docs=1000, row_group=50))
    assert [vars(unit) for unit in plan_units(corpus)][2:] == [
        {"name": f"train_{n:06d}", "split": "train", "file": "shard_00000.parquet", "first": 8 * n, "last": last}
        for n, last in enumerate((8, 16, 20))
    ]


PEAK = """
import sys
from pathlib import Path
from nanochat_gka.data.corpora import document_batches
def peak(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
next(document_batches(Path(sys.argv[1])))
before = peak()
print(sum(len(text) for batch in document_batches(Path(sys.argv[2])) for text in batch), (peak() - before) // 1024)
"""


@pytest.mark.parametrize("kind", ["strings", "dictionary"])
def test_memory_does_not_grow_with_the_row_group(tmp_path, kind):
    """16,000 texts that hardly compress, or 500 such texts again and again in a dictionary."""
    rng, different = random.Random(0), 500 if kind == "dictionary" else 16_000
    column = pa.array([rng.randbytes(2200).hex() for _ in range(different)])
    if kind == "dictionary":
        column = pa.DictionaryArray.from_arrays(pa.array([i % 500 for i in range(16_000)], pa.int32()), column)
    files = write_parquet(tmp_path, a=TEXTS) / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": column}), files[1], row_group_size=16_000)
    done = subprocess.run([sys.executable, "-c", PEAK, *files], capture_output=True, text=True, check=True)
    characters, megabytes = map(int, done.stdout.split())
    assert characters > 60_000_000 and megabytes < 40


# Mistakes


def test_what_became_of_the_files_is_said(tmp_path):
    """The same size with other texts is a change too. Copies are none."""
    corpus = tiny.write_corpus(tmp_path / "corpus", files=3)
    tokenizer.main(words(tmp_path))
    shutil.copytree(corpus, tmp_path / "copy", copy_function=shutil.copyfile)
    tokenizer.main(words(tmp_path, corpus=tmp_path / "copy"))
    path, before = corpus / "shard_00000.parquet", (corpus / "shard_00000.parquet").read_bytes()
    assert b"bandwidth kernel" in before
    path.write_bytes(before.replace(b"bandwidth kernel", b"kernel bandwidth", 1))
    with tiny.one_line_error(r"trained with other corpus files: 1 changed \(shard_00000.parquet\); choose"):
        tokenizer.main(words(tmp_path))
    path.rename(corpus / "more.parquet")
    with tiny.one_line_error(r"1 added \(more.parquet\), 1 removed \(shard_00000.parquet\)"):
        tokenizer.main(words(tmp_path))


def zeros(content: bytes) -> bytes:
    return content[:1000] + bytes(1000) + content[2000:]


ONE_FILE = "needs at least two .parquet files"
BAD_FILES = {
    "not parquet": (lambda content: b"once upon a time", "b.parquet is not a readable parquet file"),
    "zeros inside": (zeros, "b.parquet is damaged in row group 0"),
    "missing": (None, ONE_FILE),
    "another column": (pa.table({"content": ["a b"], "id": [1]}), "b.parquet .*column named text.* content, id"),
    "null strings": (pa.table({"text": pa.array([None] * 300, pa.string())}), "b.parquet .*nothing but nulls"),
    "numbers": (pa.table({"text": pa.array([1, 1]).dictionary_encode()}), "b.parquet .*type int64"),
    "empty": (pa.table({"text": pa.array([], pa.string())}), "no text for the val split: .*b.parquet"),
}


@pytest.mark.parametrize("content, message", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_one_line(packed, tmp_path, content, message):
    """Of the first command that reads it, also the last file, which the tokenizer does not learn from."""
    path = write_parquet(tmp_path / "corpus", a=TEXTS, b=TEXTS) / "b.parquet"
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    elif content:
        path.write_bytes(content(path.read_bytes()))
    else:
        path.unlink()
    with tiny.one_line_error(message):
        pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))


def test_a_missing_corpus_and_a_file_named_train_held_out_are_one_line(tmp_path):
    with tiny.one_line_error("corpus folder not found: .*corpus"):
        tokenizer.main(words(tmp_path))
    names = ("train-00000-of-00002", "train-00001-of-00002")
    write_parquet(tmp_path / "corpus", **dict.fromkeys(names, TEXTS))
    with tiny.one_line_error("train-00001-of-00002.parquet .*nanochat_gka.corpus --source"):
        tokenizer.main(words(tmp_path))
