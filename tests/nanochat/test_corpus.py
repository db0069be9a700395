"""Corpora: the built-in one repeats nothing, a download survives trouble, a folder of the user's is not overwritten."""

import os
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import processes
import tiny
from hub import Hub, environment
from nanochat_gka import corpus
from nanochat_gka.data.corpora import ParquetCorpus

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
