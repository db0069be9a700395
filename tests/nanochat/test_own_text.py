"""People's own files become a corpus: which are read, what is held out, and one line for what cannot be read."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from nanochat_gka import corpus
from nanochat_gka.data import own_text
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.own_text import END_CHARS, LONGEST
from tiny_pack import rewrite_json, write_parquet

LINE = "It was said again that nothing is lost. "
BOOK = "\n\n".join(f"Chapter {number}. {LINE * 12}" for number in range(300))


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def lines(*texts: str) -> str:
    return "\n".join(json.dumps({"text": text}) for text in texts) + "\n"


def prepare(source: Path, out: Path, **flags) -> dict[str, list[str]]:
    """The documents of both splits."""
    corpus.main(corpus.CorpusConfig(str(source), out, **flags))
    made = ParquetCorpus(out)
    return {split: list(made.documents(split)) for split in ("train", "val")}


# Files, in the order of their names, and the documents in them.
READ = {
    "B.TXT": ("upper case", ["upper case"]),
    "[j]*.txt": ("odd name", ["odd name"]),
    "a.txt": ("\ufeffbyte order mark\r\nand lines\r\n", ["byte order mark\nand lines\n"]),
    "c.md.gz": (gzip.compress(b"packed ") + gzip.compress(b"twice"), ["packed twice"]),
    "d.txt.zst": (pa.compress(b"packed by zstd", "zstd", asbytes=True), ["packed by zstd"]),
    "e.jsonl": (
        '{"text": "1"}\n\n  \r\n{"text": null, "id": 1}\n{"text": "2024-01-01", "id": "a"}',
        ["1", "2024-01-01"],
    ),
    "f.json": ('[{"text": "in an array"},\n {"id": 7, "text": "again"}]', ["in an array", "again"]),
    "g.json": ('{\n "text": "an object"\n}', ["an object"]),
    "h.json.gz": (gzip.compress(lines("lines in json", "\ud800 half").encode()), ["lines in json", "? half"]),
    "i.jsonl": ("", []),
    "k/deep/l.md": ("in a folder", ["in a folder"]),
    "m.txt": ("", []),
    "n.json": ("", []),
    **{name: ("not read", []) for name in ("o.pdf", "p.PDF", "q", ".hidden.txt", ".git/a.txt")},
    "package.json": ('{"name": "no text"}', []),
}


def test_every_kind_of_file_is_read_in_the_order_of_names(tmp_path, capsys):
    source = write(tmp_path / "own", {name: content for name, (content, _) in READ.items()} | {"zz.txt": BOOK})
    pq.write_table(pa.table({"id": [1, 2], "text": ["parquet", None]}), source / "x.parquet")
    os.symlink(source, source / "k" / "loop")
    os.symlink(source / "B.TXT", source / "z.txt")
    documents, output = prepare(source, tmp_path / "out"), capsys.readouterr().out
    expected = [document for _, documents in READ.values() for document in documents]
    assert documents["train"][:-1] == [*expected, "parquet", "upper case"]
    assert documents["train"][-1] + documents["val"][0] == BOOK and len(documents["val"]) == 1
    assert "2 .pdf, 1 without suffix" in output and "package.json" in output


# What is held out


# The texts of files, the number of training documents, the characters that are held out, and how they begin.
ENDS = {
    "a book": ([BOOK], 1, END_CHARS, "Chapter "),
    "long": ([f"{LINE}\n\n" * (LONGEST // 30)], 2, LONGEST // 75, LINE),
    "short": (["word " * 2500] * 4, 4, 5_000, "word "),
    "medium": (["word " * 10_000] * 4, 4, 10_000, "word "),
    "large": (["word " * 100_000] * 4, 4, 20_000, "word "),
}


@pytest.mark.parametrize("texts, documents, end, start", ENDS.values(), ids=ENDS)
def test_the_end_of_few_documents_is_held_out(tmp_path, texts, documents, end, start):
    """A hundredth or more, from a paragraph or a word on. A long text comes in pieces."""
    source = write(tmp_path / "own", {f"{number}.txt": text for number, text in enumerate(texts)})
    made = prepare(source, tmp_path / "out")
    assert "".join(made["train"] + made["val"]) == "".join(texts)
    assert len(made["train"]) == documents and all(len(text) <= LONGEST for text in made["train"])
    assert len(made["val"]) == 1 and end <= len(made["val"][0]) < end * 1.1 and made["val"][0].startswith(start)


def test_one_document_in_a_hundred_is_held_out_wherever_it_stands(tmp_path):
    """And no text is in both splits."""
    texts = [f"{number} {text * 4}" for number, text in enumerate(tiny.documents(3000, 0))]
    held_out = []
    for number, order in enumerate((texts, [*texts[1000:], *texts[:1000]], [*texts, *texts])):
        made = prepare(write(tmp_path / f"{number}", {"a.jsonl": lines(*order)}), tmp_path / f"out{number}")
        assert sorted(made["train"] + made["val"]) == sorted(order) and set(made["train"]).isdisjoint(made["val"])
        held_out.append(set(made["val"]))
    assert held_out[0] == held_out[1] == held_out[2] and 20 <= len(held_out[0]) <= 40


SPLITS = {
    "folders": {"train/a.txt": "t", "validation/b.txt": "v", "test/c.txt": "x", "README.md": "x"},
    "deep folders": {"data/train/a/b.txt": "t", "data/val/b.txt": "v"},
    "files": {"train.jsonl": lines("t"), "Dev.jsonl.gz": gzip.compress(lines("v").encode())},
    "dotted": {"wiki.train.txt": "t", "wiki.valid.1.txt": "v", "wiki.test.txt": "x"},
    "third": {"train_001.txt": "t", "validation1.txt": "v", "test/a.md": "x", "README.md": "x"},
    "numbered": {"train-00000-of-00001.json": lines("t"), "test-00000-of-00001.json": lines("v")},
}
NO_SPLITS = {
    "words": {"Training plan.md": "plan", **{f"2024-{number:02} Dev meeting.md": "x" for number in range(60)}},
    "other folder": {"dev/a.md": "of dev", "training/b.md": "of training", "docs/c.md": "of docs"},
    "one file in no split": {"train.txt": "t", "val.txt": "v", "notes.txt": "n"},
    "one split alone": {f"test-{number}.txt": "many words" for number in range(10)},
}


@pytest.mark.parametrize("files", [*SPLITS.values(), *NO_SPLITS.values()], ids=[*SPLITS, *NO_SPLITS])
def test_names_decide_what_is_held_out_if_every_file_is_in_a_split(tmp_path, files):
    """Otherwise no text is left out because other files have such names."""
    if files in SPLITS.values():
        assert prepare(write(tmp_path / "own", files), tmp_path / "out") == {"train": ["t"], "val": ["v"]}
        return
    files = {name: f"{content} " * 20 for name, content in files.items()}
    made = prepare(write(tmp_path / "own", files), tmp_path / "out")
    text = "".join(made["train"] + made["val"])
    assert all(content in text for content in files.values()) and len(text) == sum(map(len, files.values()))


def test_a_folder_that_is_a_corpus_is_linked_and_followed(tmp_path):
    """Its files are neither rewritten nor copied, the last is held out, and the links follow them."""
    shards = write_parquet(tmp_path / "own", shard_00000=["0"], shard_00001=["1"], shard_00002=["2"])
    write(shards, {"notes.md": "not read"})
    out, again = tmp_path / "out", tmp_path / "again"
    assert prepare(shards, out) == prepare(out, again) == {"train": ["0", "1"], "val": ["2"]}
    assert all(path.samefile(shards / path.name) for path in (*out.glob("*.parquet"), *again.glob("*.parquet")))
    (shards / "shard_00002.parquet").unlink()
    write_parquet(shards, shard_00001=["changed"])
    assert prepare(shards, out) == {"train": ["0"], "val": ["changed"]}
    corpus.main(corpus.CorpusConfig(str(shards), shards))
    assert not (shards / "source.json").exists()


def test_it_is_written_again_when_files_or_rules_change_and_a_copy_is_no_change(tmp_path, capsys):
    source, out = write(tmp_path / "own", {"a.txt": BOOK, "b.txt": "same size 1", "c.txt": "gone"}), tmp_path / "out"

    def is_written(**flags) -> bool:
        before = os.stat(out / "train.parquet").st_mtime_ns if out.exists() else None
        prepare(source, out, **flags)
        return os.stat(out / "train.parquet").st_mtime_ns != before

    assert is_written()
    shutil.move(source, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", source, copy_function=shutil.copyfile)
    assert not is_written()
    for wrong in ({"rules": None}, {"files": []}, {"files": {"a.txt": 5}}):
        rewrite_json(out / "files.json", **wrong)
        assert is_written()
    write(source, {"b.txt": "same size 2", "d.txt": "new"})
    (source / "c.txt").unlink()
    assert is_written()
    assert "1 added (d.txt), 1 removed (c.txt), 1 changed (b.txt)" in capsys.readouterr().out
    (out / "val.parquet").unlink()  # or the command was killed
    assert is_written() and is_written(text_column="other")


def test_few_records_without_text_are_skipped_and_named(tmp_path, capsys, monkeypatch):
    """The corpus is that of the other records to the byte; where none of the first has text it is not read on."""
    texts = [{"a": {"text": text}} for text in tiny.documents(1189, 0)]
    wrong = [{"a": {"body": "x"}}, {"a": None}, {"a": {"text": 5}}, ["x"]] * 3
    for name, records in (("own", [*wrong[:-1], *texts, wrong[-1]]), ("clean", texts)):
        write(tmp_path / name, {"a.jsonl": "\n".join(map(json.dumps, records))})
    made = [prepare(tmp_path / name, tmp_path / f"{name}-out", text_column="a.text") for name in ("own", "clean")]
    output = capsys.readouterr().out
    assert made[0] == made[1] and "12 of 1,201 records" in output
    assert [f"a.jsonl line {number}" in output for number in (1, 10, 11)] == [True, True, False]
    for file in ("train.parquet", "val.parquet"):
        assert (tmp_path / "own-out" / file).read_bytes() == (tmp_path / "clean-out" / file).read_bytes()
    with tiny.one_line_error("1 of 1 records, .*a.jsonl line 1 is .*body.*--text-column"):
        prepare(tmp_path / "own", tmp_path / "own-out", text_column="a.text", strict=True)
    monkeypatch.setattr(own_text, "CERTAIN", 11)
    with tiny.one_line_error("11 of 11 records, "):
        prepare(tmp_path / "own", tmp_path / "out", text_column="a.text")


REFUSED = {
    "latin": ({"a.txt": BOOK, "b.txt": "café".encode("latin-1")}, "b.txt is not text in UTF-8"),
    "empty": ({".hidden.txt": "x"}, "own has no text to read"),
    "missing": ({"a.jsonl": '{"body": "x", "id": 1}'}, "a.jsonl .*line 1 .*body.*id"),
    "no object": ({"a.json": '["x"]'}, "a.json .*record 1"),
    "later": ({"a.json": lines("x") + '{"body": "y"}', "b.md": BOOK}, "a.json .*line 2"),
    "first": ({"a.json": '{"body": "y"}\n' + lines("x"), "b.md": BOOK}, "1 of 2 .*a.json line 1"),
    "lines beside text": ({"a.jsonl": '{"body": "y"}', "b.md": BOOK}, "a.jsonl .*body"),
    "json alone": ({"a.json": '{"body": "y"}', "b.json": '{"text": "y"}'}, "a.json .*body"),
    "one in a hundred": ({"a.jsonl": lines(*"x" * 99) + '{"text": 1e999}'}, "1 of 100 .*a.jsonl line 100 .*inf"),
    "broken": ({"a.jsonl": lines("x") + '{"text": '}, "a.jsonl is not JSON in line 2"),
    "deep": ({"a.json": "[" * 100_000}, "a.json is not JSON"),
    "cut off": ({"a.txt.gz": gzip.compress(os.urandom(5000))[:-20]}, "a.txt.gz is damaged"),
    "blank": ({"a.txt": " \n"}, "too little text for the train split"),
    "empty split": ({"train.txt": "x", "val.txt": ""}, "too little text for the val split"),
    "absent": ({}, "--source .*own"),
}


@pytest.mark.parametrize("files, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_one_line(tmp_path, files, message):
    with tiny.one_line_error(message):
        prepare(write(tmp_path / "own", files), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))
    with tiny.one_line_error("out is inside .*choose another --out"):
        prepare(tmp_path, tmp_path / "out")
