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
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.own_text import END_CHARS, LONGEST
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
        k___deep___l__md="in a folder",
        **{"m__txt": "", "n__json": "", "o__pdf": "", "p__PDF": "", "q": "", "zz__txt": BOOK},
        **{"__hidden__txt": "hidden", "__git___a__txt": "hidden", "[j]*__txt": "odd name"},
        package__json='{"name": "no text"}',
    )
    pq.write_table(pa.table({"id": [1, 2], "text": ["parquet", None]}), source / "j.parquet")
    os.symlink(source, source / "k" / "loop")
    os.symlink(source / "B.TXT", source / "z.txt")
    documents, output = prepare(source, tmp_path / "out"), capsys.readouterr().out
    expected = ["upper case", "odd name", "byte order mark\nand lines\n", "packed twice", "packed by zstd", "one"]
    expected += ["2024-01-01", "in an array", "again", "an object", "lines in json", "? half", "parquet"]
    assert documents["train"][:-1] == [*expected, "in a folder", "upper case"]
    assert documents["train"][-1] + documents["val"][0] == BOOK and len(documents["val"]) == 1
    assert "2 .pdf, 1 without suffix" in output and "package.json" in output


@pytest.mark.parametrize("name", ["book.md", "book.parquet"])
def test_the_end_of_one_document_is_held_out_from_a_paragraph_on(tmp_path, name):
    path = tmp_path / name
    path.write_text(BOOK) if path.suffix == ".md" else write_parquet(tmp_path, book=[BOOK])
    (train,), (val,) = prepare(path, tmp_path / "out").values()
    assert train + val == BOOK and val.startswith("Chapter ") and END_CHARS <= len(val) < END_CHARS * 1.1


