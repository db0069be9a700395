"""People's own files become a corpus: what is read, what is held out, and what cannot be read is one line."""

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
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.own_text import END_CHARS, GROUP_BYTES, LONGEST
from tiny_pack import rewrite_json, write_parquet

BOOK = "\n\n".join(f"Chapter {number}. " + "It was said again that nothing is lost. " * 12 for number in range(300))


def write(folder: Path, **files) -> Path:
    """Files by name, in which __ is a dot and a leading ___ a folder: a__txt, val___a__txt."""
    for name, content in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def lines(*texts: str) -> str:
    return "\n".join(json.dumps({"text": text}) for text in texts) + "\n"


def zstd(content: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content.encode())
    return sink.getvalue().to_pybytes()


def prepare(source: Path, out: Path, **flags) -> dict[str, list[str]]:
    """The documents of both splits."""
    corpus.main(corpus.CorpusConfig(str(source), out, **flags))
    made = ParquetCorpus(out)
    return {split: list(made.documents(split)) for split in ("train", "val")}


# What is read


def test_every_kind_of_file_is_read_in_the_order_of_names(tmp_path, capsys):
    source = write(
        tmp_path / "own",
        a__txt="\ufeffbyte order mark\r\nand lines\r\n",
        B__TXT="upper case",
        c__md__gz=gzip.compress(b"packed ") + gzip.compress(b"twice"),
        d__txt__zst=zstd("packed by zstd"),
        e__jsonl='{"text": "one"}\n\n  \r\n{"text": null, "id": 1}\n{"text": "2024-01-01", "id": "a"}\n',
        f__json='[{"text": "in an array"},\n {"id": 7, "text": "again"}]',
        g__json='{\n "text": "an object"\n}',
        h__json__gz=gzip.compress(lines("lines in json", "\ud800 half").encode()),
        i__jsonl__zst=zstd(lines("packed lines")),
        k___deep___l__md="in a folder",
        **{"m__txt": "", "n__json": "", "o__pdf": "", "p__PDF": "", "q": "", "zz__txt": BOOK},
        **{"__hidden__txt": "hidden", "__git___a__txt": "hidden", "[j]*__txt": "odd name"},
    )
    pq.write_table(pa.table({"id": [1, 2], "text": ["parquet", None]}), source / "j.parquet")
    os.symlink(source, source / "k" / "loop")
    os.symlink(source / "B.TXT", source / "z.txt")
    documents = prepare(source, tmp_path / "out")
    expected = ["upper case", "odd name", "byte order mark\nand lines\n", "packed twice", "packed by zstd", "one"]
    expected += ["2024-01-01", "in an array", "again", "an object", "lines in json", "? half", "packed lines"]
    assert documents["train"][:-1] == [*expected, "parquet", "in a folder", "upper case"]
    assert documents["train"][-1] + documents["val"][0] == BOOK and len(documents["val"]) == 1
    assert "not read: 2 .pdf, 1 without suffix\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["book.md", "book.parquet"])
def test_one_file_is_enough(tmp_path, name):
    """Even with one document: its end is held out, cut at a paragraph."""
    path = tmp_path / name
    path.write_text(BOOK) if path.suffix == ".md" else write_parquet(tmp_path, book=[BOOK])
    (train,), (val,) = prepare(path, tmp_path / "out").values()
    assert train + val == BOOK and val.startswith("Chapter ") and END_CHARS <= len(val) < END_CHARS * 1.1


