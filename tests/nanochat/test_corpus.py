"""Corpora: the built-in one, downloads, a user's folder, and parquet files as other tools write them."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import processes
import tiny
from hub import Hub, environment
from nanochat_gka import corpus, pack
from nanochat_gka.data import units
from nanochat_gka.data.corpora import ParquetCorpus, document_batches
from nanochat_gka.data.units import plan_units
from tiny_pack import bins, config, write_parquet

FIRST, SECOND = "shard_00000.parquet", "shard_00001.parquet"


def start_fineweb(port: int, out: Path) -> subprocess.Popen:
    command = tiny.command("nanochat_gka.corpus", "--source", "fineweb", "--num-shards", 2, "--out", out)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(port))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


@pytest.fixture
def hub(tmp_path):
    """Serves two shards of which the first is large: the client continues downloads in chunks of 10 MB."""
    tiny.write_corpus(tmp_path / "served", docs=400)
    noise = [os.urandom(24_000_000 // 400) for _ in range(400)]
    pq.write_table(pa.table({"text": tiny.documents(400, 0), "noise": noise}), tmp_path / "served" / FIRST)
    hub = Hub(contents(tmp_path / "served"))
    yield hub
    hub.close()


def test_the_same_command_continues_a_broken_download(hub, tmp_path, capsys):
    """The connection drops inside the first shard, and inside the second the process is killed.

    The next process loses the connection and then gets a wrong byte; the third meets no trouble.
    """
    out, hub.trouble = tmp_path / "out", {FIRST: ["drop"], SECOND: ["stall"]}
    process = start_fineweb(hub.port, out)
    assert hub.stalling.wait(60)
    with tiny.one_line_error("another process is writing"):
        corpus.main(corpus.CorpusConfig("fineweb", out, 2))
    process.kill()
    assert tiny.finish(process).returncode == -signal.SIGKILL
    first, (resumed, start), second = hub.gets
    assert first == (FIRST, 0) and second == (SECOND, 0)
    assert resumed == FIRST and 0 < start <= len(hub.files[FIRST]) // 2
    assert contents(out) == {FIRST: hub.files[FIRST]}

    hub.trouble = {SECOND: ["drop", "corrupt"]}
    done = tiny.finish(start_fineweb(hub.port, out))
    tiny.assert_one_line_error(
        done, f"could not download {SECOND} .*sha256 .* same command again .*--source builtin", 75
    )
    assert sorted(path.name for path in out.iterdir()) == [".lock", FIRST, "source.json"]

    done = tiny.finish(start_fineweb(hub.port, out))
    assert done.returncode == 0 and "2 shards (1 new)" in done.stdout, done.stdout + done.stderr
    assert contents(out) == hub.files and {name for name, _ in hub.gets[3:]} == {SECOND}

    hub.gets.clear()
    corpus.main(corpus.CorpusConfig("fineweb", out, 2))
    assert "2 shards (0 new)" in capsys.readouterr().out
    assert not hub.gets and contents(out) == hub.files


def test_builtin_corpus_is_fixed_and_without_repeats(tmp_path, capsys):
    """It is written here, and at the same time by a process with another hash seed."""
    out, second = tmp_path / "builtin", tmp_path / "second"
    command = tiny.command("nanochat_gka.corpus", "--source", "builtin", "--out", second)
    process = subprocess.Popen(command, env={**processes.environment(), "PYTHONHASHSEED": "7"})
    corpus.main(corpus.CorpusConfig("builtin", out))
    assert process.wait(timeout=tiny.HANG_AFTER) == 0 and contents(out) == contents(second)

    train, val = (list(ParquetCorpus(out).documents(split)) for split in ("train", "val"))
    paragraphs = [" ".join(paragraph.split()) for text in train + val for paragraph in text.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    sizes = [len("".join(texts).encode()) for texts in (train, val)]
    assert sum(sizes) > 1_000_000 and 0.02 < sizes[1] / sizes[0] < 0.2

    written = {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}
    corpus.main(corpus.CorpusConfig("builtin", out))
    assert "already there" in capsys.readouterr().out
    assert written == {path: path.stat().st_mtime_ns for path in out.glob("*.parquet")}


@pytest.mark.parametrize("source", ["builtin", "fineweb"])
def test_a_users_folder_is_not_overwritten(tmp_path, source):
    """It has one file: neither source may take it for an unfinished folder of its own."""
    tiny.write_corpus(tmp_path, files=1)
    with tiny.one_line_error(f"holds parquet files of another source; choose another --out for {source}"):
        corpus.main(corpus.CorpusConfig(source, tmp_path))
    assert [path.name for path in tmp_path.glob("[!.]*")] == [FIRST]


# Parquet as other tools write it

TEXTS = tiny.documents(300, 0)
STRINGS = {
    "string_view": pa.array(TEXTS, pa.string_view()),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "large dictionary": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
}


def test_every_column_of_strings_is_text(tmp_path):
    for name, column in STRINGS.items():
        tables = {"a": pa.table({"id": range(300), "text": column}), "b": pa.table({"text": column})}
        corpus = ParquetCorpus(write_parquet(tmp_path / name, **tables))
        assert [list(corpus.documents(split)) for split in ("train", "val")] == [TEXTS, TEXTS], name


def test_nulls_are_no_documents_and_empty_texts_are(packed, tmp_path):
    """Empty documents count as in nanochat's loader, which refuses nulls."""
    shards = []
    for filler in (None, ""):
        root, table = (
            tmp_path / repr(filler),
            pa.table({"text": [item for text in TEXTS for item in (None, text, filler)]}),
        )
        write_parquet(root / "corpus", a=table, b=table)
        assert list(ParquetCorpus(root / "corpus").documents("train")) == TEXTS
        pack.main(config(root, root / "packed", tokenizer=packed / "tokenizer"))
        shards.append(json.loads((root / "packed/train_000000.json").read_text()))
    nulls, empty = shards
    assert nulls["documents"] == empty["documents"] - 300 == 300 and empty["tokens"] - nulls["tokens"] == 300


