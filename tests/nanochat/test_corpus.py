"""Corpora: the built-in one repeats nothing, a download survives trouble, a folder of the user's is not overwritten."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import processes
import tiny
from hub import Hub, environment, impatient
from nanochat_gka import corpus
from nanochat_gka.data import SPLITS
from nanochat_gka.data.corpora import ParquetCorpus


def start_fineweb(port: int, out: Path, *python: str) -> subprocess.Popen:
    """python: what to run in place of `-m nanochat_gka.corpus`."""
    command = tiny.command("nanochat_gka.corpus", "--source", "fineweb", "--num-shards", 2, "--out", out)
    command[1:3] = python or command[1:3]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(port))


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
    with tiny.one_line_error("another process is writing"):
        corpus.main(corpus.CorpusConfig("fineweb", out, 2))
    process.kill()
    assert tiny.finish(process).returncode == -signal.SIGKILL
    (first, resumed, second) = hub.gets
    assert first == (served.name, 0) and second == ("shard_00001.parquet", 0)
    assert resumed[0] == served.name and 0 < resumed[1] <= len(hub.files[served.name]) // 2
    assert downloaded(out) == {served.name: hub.files[served.name]}

    hub.gets.clear()
    hub.trouble = {"shard_00001.parquet": ["drop", "corrupt"]}
    done = tiny.finish(start_fineweb(hub.port, out))
    tiny.assert_one_line_error(
        done, r"could not download shard_00001.parquet .*sha256 .* run the same command again", 75
    )
    assert sorted(path.name for path in out.iterdir()) == [".lock", "shard_00000.parquet", "source.json"]

    done = tiny.finish(start_fineweb(hub.port, out))
    assert done.returncode == 0 and "2 shards (1 fetched now)" in done.stdout, done.stdout + done.stderr
    assert {name for name, _ in hub.gets} == {"shard_00001.parquet"}
    assert downloaded(out) == hub.files

    hub.gets.clear()
    corpus.main(corpus.CorpusConfig("fineweb", out, 2))
    assert "already there, 2 shards" in capsys.readouterr().out
    assert not hub.gets and downloaded(out) == hub.files


def test_an_unreachable_hub_says_what_to_do(tmp_path):
    """The hub's client waits for 23 s between its attempts to reach a port without a listener; here it does not."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        done = tiny.finish(start_fineweb(silent.getsockname()[1], tmp_path, *impatient("nanochat_gka.corpus")))
    tiny.assert_one_line_error(
        done, r"could not download shard_00000.parquet .*[^.]\. Check the network .*CORPUS=built", 75
    )


def test_builtin_corpus_is_fixed_and_without_repeats(tmp_path, capsys):
    """It is written here, and at the same time by a process with another hash seed."""
    command = tiny.command("nanochat_gka.corpus", "--source", "builtin", "--out", tmp_path / "second")
    process = subprocess.Popen(command, env={**processes.environment(), "PYTHONHASHSEED": "7"})
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
    corpus.main(corpus.CorpusConfig("builtin", tmp_path / "builtin"))
    assert "already there" in capsys.readouterr().out
    with tiny.one_line_error("builtin holds parquet files of builtin; choose another --out for fineweb"):
        corpus.main(corpus.CorpusConfig("fineweb", tmp_path / "builtin"))
    assert written == {path: path.stat().st_mtime_ns for path in first.paths()}


@pytest.mark.parametrize("source", ["builtin", "fineweb"])
def test_users_own_folder_is_not_overwritten(tmp_path, source):
    """It has one file: neither source may take it for an unfinished folder of its own."""
    tiny.write_corpus(tmp_path / "own", files=1)
    with tiny.one_line_error(f"own holds parquet files of another source; choose another --out for {source}"):
        corpus.main(corpus.CorpusConfig(source, tmp_path / "own"))
    assert [path.name for path in (tmp_path / "own").glob("[!.]*")] == ["shard_00000.parquet"]
