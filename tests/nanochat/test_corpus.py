"""Corpora: the built-in one repeats nothing, a download survives trouble, and a bad folder is one clear error."""

import ast
import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from hub import Hub, environment
from nanochat_gka import corpus, pack
from nanochat_gka.data import SPLITS, builtin, fineweb
from nanochat_gka.data.corpora import ParquetCorpus
from tiny_pack import config
from trainkit_gka.cli import UserError


def start_fineweb(port: int, out: Path, *python: str) -> subprocess.Popen:
    """python: what to run in place of `-m nanochat_gka.corpus`."""
    command = tiny.command("nanochat_gka.corpus", "--source", "fineweb", "--num-shards", 2, "--out", out)
    command[1:3] = python or command[1:3]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(port))


def finish(process: subprocess.Popen) -> subprocess.CompletedProcess:
    output, errors = process.communicate(timeout=tiny.HANG_AFTER)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture
def hub(tmp_path):
    tiny.write_corpus(tmp_path / "served", docs=400)
    hub = Hub({path.name: path.read_bytes() for path in (tmp_path / "served").iterdir()})
    yield hub
    hub.close()


def downloaded(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.parquet")}


def test_same_command_continues_a_broken_download(hub, tmp_path, capsys):
    """The connection drops inside the first shard, which is continued (the client keeps chunks of 10 MB).

    Inside the second shard the process is killed. The next process loses the connection and then gets a wrong byte; the
    third meets no trouble.
    """
    out, served = tmp_path / "out", tmp_path / "served" / "shard_00000.parquet"
    noise = [os.urandom(24_000_000 // 400) for _ in range(400)]
    pq.write_table(pa.table({"text": tiny.documents(400, 0), "noise": noise}), served)
    hub.files[served.name] = served.read_bytes()
    hub.trouble = {"shard_00000.parquet": ["drop"], "shard_00001.parquet": ["stall"]}
    process = start_fineweb(hub.port, out)
    assert hub.stalling.wait(60)
    with pytest.raises(UserError, match="another process is writing"):
        corpus.main(corpus.CorpusConfig("fineweb", out, 2))
    process.kill()
    assert finish(process).returncode == -signal.SIGKILL
    (first, resumed, second) = hub.gets
    assert first == (served.name, 0) and second == ("shard_00001.parquet", 0)
    assert resumed[0] == served.name and 0 < resumed[1] <= len(hub.files[served.name]) // 2
    assert downloaded(out) == {served.name: hub.files[served.name]}

    hub.gets.clear()
    hub.trouble = {"shard_00001.parquet": ["drop", "corrupt"]}
    done = finish(start_fineweb(hub.port, out))
    advice = r"run the same command again \(it continues where it stopped\)"
    message = rf"could not download shard_00001.parquet .*its sha256 is not the hub's\. .* {advice}"
    tiny.assert_one_line_error(done, message)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "shard_00000.parquet", "source.json"]

    done = finish(start_fineweb(hub.port, out))
    assert done.returncode == 0 and "2 shards (1 fetched now)" in done.stdout, done.stdout + done.stderr
    assert {name for name, _ in hub.gets} == {"shard_00001.parquet"}
    assert downloaded(out) == hub.files

    hub.gets.clear()
    corpus.main(corpus.CorpusConfig("fineweb", out, 2))
    assert "2 shards (0 fetched now)" in capsys.readouterr().out
    assert not hub.gets and downloaded(out) == hub.files
    assert len(list(ParquetCorpus(out).documents("train"))) == 400


def test_builtin_corpus_is_fixed_and_without_repeats(tmp_path, capsys):
    """It is written here, and at the same time by a process with another hash seed."""
    command = tiny.command("nanochat_gka.corpus", "--source", "builtin", "--out", tmp_path / "second")
    process = subprocess.Popen(command, env={**tiny.environment(), "PYTHONHASHSEED": "7"})
    corpus.main(corpus.CorpusConfig("builtin", tmp_path / "builtin"))
    first = ParquetCorpus(tmp_path / "builtin")
    splits = {split: list(first.documents(split)) for split in SPLITS}
    assert process.wait(timeout=tiny.HANG_AFTER) == 0
    second = ParquetCorpus(tmp_path / "second")
    assert splits == {split: list(second.documents(split)) for split in SPLITS}

    assert set(splits["train"]).isdisjoint(splits["val"])
    texts = [text for documents in splits.values() for text in documents]
    paragraphs = [" ".join(paragraph.split()) for text in texts for paragraph in text.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)
    sizes = {split: sum(len(text.encode()) for text in documents) for split, documents in splits.items()}
    assert sum(sizes.values()) > 1_000_000 and 0.02 < sizes["val"] / sizes["train"] < 0.2

    written = {path: path.stat().st_mtime_ns for path in first.paths()}
    capsys.readouterr()
    corpus.main(corpus.CorpusConfig("builtin", tmp_path / "builtin"))
    assert "already there" in capsys.readouterr().out
    assert written == {path: path.stat().st_mtime_ns for path in first.paths()}
    with pytest.raises(UserError, match="builtin holds parquet files of builtin; choose another --out for fineweb"):
        corpus.main(corpus.CorpusConfig("fineweb", tmp_path / "builtin"))
    assert written == {path: path.stat().st_mtime_ns for path in first.paths()}


EVERYWHERE = """
'''module'''
try:
    def a(): "in try"
except ValueError:
    class B:
        "in except"
        async def c(self): "in a class"
else:
    def d(): "in else"
finally:
    def e(): "in finally"
match 1:
    case 1:
        def f(): "in a case"
while g():
    with h():
        for i in j:
            if i:
                def k(): "in four blocks"
            else:
                def l(): return lambda: "not a docstring"
def m(): "last"
"""


def test_docstrings_are_all_of_the_syntax_tree_in_its_order(tmp_path):
    (tmp_path / "everywhere.py").write_text(EVERYWHERE)
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in (tmp_path / "everywhere.py", Path(ast.__file__)):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
        assert list(builtin._docstrings(path)) == [ast.get_docstring(node) or "" for node in nodes]


@pytest.mark.parametrize("source", ["builtin", "fineweb"])
def test_users_own_folder_is_not_overwritten(tmp_path, source):
    """It has one file: neither source may take it for an unfinished folder of its own."""
    tiny.write_corpus(tmp_path / "own", files=1)
    message = f"own holds parquet files of another source; choose another --out for {source}"
    with pytest.raises(UserError, match=message):
        corpus.main(corpus.CorpusConfig(source, tmp_path / "own"))
    assert [path.name for path in (tmp_path / "own").glob("[!.]*")] == ["shard_00000.parquet"]


def test_each_source_has_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtin, "read_texts", lambda: tiny.documents(100, 0))
    monkeypatch.setattr(fineweb, "download", lambda folder, num_shards: tiny.write_corpus(folder, num_shards, 10))
    for source in ("builtin", "fineweb"):
        corpus.main(corpus.CorpusConfig(source, num_shards=2))
        assert len(ParquetCorpus(Path("out/corpus") / source).paths()) == 2


def missing_folder(folder):
    shutil.rmtree(folder)


def one_file(folder):
    (folder / "shard_00001.parquet").unlink()


def not_parquet(folder):
    (folder / "shard_00001.parquet").write_text("once upon a time")


def truncated(folder):
    path = folder / "shard_00001.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def zeros_inside(folder):
    path = folder / "shard_00001.parquet"
    data = bytearray(path.read_bytes())
    data[1000:2000] = bytes(1000)
    path.write_bytes(data)


def wrong_column(folder):
    pq.write_table(pa.table({"content": ["a b"], "id": [1]}), folder / "shard_00001.parquet")


def integers(folder):
    pq.write_table(pa.table({"text": [1, 2, 3]}), folder / "shard_00001.parquet")


CANNOT_SERVE = {
    missing_folder: r"corpus folder not found: .*corpus",
    one_file: r"needs at least two .parquet files .* found 1",
    not_parquet: r"shard_00001.parquet is not a readable parquet file",
    truncated: r"shard_00001.parquet is not a readable parquet file",
    zeros_inside: r"shard_00001.parquet is damaged in row group 0 \(.*\); delete it and fetch it again",
    wrong_column: r"shard_00001.parquet needs a string column named text, it has: content, id",
    integers: r"shard_00001.parquet needs a string column named text, its text is of type int64",
}


@pytest.mark.parametrize("damage", CANNOT_SERVE, ids=lambda damage: damage.__name__)
def test_unusable_corpus_is_refused(packed, tmp_path, damage):
    shutil.copytree(packed / "corpus", tmp_path / "corpus")
    damage(tmp_path / "corpus")
    with tiny.one_line_error(CANNOT_SERVE[damage]):
        pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))