# File names, and those of them that are held out.
NAMES = [
    (("train-00000-of-00002", "train-00001-of-00002", "validation"), ["validation"]),
    (("test-00000-of-00001", "train-00000-of-00001"), ["test-00000-of-00001"]),
    (("wiki.train", "wiki.valid.1", "wiki.valid.2"), ["wiki.valid.1", "wiki.valid.2"]),
    (("testament", "trainspotting", "validity"), ["validity"]),
    (("my-train-notes", "our-val-notes", "zebra"), ["zebra"]),  # nor does a word inside
]


@pytest.mark.parametrize("names, val", NAMES)
def test_names_that_say_train_and_validation_decide(tmp_path, names, val):
    corpus = ParquetCorpus(write_parquet(tmp_path, **{name: [name] for name in names}))
    assert list(corpus.documents("val")) == val
    assert list(corpus.documents("train")) == [name for name in names if name not in val]


# Units of work


def test_parts_of_a_row_group_hold_it_once(packed, tmp_path, monkeypatch):
    """A large row group gives work to several processes; the documents are all there, in their order."""
    monkeypatch.setattr(units, "DOCUMENTS_PER_PART", 500)
    corpus = write_parquet(tmp_path / "corpus", a=tiny.documents(4000, 1), b=TEXTS)
    parts = [unit for unit in plan_units(ParquetCorpus(corpus), split_documents=True) if unit.split == "train"]
    batches = [batch for unit in parts for batch in unit.batches(corpus)]
    assert len(parts) == 8 and batches == list(document_batches(corpus / "a.parquet"))
    assert [text for batch in batches for text in batch] == tiny.documents(4000, 1)

    def pack_with(out, choice="yes", **how):
        pack.main(config(tmp_path, tmp_path / out, tokenizer=packed / "tokenizer", split_documents=choice, **how))
        return bins(tmp_path / out)

    one = pack_with("one")
    assert len(one) == 9 and pack_with("two", workers=2) == one and len(pack_with("unsplit", "no")) == 3
    (tmp_path / "one/manifest.json").unlink()
    (tmp_path / "one/train_000003.bin").unlink()
    assert pack_with("one") == one


def test_records_of_small_row_groups_have_todays_fields(tmp_path):
    """Else today's packed rows would be packed again."""
    corpus = ParquetCorpus(tiny.write_corpus(tmp_path, docs=1000, row_group=50))
    assert [unit.note() for unit in plan_units(corpus)][2:] == [
        {"name": f"train_{n:06d}", "split": "train", "file": "shard_00000.parquet", "first": 8 * n, "last": last}
        for n, last in enumerate((8, 16, 20))
    ]


@pytest.mark.parametrize("different", [16_000, 500])
def test_memory_does_not_grow_with_the_row_group(tmp_path, different):
    """16,000 texts that hardly compress, or 500 such texts again and again in a dictionary."""
    rng = random.Random(0)
    column = pa.array([rng.randbytes(2200).hex() for _ in range(different)])
    if different < 16_000:
        column = pa.DictionaryArray.from_arrays(pa.array([i % 500 for i in range(16_000)], pa.int32()), column)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, row_group_size=16_000)
    del column
    before, held, characters = pa.total_allocated_bytes(), 0, 0
    for batch in document_batches(path):
        held, characters = max(held, pa.total_allocated_bytes() - before), characters + sum(map(len, batch))
    assert characters > 60_000_000 and held < 20_000_000


# What the second of two files becomes, and what the error names.
BAD_FILES = {
    "not parquet": (b"once upon a time", "b.parquet is not a readable parquet file"),
    "cut off": (lambda content: content[:-9], "b.parquet is not a readable parquet file"),
    "zeros inside": (lambda content: content[:1000] + bytes(1000) + content[2000:], "b.parquet .*row group 0"),
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
    else:
        path.write_bytes(content if isinstance(content, bytes) else content(path.read_bytes()))
    with tiny.one_line_error(message):
        pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))


NO_CORPUS = [
    ([], "corpus folder not found: .*corpus"),
    (["a"], "needs at least two .parquet files"),
    (["train-0-of-2", "train-1-of-2"], "train-1-of-2.parquet .*held out.* --source"),
]


@pytest.mark.parametrize("names, message", NO_CORPUS)
def test_a_folder_that_is_no_corpus_is_one_line(tmp_path, names, message):
    with tiny.one_line_error(message):
        ParquetCorpus(write_parquet(tmp_path, **dict.fromkeys(names, TEXTS)) if names else tmp_path / "corpus")