def test_long_texts_come_in_pieces_and_small_row_groups(tmp_path):
    """A file of more than LONGEST characters is several documents; together they are the file."""
    text = "It was said again that nothing is lost.\n\n" * (LONGEST // 30)
    documents = prepare(write(tmp_path / "own", a__txt=text), tmp_path / "out")
    assert "".join(documents["train"] + documents["val"]) == text and len(documents["train"]) == 2
    assert all(len(part) <= LONGEST and part.endswith("lost.\n\n") for part in documents["train"])
    many = ["x" * (GROUP_BYTES // 4 - number) for number in range(9)]
    prepare(write(tmp_path / "many", a__jsonl=lines(*many)), tmp_path / "groups")
    assert pq.ParquetFile(tmp_path / "groups/train.parquet").num_row_groups == 2


def test_json_without_the_field_among_other_text_is_named_as_not_read(tmp_path, capsys):
    others = {"package__json": '{"name": "x"}', "deep___list__json": "[1, 2]"}
    others["deep___lines__json__gz"] = gzip.compress(b'{"a": 1}\n{"a": 2}\n')
    source = write(tmp_path / "own", a__md=BOOK, b__json='{"text": "read"}', **others)
    documents, said = prepare(source, tmp_path / "out"), capsys.readouterr().out
    assert "read" in documents["train"] + documents["val"]
    assert "not read: 3 files" in said and "(deep/lines.json.gz, deep/list.json, package.json)" in said


# What is held out


def test_one_document_in_a_hundred_is_held_out_wherever_it_stands(tmp_path):
    """And no text is in both splits."""
    texts = [f"{number} {text * 4}" for number, text in enumerate(tiny.documents(3000, 0))]
    first = prepare(write(tmp_path / "a", a__jsonl=lines(*texts)), tmp_path / "out")
    turned = prepare(write(tmp_path / "b", b__jsonl=lines(*texts[1000:], *texts[:1000])), tmp_path / "turned")
    twice = prepare(write(tmp_path / "c", c__jsonl=lines(*texts, *texts)), tmp_path / "twice")
    assert 20 <= len(first["val"]) <= 40 and sorted(first["val"]) == sorted(turned["val"])
    assert sorted(first["train"] + first["val"]) == sorted(texts)
    assert twice["val"] and set(twice["train"]).isdisjoint(twice["val"])


@pytest.mark.parametrize("chars, end", [(50_000, 5_000), (200_000, 10_000), (2_000_000, 20_000)])
def test_the_end_of_few_documents_is_a_hundredth_or_more(tmp_path, chars, end):
    files = {f"{number}__txt": ("word " * (chars // 20))[: chars // 4] for number in range(4)}
    documents = prepare(write(tmp_path / "own", **files), tmp_path / "out")
    assert len(documents["train"]) == 4 and sum(map(len, documents["val"])) == end


def test_of_few_short_records_the_end_is_held_out(tmp_path):
    """One in a hundred would be less than the end of the text: of 500 with 9 words, too little for a row."""
    texts = [" ".join(f"w{number}x{place}" for place in range(9)) for number in range(500)]
    documents = prepare(write(tmp_path / "own", a__jsonl=lines(*texts)), tmp_path / "corpus")
    expected, held_out = min(END_CHARS, sum(map(len, texts)) // 10), sum(map(len, documents["val"]))
    assert expected - 10 < held_out <= expected + len(texts[-1]) and texts[-1] == documents["val"][-1]


SPLITS = {
    "folders": {"train___a__txt": "t", "validation___b__txt": "v", "test___c__txt": "x", "README__md": "x"},
    "deep folders": {"data___train___a___b__txt": "t", "data___val___b__txt": "v"},
    "files": {"train__jsonl": lines("t"), "Dev__jsonl__gz": gzip.compress(lines("v").encode())},
    "dotted": {"wiki__train__txt": "t", "wiki__valid__1__txt": "v", "wiki__test__txt": "x"},
    "third": {"train_001__txt": "t", "validation1__txt": "v", "test___a__md": "x", "README__md": "x"},
    "numbered": {"train-00000-of-00001__json": lines("t"), "test-00000-of-00001__json": lines("v")},
}


@pytest.mark.parametrize("files", SPLITS.values(), ids=SPLITS)
def test_names_decide_what_is_held_out(tmp_path, files):
    assert prepare(write(tmp_path / "own", **files), tmp_path / "out") == {"train": ["t"], "val": ["v"]}


NO_SPLITS = {
    "words": {"Training plan__md": "plan", **{f"2024-{number:02} Dev meeting__md": "x" for number in range(60)}},
    "folders": {"dev___a__md": "of dev", "training___b__md": "of training", "docs___c__md": "of docs"},
    "dashes": {"strength-training__md": "plan", "app-dev__md": "ideas"},
    "one file in no split": {"train__txt": "t", "val__txt": "v", "notes__txt": "n"},
    "one split alone": {f"test-{number}__txt": "many words" for number in range(10)},
}


@pytest.mark.parametrize("files", NO_SPLITS.values(), ids=NO_SPLITS)
def test_names_decide_only_if_every_file_is_in_a_split(tmp_path, capsys, files):
    """No text is left out because other files have such names."""
    files = {name: f"{content} " * 20 for name, content in files.items()}
    documents, said = prepare(write(tmp_path / "own", **files), tmp_path / "out"), capsys.readouterr().out
    text = "".join(documents["train"] + documents["val"])
    assert all(content in text for content in files.values()) and len(text) == sum(map(len, files.values()))
    assert "not read" not in said


@pytest.mark.parametrize("names", [("a", "b"), ("val-0", "val-1")])
def test_parquet_files_side_by_side_are_dealt_as_other_text_is(tmp_path, names):
    texts = [f"{number} {text * 3}" for number, text in enumerate(tiny.documents(4000, 0))]
    write_parquet(tmp_path / "own/data", **{names[0]: texts[:2000], names[1]: texts[2000:]})
    documents = prepare(tmp_path / "own", tmp_path / "out")
    assert sorted(documents["train"] + documents["val"]) == sorted(texts) and 20 <= len(documents["val"]) <= 60


def test_of_shards_and_of_our_corpora_the_last_file_is_held_out(tmp_path):
    shards = write_parquet(tmp_path / "own", shard_00000=["a"], shard_00001=["b"], shard_00002=["c"])
    write(shards, notes__md="not read")
    assert prepare(shards, tmp_path / "out") == {"train": ["a", "b"], "val": ["c"]}
    assert prepare(tmp_path / "out", tmp_path / "again") == {"train": ["a", "b"], "val": ["c"]}


# Again, and mistakes


def test_it_is_written_again_when_files_change_and_a_copy_is_no_change(tmp_path, capsys):
    source, out = write(tmp_path / "own", a__txt=BOOK, b__txt="same size 1", c__txt="gone"), tmp_path / "out"

    def said(**flags) -> str:
        capsys.readouterr()
        prepare(source, out, **flags)
        return capsys.readouterr().out

    assert "train: " in said()
    before = (out / "train.parquet").stat().st_mtime_ns
    shutil.move(source, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", source, copy_function=shutil.copyfile)
    assert said() == f"{out}: already there, made of 3 files\n"
    assert (out / "train.parquet").stat().st_mtime_ns == before
    rewrite_json(out / "files.json", rules=None)  # as an earlier version wrote it
    assert "rules of an earlier version" in said()
    write(source, b__txt="same size 2", d__txt="new")
    (source / "c.txt").unlink()
    assert "1 added (d.txt), 1 removed (c.txt), 1 changed (b.txt)\n" in said()
    assert "same size 2" in [*ParquetCorpus(out).documents("train"), *ParquetCorpus(out).documents("val")]
    (out / "val.parquet").unlink()  # or the command was killed
    assert "held out" in said() and (out / "val.parquet").exists()
    assert "it was column text" in said(text_column="other")


FIELDS = r"needs a field text that is a string; line 1 has {}; name the one that is by --text-column"
OTHER_FIELD = r"needs a field text .* has body \(str\); name .* \(with make, COLUMN\), or move the file away"
REFUSED = {
    "latin": ({"a__txt": BOOK, "b__txt": "café".encode("latin-1")}, "b.txt is not text in UTF-8; convert it"),
    "empty": ({"__hidden__txt": "x"}, r"own has no text to read \(it is empty\); what is read: .txt"),
    "missing": ({"a__jsonl": '{"body": "x", "id": 1}'}, "a.jsonl " + FIELDS.format(r"body \(str\), id \(int\)")),
    "no object": ({"a__json": '["x"]'}, "needs a field text that is a string; record 1 is str"),
    "lines beside text": ({"a__jsonl": '{"body": "y"}', "b__md": BOOK}, OTHER_FIELD),
    "json alone": ({"a__json": '{"body": "y"}', "b__json": '{"text": "y"}'}, OTHER_FIELD),
    "broken": ({"a__jsonl": lines("x") + '{"text": '}, r"a.jsonl is not JSON in line 2 \(Expecting value\); mend it"),
    "deep": ({"a__json": "[" * 100_000}, "a.json is not JSON as a whole"),
    "cut off": ({"a__txt__gz": gzip.compress(os.urandom(5000))[:-20]}, r"a.txt.gz is damaged, .*\(Truncated"),
    "blank": ({"a__txt": " \n"}, "own has too little text for the train split"),
    "empty split": ({"train__txt": "x", "val__txt": ""}, "too little text for the val split: nothing in val.txt"),
    "absent": ({}, "--source .*own is neither builtin nor fineweb nor a file or folder"),
}


@pytest.mark.parametrize("files, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_one_line(tmp_path, files, message):
    with tiny.one_line_error(message):
        prepare(write(tmp_path / "own", **files), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_folder_inside_the_source_is_refused(tmp_path):
    with tiny.one_line_error(r"out is inside .* and would be read as text; choose another --out \(with make, BASE\)"):
        prepare(write(tmp_path, a__txt=BOOK), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