def test_nulls_and_empty_documents(packed, tmp_path):
    """Empty documents count as in nanochat's loader, which refuses nulls."""
    path = packed / "corpus" / "shard_00000.parquet"
    texts = pq.read_table(path).column("text").to_pylist()
    for name, holes in (("nulls", (None, None)), ("empty", (None, ""))):
        folder = tmp_path / name / "corpus"
        folder.mkdir(parents=True)
        with_holes = [item for text in texts for item in (holes[0], text, holes[1])]
        for index in range(2):
            table = pa.table({"id": range(len(with_holes)), "text": pa.array(with_holes, pa.large_string())})
            pq.write_table(table, folder / f"shard_{index}.parquet", row_group_size=150)
        assert list(ParquetCorpus(folder).documents("train")) == texts
        pack.main(config(tmp_path / name, tmp_path / name / "packed", tokenizer=packed / "tokenizer"))
    counts = []
    for name in ("nulls", "empty"):
        shards = json.loads((tmp_path / name / "packed/manifest.json").read_text())["shards"]
        counts += [(shard["documents"], shard["tokens"]) for shard in shards if shard["split"] == "train"]
    (documents, tokens), (more_documents, more_tokens) = counts
    assert documents == len(texts) and more_documents - documents == more_tokens - tokens == len(texts)
    rows = [root / "packed" / "train_000000.bin" for root in (tmp_path / "nulls", packed)]
    assert rows[0].read_bytes() == rows[1].read_bytes()


IMPATIENT = """
import runpy, time
time.sleep = lambda seconds: None
runpy.run_module("nanochat_gka.corpus", run_name="__main__", alter_sys=True)
"""


def test_an_unreachable_hub_says_what_to_do(tmp_path):
    """The hub's client waits for 23 s between its attempts to reach a port without a listener; here it does not."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        done = finish(start_fineweb(silent.getsockname()[1], tmp_path, "-c", IMPATIENT))
    advice = r"Check the network and run the same command again.* CORPUS=builtin"
    tiny.assert_one_line_error(done, rf"could not download shard_00000.parquet .*[^.]\. {advice}")
