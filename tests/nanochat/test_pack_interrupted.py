"""Packing that is killed, interrupted or damaged ends, by the same command, in the same rows."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import tiny
from nanochat_gka import pack, tokenizer
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.tokenizer import Tokenizer
from tiny_pack import bins, config, cut, literal_best_fit
from trainkit_gka.cli import UserError

DOCUMENTS = 4000  # to a file: 50 units of training, enough work to be killed in the middle of
UNITS = 52


@pytest.fixture(scope="module")
def fat(tmp_path_factory):
    """A corpus of 52 units, its tokenizer, and `packed` by two workers in one go."""
    root = tmp_path_factory.mktemp("fat")
    tiny.write_corpus(root / "corpus", docs=DOCUMENTS, row_group=10)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(config(root, root / "packed", workers=2))
    return root


def flags(root: Path, out: Path, *more) -> list:
    settings = ["--sequence-len", 32, "--split-documents", "no"]
    return ["--corpus", root / "corpus", "--tokenizer", root / "tokenizer", "--out", out, *settings, *more]


def digests(out: Path) -> list[tuple]:
    shards = json.loads((out / "manifest.json").read_text())["shards"]
    return [(shard["name"], shard["rows"], shard["sha256"]) for shard in shards]


def start_alone(root: Path, out: Path, *more) -> subprocess.Popen:
    """A process in a session of its own, which its descendants share."""
    command, pipe = tiny.command("nanochat_gka.pack", *flags(root, out, *more)), subprocess.PIPE
    options = {"stdout": pipe, "stderr": pipe, "text": True, "env": tiny.environment(), "start_new_session": True}
    return subprocess.Popen(command, **options)


def processes(session: int) -> dict[int, tuple[int, str]]:
    """Living processes of a session: their parents and command lines."""
    living = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                living[int(folder.name)] = int(parent), (folder / "cmdline").read_text()
        except OSError:
            continue
    return living


def servers(session: int) -> list[int]:
    living = processes(session).items()
    return [pid for pid, (parent, line) in living if parent == session and "multiprocessing.forkserver" in line]


def workers(session: int) -> list[int]:
    return [pid for pid, (parent, _) in processes(session).items() if parent in servers(session)]


def wait_for(condition, seconds: float = 120) -> bool:
    """Wait until `condition` holds, and say whether it does."""
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(done)


def kill_and_expect_every_process_to_end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    all_ended = wait_for(lambda: not processes(process.pid))
    for pid in processes(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert all_ended


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_rows_on_disk_are_the_packed_documents(fat):
    """The first unit, read back by hand: BOS-opened rows of T + 1 ids that best-fit packing makes of its documents."""
    vocabulary = Tokenizer.load(fat / "tokenizer")
    texts = pq.ParquetFile(fat / "corpus" / "shard_00000.parquet").read_row_groups(range(8)).column("text").to_pylist()
    documents = [[vocabulary.bos_id, *vocabulary.encode(text)] for text in texts]
    rows = np.frombuffer((fat / "packed" / "train_000000.bin").read_bytes(), dtype="<u2").reshape(-1, 33)
    assert rows.tolist() == literal_best_fit(cut(documents, 10), 33, 1000)


@linux
def test_the_same_command_continues_after_kill_9(fat, tmp_path, capsys):
    """One process, killed and continued, makes the same folder as two that were not interrupted."""
    out = tmp_path / "packed"
    process = start_alone(fat, out, "--workers", 1)
    assert wait_for(lambda: len(list(out.glob("train_*.json"))) >= 3)
    with pytest.raises(UserError, match="another process is packing"):
        pack.main(config(fat, out))
    kill_and_expect_every_process_to_end(process)
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert 3 <= len(finished) < UNITS and not (out / "manifest.json").exists()
    with pytest.raises(UserError, match=r"no packed data in .*run make tokenize"):
        PackedData(out)
    torn = sorted(finished)[1]  # what a crash of the machine may leave
    torn.write_bytes(torn.read_bytes()[:-66])

    capsys.readouterr()
    pack.main(config(fat, out))
    continued = re.search(r"(\d+) of 52 units were packed before", capsys.readouterr().out)
    # A kill may fall between a unit's rows and its record.
    assert int(continued[1]) in (len(finished) - 1, len(finished) - 2)
    assert sum(path.stat().st_mtime_ns == then for path, then in finished.items()) == int(continued[1])
    assert len(bins(out)) == UNITS and bins(out) == bins(fat / "packed")
    assert digests(out) == digests(fat / "packed")
    assert not list(out.glob(".tmp-*"))

    pack.main(config(fat, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out
    PackedData(out)


@linux
@pytest.mark.parametrize("wait", [servers, workers])
def test_kill_9_at_the_start_leaves_no_workers(fat, tmp_path, wait):
    process = start_alone(fat, tmp_path / "packed", "--workers", 1)
    assert wait_for(lambda: wait(process.pid))
    kill_and_expect_every_process_to_end(process)
    assert not (tmp_path / "packed" / "manifest.json").exists()  # they did not end because all was done


@linux
@pytest.mark.parametrize("moment", ["starting", "packing"])
def test_ctrl_c_is_one_line_and_ends_every_process(fat, tmp_path, moment):
    """A terminal sends it to the workers too."""
    process = start_alone(fat, tmp_path / "packed", "--workers", 1)
    records = (tmp_path / "packed").glob
    assert wait_for(lambda: list(records("train_*.json")) if moment == "packing" else workers(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=tiny.HANG_AFTER)
    assert process.returncode == 130 and errors == "interrupted\n", output + errors
    assert wait_for(lambda: not processes(process.pid))


@linux
def test_a_killed_worker_is_one_line(fat, tmp_path):
    """What the kernel does when memory runs out."""
    process = start_alone(fat, tmp_path / "packed", "--workers", 1)
    assert wait_for(lambda: list((tmp_path / "packed").glob("train_*.json")))
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    output, errors = process.communicate(timeout=tiny.HANG_AFTER)
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    tiny.assert_one_line_error(done, "a worker process was killed .*run the same command again")


def test_packing_again_restores_damaged_units(fat, tmp_path):
    """Only the damaged units are packed. The manifest need not be deleted where damage shows without reading rows."""
    out = tmp_path / "packed"
    shutil.copytree(fat / "packed", out)
    (out / "val_000000.bin").unlink()
    os.truncate(out / "train_000003.bin", 66)
    (out / "train_000005.json").write_text("{")
    with pytest.raises(UserError, match=r"val_000000.bin is missing"):
        PackedData(out)
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    pack.main(config(fat, out))
    PackedData(out)
    assert bins(out) == bins(fat / "packed") and digests(out) == digests(fat / "packed")
    packed = {path.name for path, then in kept.items() if path.stat().st_mtime_ns != then}
    assert packed == {"train_000003.bin", "train_000005.bin"}
