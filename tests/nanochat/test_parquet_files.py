"""Parquet as other tools write it: any column of strings is text, and no row group is too large for the memory."""

import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from nanochat_gka import pack, tokenizer
from nanochat_gka.data import units
from nanochat_gka.data.corpora import ParquetCorpus, document_batches
from nanochat_gka.data.units import plan_units
from tiny_pack import bins, config

TEXTS = tiny.documents(300, 0)


def write(folder: Path, **tables: pa.Table) -> Path:
    """A corpus of one file for each table."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    return folder


STRINGS = {
    "string_view": pa.array(TEXTS, pa.string_view()),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "large dictionary": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
}


@pytest.mark.parametrize("column", STRINGS.values(), ids=STRINGS)
def test_every_column_of_strings_is_text(packed, tmp_path, column):
    folder = write(tmp_path / "corpus", a=pa.table({"id": range(300), "text": column}), b=pa.table({"text": column}))
    corpus = ParquetCorpus(folder)
    assert [list(corpus.documents(split)) for split in ("train", "val")] == [TEXTS, TEXTS]
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))
    manifest = json.loads((tmp_path / "packed/manifest.json").read_text())
    assert [shard["documents"] for shard in manifest["shards"]] == [300, 300, 300]


NO_TEXT = {
    "twice": (
        pa.Table.from_arrays([pa.array(TEXTS)] * 2, ["text", "text"]),
        "needs .* named text, it has 2 of that name",
    ),
    "null strings": (pa.table({"text": pa.array([None] * 300, pa.string())}), "nothing but nulls in its column text"),
    "nulls": (pa.table({"text": pa.nulls(300)}), "needs a string column named text, its text is of type null"),
    "lists": (pa.table({"text": [["a"]]}), "needs a string column named text, its text is of type list<.*>"),
    "bytes": (pa.table({"text": [b"a"]}), "needs a string column named text, its text is of type binary"),
    "numbers": (pa.table({"text": pa.array([1, 1]).dictionary_encode()}), "its text is of type int64"),
}


@pytest.mark.parametrize("place", ["a", "b"])
@pytest.mark.parametrize("table, message", NO_TEXT.values(), ids=NO_TEXT)
def test_a_file_without_text_is_one_line_of_the_first_command(tmp_path, table, message, place):
    corpus = write(
        tmp_path / "corpus", **{"a": pa.table({"text": TEXTS}), "b": pa.table({"text": TEXTS}), place: table}
    )
    with tiny.one_line_error(f"{re.escape(str(corpus / place))}.parquet .*{message}"):
        tokenizer.main(tokenizer.TokenizerConfig(corpus=corpus, out=tmp_path / "tokenizer"))
    assert not (tmp_path / "tokenizer").exists()


@pytest.mark.parametrize("split, empty", [("train", "a"), ("val", "b")])
@pytest.mark.parametrize("texts", [[], ["", None]], ids=["no rows", "empty texts"])
def test_an_empty_split_is_one_line_of_the_first_command(tmp_path, split, empty, texts):
    tables = {"a": pa.table({"text": TEXTS}), "b": pa.table({"text": TEXTS})}
    corpus = write(tmp_path / "corpus", **{**tables, empty: pa.table({"text": pa.array(texts, pa.string())})})
    with tiny.one_line_error(f"no text for the {split} split: column text of {empty}.parquet is empty"):
        tokenizer.main(tokenizer.TokenizerConfig(corpus=corpus, out=tmp_path / "tokenizer"))


def test_one_empty_file_among_others_is_no_mistake(tmp_path):
    empty = pa.table({"text": pa.array([], pa.string())})
    corpus = write(tmp_path, a=pa.table({"text": TEXTS}), b=empty, c=pa.table({"text": TEXTS}))
    assert list(ParquetCorpus(corpus).documents("train")) == TEXTS


@pytest.mark.parametrize(
    "names, train, val",
    [
        (("train-00000-of-00002", "train-00001-of-00002", "validation"), 2, ["validation"]),
        (("dev", "test", "train"), 1, ["dev"]),
        (("test-00000-of-00001", "train-00000-of-00001"), 1, ["test-00000-of-00001"]),
        (("wiki.train", "wiki.valid.1", "wiki.valid.2"), 1, ["wiki.valid.1", "wiki.valid.2"]),
        (("train", "zebra"), 1, ["zebra"]),  # no name says validation: the last is it, as ever
        (("testament", "trainspotting", "validity"), 2, ["validity"]),
    ],
)
def test_names_that_say_train_and_validation_decide(tmp_path, names, train, val):
    corpus = ParquetCorpus(write(tmp_path, **{name: pa.table({"text": [name]}) for name in names}))
    assert [path.stem for path in corpus.files("val")] == val == list(corpus.documents("val"))
    assert len(list(corpus.documents("train"))) == train


def test_a_file_that_is_named_train_is_not_held_out(tmp_path):
    names = ("train-00000-of-00002", "train-00001-of-00002")
    corpus = write(tmp_path / "corpus", **{name: pa.table({"text": TEXTS}) for name in names})
    message = (
        r"train-00001-of-00002.parquet is the last file .* python -m nanochat_gka.corpus --source .*corpus --out FOLDER"
    )
    with tiny.one_line_error(message):
        tokenizer.main(tokenizer.TokenizerConfig(corpus=corpus, out=tmp_path / "tokenizer"))


def test_a_large_last_file_is_said_by_every_command(packed, tmp_path, capsys):
    corpus = tiny.write_corpus(tmp_path / "corpus", files=2)
    share = (corpus / "shard_00001.parquet").stat().st_size / sum(path.stat().st_size for path in corpus.iterdir())
    said = f"{corpus}: the last file is held out, shard_00001.parquet: {share:.0%} of the bytes\n"
    tokenizer.main(tokenizer.TokenizerConfig(corpus=corpus, out=tmp_path / "tokenizer", vocab_size=300))
    assert said in capsys.readouterr().out
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))
    assert said in capsys.readouterr().out
    tiny.write_corpus(corpus, files=30)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=corpus, out=tmp_path / "more", vocab_size=300))
    assert "held out" not in capsys.readouterr().out


def test_other_files_of_the_folder_are_counted(tmp_path, capsys):
    table = pa.table({"text": TEXTS})
    corpus = write(tmp_path / "corpus", **{"train": table, "val": table, "test": table})
    write(corpus / "deeper", a=table)
    (corpus / ".git").mkdir()
    for name in ("README.md", ".hidden", "LICENSE", ".git/a.txt"):
        (corpus / name).touch()
    tokenizer.main(tokenizer.TokenizerConfig(corpus=corpus, out=tmp_path / "tokenizer", vocab_size=300))
    assert f"{corpus}: not read: 1 .md, 2 .parquet, 1 without suffix\n" in capsys.readouterr().out


def test_every_validation_file_is_packed(packed, tmp_path):
    table = pa.table({"text": TEXTS})
    write(tmp_path / "corpus", **{"train": table, "val-0": table, "val-1": table.slice(0, 200)})
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))
    shards = json.loads((tmp_path / "packed/manifest.json").read_text())["shards"]
    assert [shard["documents"] for shard in shards if shard["split"] == "val"] == [300, 200]


def test_parts_of_a_row_group_hold_it_once(packed, tmp_path, monkeypatch):
    """A large row group gives work to several processes; the documents are all there, in their order."""
    monkeypatch.setattr(units, "DOCUMENTS_PER_PART", 500)
    texts = tiny.documents(4000, 1)
    write(tmp_path / "corpus", a=pa.table({"text": texts}), b=pa.table({"text": TEXTS}))
    whole = [unit for unit in plan_units(ParquetCorpus(tmp_path / "corpus")) if unit.split == "train"]
    assert [(unit.name, unit.first, unit.last) for unit in whole] == [
        ("train_000000", 0, 1)
    ]  # nanochat's rows, as ever
    planned = plan_units(ParquetCorpus(tmp_path / "corpus"), cut=True)
    parts = [unit for unit in planned if unit.split == "train"]
    assert [unit.name for unit in parts] == [f"train_{number:06d}" for number in range(8)]
    batches = [batch for unit in parts for batch in unit.batches(tmp_path / "corpus")]
    assert (
        batches == list(document_batches(tmp_path / "corpus/a.parquet"))
        and [text for batch in batches for text in batch] == texts
    )
    written = []
    for workers in (1, 2):
        out = tmp_path / f"packed{workers}"
        pack.main(config(tmp_path, out, tokenizer=packed / "tokenizer", workers=workers, split_documents="yes"))
        written.append(bins(out))
    assert written[0] == written[1] and len(written[0]) == 9
    pack.main(config(tmp_path, tmp_path / "whole", tokenizer=packed / "tokenizer", split_documents="no"))
    assert bins(tmp_path / "whole").keys() == {"train_000000.bin", "train_first_000000.bin", "val_000000.bin"}
    (tmp_path / "packed1/manifest.json").unlink()
    (tmp_path / "packed1/train_000003.bin").unlink()
    pack.main(config(tmp_path, tmp_path / "packed1", tokenizer=packed / "tokenizer", split_documents="yes"))
    assert bins(tmp_path / "packed1") == written[0]


def test_small_row_groups_make_the_units_of_ever(tmp_path):
    """Packed rows of today stay valid: their records have these fields and no others."""
    corpus = ParquetCorpus(tiny.write_corpus(tmp_path, docs=1000, row_group=50))
    assert [vars(unit) for unit in plan_units(corpus)][2:] == [
        {"name": f"train_{n:06d}", "split": "train", "file": "shard_00000.parquet", "first": 8 * n, "last": last}
        for n, last in enumerate((8, 16, 20))
    ]


def test_what_became_of_the_files_is_said(tmp_path):
    """The same size with other texts is a change too. Copies are none, nor what an earlier version did not note."""
    corpus, out = tiny.write_corpus(tmp_path / "corpus", files=3), tmp_path / "packed"
    words = tokenizer.TokenizerConfig(corpus=corpus, out=tmp_path / "tokenizer", vocab_size=300)
    tokenizer.main(words)
    pack.main(config(tmp_path, out))
    shutil.copytree(corpus, tmp_path / "copy", copy_function=shutil.copyfile)
    tokenizer.main(dataclasses.replace(words, corpus=tmp_path / "copy"))
    pack.main(config(tmp_path, out, corpus=tmp_path / "copy"))

    def refused(changes: str):
        with tiny.one_line_error(
            f"trained with other corpus files: {changes}; choose .* and run the same command again"
        ):
            tokenizer.main(words)
        with tiny.one_line_error(rf"packed with other corpus files: {changes}; choose .*\(rm -r .*/packed\)"):
            pack.main(config(tmp_path, out))

    path, before = corpus / "shard_00000.parquet", (corpus / "shard_00000.parquet").read_bytes()
    assert b"bandwidth kernel" in before
    path.write_bytes(before.replace(b"bandwidth kernel", b"kernel bandwidth", 1))
    refused(r"1 changed \(shard_00000.parquet\)")
    notes = [(file, json.loads(file.read_text())) for file in (words.out / "train.json", out / "plan.json")]
    for file, note in notes:
        file.write_text(json.dumps({key: value for key, value in note.items() if key != "checksums"}))
    tokenizer.main(words)
    pack.main(config(tmp_path, out))
    path.unlink()
    for number in range(4):
        shutil.copy(corpus / "shard_00002.parquet", corpus / f"more{number}.parquet")
    refused(r"4 added \(more0.parquet, more1.parquet, more2.parquet, ...\), 1 removed \(shard_00000.parquet\)")


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
    files = write(tmp_path, a=pa.table({"text": TEXTS})) / "a.parquet", tmp_path / "b.parquet"
    pq.write_table(pa.table({"text": column}), files[1], row_group_size=16_000)
    done = subprocess.run([sys.executable, "-c", PEAK, *files], capture_output=True, text=True, check=True)
    characters, megabytes = map(int, done.stdout.split())
    assert characters > 60_000_000 and megabytes < 40