def test_a_long_text_comes_in_pieces(tmp_path):
    text = "It was said again that nothing is lost.\n\n" * (LONGEST // 30)
    documents = prepare(write(tmp_path / "own", a__txt=text), tmp_path / "out")
    assert "".join(documents["train"] + documents["val"]) == text
    assert [len(part) <= LONGEST and part.endswith("lost.\n\n") for part in documents["train"]] == [True] * 2


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


SPLITS = {
    "folders": {"train___a__txt": "t", "validation___b__txt": "v", "test___c__txt": "x", "README__md": "x"},
    "deep folders": {"data___train___a___b__txt": "t", "data___val___b__txt": "v"},
    "files": {"train__jsonl": lines("t"), "Dev__jsonl__gz": gzip.compress(lines("v").encode())},
    "dotted": {"wiki__train__txt": "t", "wiki__valid__1__txt": "v", "wiki__test__txt": "x"},
    "third": {"train_001__txt": "t", "validation1__txt": "v", "test___a__md": "x", "README__md": "x"},
    "numbered": {"train-00000-of-00001__json": lines("t"), "test-00000-of-00001__json": lines("v")},
}
NO_SPLITS = {
    "words": {"Training plan__md": "plan", **{f"2024-{number:02} Dev meeting__md": "x" for number in range(60)}},
    "folders": {"dev___a__md": "of dev", "training___b__md": "of training", "docs___c__md": "of docs"},
    "one file in no split": {"train__txt": "t", "val__txt": "v", "notes__txt": "n"},
    "one split alone": {f"test-{number}__txt": "many words" for number in range(10)},
}


@pytest.mark.parametrize("files", SPLITS.values(), ids=SPLITS)
def test_names_decide_what_is_held_out(tmp_path, files):
    assert prepare(write(tmp_path / "own", **files), tmp_path / "out") == {"train": ["t"], "val": ["v"]}


@pytest.mark.parametrize("files", NO_SPLITS.values(), ids=NO_SPLITS)
def test_names_decide_only_if_every_file_is_in_a_split(tmp_path, files):
    """No text is left out because other files have such names."""
    files = {name: f"{content} " * 20 for name, content in files.items()}
    documents = prepare(write(tmp_path / "own", **files), tmp_path / "out")
    text = "".join(documents["train"] + documents["val"])
    assert all(content in text for content in files.values()) and len(text) == sum(map(len, files.values()))


def test_of_shards_and_of_our_corpora_the_last_file_is_held_out(tmp_path):
    shards = write_parquet(tmp_path / "own", shard_00000=["a"], shard_00001=["b"], shard_00002=["c"])
    write(shards, notes__md="not read")
    assert prepare(shards, tmp_path / "out") == {"train": ["a", "b"], "val": ["c"]}
    assert prepare(tmp_path / "out", tmp_path / "again") == {"train": ["a", "b"], "val": ["c"]}


def test_a_folder_that_is_a_corpus_is_linked_and_followed(tmp_path):
    """Its files are neither rewritten nor copied, and the links follow them."""
    shards = write_parquet(tmp_path / "own", shard_00000=["0"], shard_00001=["1"], shard_00002=["2"])
    out = tmp_path / "out"
    assert prepare(shards, out) == {"train": ["0", "1"], "val": ["2"]}
    assert all(path.samefile(shards / path.name) for path in out.glob("*.parquet"))
    (shards / "shard_00002.parquet").unlink()
    write_parquet(shards, shard_00001=["changed"])
    assert prepare(shards, out) == {"train": ["0"], "val": ["changed"]}
    corpus.main(corpus.CorpusConfig(str(shards), shards))
    assert not (shards / "source.json").exists()


def test_it_is_written_again_when_files_or_rules_change_and_a_copy_is_no_change(tmp_path, capsys):
    source, out = write(tmp_path / "own", a__txt=BOOK, b__txt="same size 1", c__txt="gone"), tmp_path / "out"
    train = out / "train.parquet"

    def is_written(**flags) -> bool:
        before = train.stat().st_mtime_ns if train.exists() else None
        prepare(source, out, **flags)
        return train.stat().st_mtime_ns != before

    assert is_written()
    shutil.move(source, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", source, copy_function=shutil.copyfile)
    assert not is_written()
    rewrite_json(out / "files.json", rules=None)
    assert is_written()
    write(source, b__txt="same size 2", d__txt="new")
    (source / "c.txt").unlink()
    capsys.readouterr()
    assert is_written()
    assert "1 added (d.txt), 1 removed (c.txt), 1 changed (b.txt)" in capsys.readouterr().out
    (out / "val.parquet").unlink()  # or the command was killed
    assert is_written() and is_written(text_column="other")


REFUSED = {
    "latin": ({"a__txt": BOOK, "b__txt": "café".encode("latin-1")}, "b.txt is not text in UTF-8"),
    "empty": ({"__hidden__txt": "x"}, "own has no text to read"),
    "missing": ({"a__jsonl": '{"body": "x", "id": 1}'}, r"a.jsonl .*line 1 has body \(str\), id \(int\)"),
    "no object": ({"a__json": '["x"]'}, "a.json .*record 1 is str"),
    "lines beside text": ({"a__jsonl": '{"body": "y"}', "b__md": BOOK}, r"a.jsonl .*body \(str\)"),
    "json alone": ({"a__json": '{"body": "y"}', "b__json": '{"text": "y"}'}, r"a.json .*body \(str\)"),
    "broken": ({"a__jsonl": lines("x") + '{"text": '}, "a.jsonl is not JSON in line 2"),
    "deep": ({"a__json": "[" * 100_000}, "a.json is not JSON"),
    "cut off": ({"a__txt__gz": gzip.compress(os.urandom(5000))[:-20]}, "a.txt.gz is damaged"),
    "blank": ({"a__txt": " \n"}, "too little text for the train split"),
    "empty split": ({"train__txt": "x", "val__txt": ""}, "too little text for the val split: .*val.txt"),
    "absent": ({}, "--source .*own"),
}


@pytest.mark.parametrize("files, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_one_line(tmp_path, files, message):
    with tiny.one_line_error(message):
        prepare(write(tmp_path / "own", **files), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_a_folder_inside_the_source_is_refused(tmp_path):
    with tiny.one_line_error("out is inside .*choose another --out"):
        prepare(write(tmp_path, a__txt=BOOK), tmp_path / "out")
