"""Packing: upstream's rows, the same bins however the work is cut or interrupted, and one-line errors for what cannot be packed."""

import hashlib
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
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import golden
import tiny
from nanochat_gka import pack, tokenizer
from nanochat_gka.data import units
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.packing import best_fit_rows
from nanochat_gka.data.shards import TRAIN_FIRST
from nanochat_gka.data.tokenizer import Tokenizer
from trainkit.cli import UserError

BOS = 50000
FAT = 4000  # documents to a file: 50 units of training, enough work to be killed in the middle of
UNITS = 52


def document(bos: int, token: int, length: int) -> np.ndarray:
    return np.array([bos] + [token] * length, dtype=np.uint16)


def cut(documents: list, size: int) -> list[list]:
    """In batches of `size`, the last one shorter."""
    return [documents[first : first + size] for first in range(0, len(documents), size)]


def literal_best_fit(batches: list[list[list[int]]], capacity: int, buffer_size: int) -> list[list[int]]:
    """The rule as upstream words it, with plain lists."""
    waiting, buffer, rows, row = list(batches), [], [], []
    while True:
        while len(buffer) < buffer_size and waiting:
            buffer = buffer + waiting.pop(0)
        if not buffer:
            return rows
        room = capacity - len(row)
        fitting = [i for i, doc in enumerate(buffer) if len(doc) <= room]
        if fitting:
            chosen = max(fitting, key=lambda i: (len(buffer[i]), -i))
        else:
            chosen = min(range(len(buffer)), key=lambda i: (len(buffer[i]), i))
        row = row + buffer.pop(chosen)[:room]
        if len(row) == capacity:
            rows, row = [*rows, row], []


def test_rows_are_upstreams():
    want = golden.GOLDEN["packing"]
    documents = [document(BOS, k, 3 + (k * k * 31 + 17 * k) % 61) for k in range(400)]
    rows = best_fit_rows(cut(documents, want["tokenizer_batch_size"]), want["T"] + 1, buffer_size=want["buffer_size"])
    expected = [[token for token, count in runs for _ in range(count)] for runs in want["rows"]]
    assert [next(rows).tolist() for _ in expected] == expected


@given(st.lists(st.lists(st.integers(0, 40), max_size=9), max_size=12), st.integers(1, 30), st.integers(1, 30))
def test_rows_follow_the_rule(lengths, capacity, buffer_size):
    """Every document opens with its own id, so the rows also show which documents were chosen. Batches are of any size."""
    number = iter(range(1000))
    batches = [[document(BOS + (k := next(number)), k, length) for length in batch] for batch in lengths]
    rows = [row.tolist() for row in best_fit_rows(iter(batches), capacity, buffer_size)]
    assert rows == literal_best_fit([[doc.tolist() for doc in batch] for batch in batches], capacity, buffer_size)
    assert all(row[0] >= BOS for row in rows)


@pytest.fixture(scope="module")
def fat(tmp_path_factory):
    """A corpus of 52 units, its tokenizer, and `packed` by two workers in one go."""
    root = tmp_path_factory.mktemp("fat")
    tiny.write_corpus(root / "corpus", docs=FAT, row_group=10)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(config(root, root / "packed", workers=2))
    return root


def config(root: Path, out: Path, **changes) -> pack.PackConfig:
    return pack.PackConfig(
        **{
            "corpus": root / "corpus",
            "tokenizer": root / "tokenizer",
            "out": out,
            "sequence_len": 32,
            "workers": 1,
            **changes,
        }
    )


def flags(root: Path, out: Path, *more) -> list:
    return ["--corpus", root / "corpus", "--tokenizer", root / "tokenizer", "--out", out, "--sequence-len", 32, *more]


def bins(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.bin")}


def digests(out: Path) -> list[tuple]:
    return [
        (shard["name"], shard["rows"], shard["sha256"])
        for shard in json.loads((out / "manifest.json").read_text())["shards"]
    ]


def start_alone(root: Path, out: Path, *more) -> subprocess.Popen:
    """A real process in a session of its own, so that its descendants can be told from others."""
    command = tiny.command("nanochat_gka.pack", *flags(root, out, *more))
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=tiny.environment(),
        start_new_session=True,
    )


def processes(session: int) -> dict[int, tuple[int, str]]:
    """Living processes of a session: their parents and command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent, _, its_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found[int(folder.name)] = int(parent), (folder / "cmdline").read_text()
        except OSError:
            continue
    return found


def servers(session: int) -> list[int]:
    return [
        pid
        for pid, (parent, line) in processes(session).items()
        if "multiprocessing.forkserver" in line and parent == session
    ]


def workers(session: int) -> list[int]:
    return [pid for pid, (parent, _) in processes(session).items() if parent in servers(session)]


def wait_for(condition, seconds: float = 120) -> bool:
    """Until it is so. The limit is for a test that fails, on any machine."""
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(done)


def kill_and_see_everyone_die(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    everyone_died = wait_for(lambda: not processes(process.pid))
    for pid in processes(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert everyone_died


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_rows_on_disk_are_the_packed_documents(fat):
    """The first unit, read back by hand: BOS-opened rows of T + 1 ids that best-fit packing makes of its documents."""
    vocabulary = Tokenizer.load(fat / "tokenizer")
    texts = pq.ParquetFile(fat / "corpus" / "shard_00000.parquet").read_row_groups(range(8)).column("text").to_pylist()
    documents = [[vocabulary.bos_id, *vocabulary.encode(text)] for text in texts]
    rows = np.frombuffer((fat / "packed" / "train_000000.bin").read_bytes(), dtype="<u2").reshape(-1, 33)
    assert rows.tolist() == literal_best_fit(cut(documents, 10), 33, 1000)


def upstream_rows(paths: list[Path], vocabulary: Tokenizer, capacity: int, count: int) -> list[list[int]]:
    """The first rows of nanochat's loader with one process, which begins again when the files have been read (facts of its pinned version)."""

    def batches():
        while True:
            for path in paths:
                file = pq.ParquetFile(path)
                for group in range(file.num_row_groups):
                    texts = file.read_row_group(group).column("text").to_pylist()
                    yield from cut([[vocabulary.bos_id, *vocabulary.encode(text)] for text in texts], 128)

    source, buffer, rows = batches(), [], []
    while len(rows) < count:
        row = []
        while len(row) < capacity:
            while len(buffer) < 1000:
                buffer += next(source)
            room = capacity - len(row)
            fitting = [doc for doc in buffer if len(doc) <= room]
            chosen = max(fitting, key=len) if fitting else min(buffer, key=len)  # both give the first among equals
            del buffer[next(place for place, doc in enumerate(buffer) if doc is chosen)]
            row += chosen[:room]
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Row groups whose size is not a multiple of 128, empty documents, documents longer than a row, two training files."""
    root = tmp_path_factory.mktemp("odd")
    for number in range(3):
        texts = [
            "" if k % 11 == 3 else text * (9 if k % 13 == 5 else 1)
            for k, text in enumerate(tiny.documents(2500, number))
        ]
        schema = pa.schema([("text", pa.string())])
        (root / "corpus").mkdir(exist_ok=True)
        with pq.ParquetWriter(root / "corpus" / f"{number}.parquet", schema) as writer:
            sizes = [1, 77, 130, 300, 129, 513] * 3
            for first, size in zip(np.cumsum([0, *sizes]), sizes):
                writer.write_table(pa.table({"text": texts[first : first + size]}, schema))
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(config(root, root / "packed", workers=1))
    return root


@pytest.mark.parametrize("split,name", [("val", "val"), ("train", "train_first")])
def test_rows_for_evaluation_are_upstreams_until_the_file_ends(odd, split, name):
    data = PackedData(odd / "packed")
    (record,) = (shard for shard in data.manifest["shards"] if shard["split"] == name)
    count = record["upstream_rows"]
    assert len(data.split(name)) > count > 500
    paths = sorted((odd / "corpus").glob("*.parquet"))
    want = upstream_rows(paths[-1:] if split == "val" else paths[:-1], data.tokenizer, 33, count)
    ids, targets = data.eval_rows(split, count * 32).batch(range(count))
    assert torch.cat([ids, targets[:, -1:]], dim=1).tolist() == want


def test_more_training_rows_than_are_kept_are_not_called_nanochats(odd):
    """The first of two training files is kept."""
    data, said = PackedData(odd / "packed"), []
    kept, whole = len(data.split("train_first")), len(data.split("train"))
    assert kept + 1 < whole
    for rows, choice in ((kept, "upstream"), (whole, "upstream"), (kept + 1, "spaced")):
        data.warn_of_rows(choice, rows * 32, said.append)
    data.warn_of_rows("upstream", -1, said.append)
    assert not said
    data.warn_of_rows("upstream", (kept + 1) * 32, said.append)
    assert len(said) == 1 and f"first {kept:,} rows of the training text, and {kept + 1:,} are evaluated" in said[0]


def test_a_first_file_of_less_than_a_row_is_not_an_earlier_version(odd, tmp_path):
    shutil.copytree(odd / "corpus", tmp_path / "corpus")
    pq.write_table(pa.table({"text": ["short"]}), tmp_path / "corpus" / "0.parquet")
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=odd / "tokenizer"))
    data, said = PackedData(tmp_path / "packed"), []
    assert len(data.split("train_first")) == 0 and data.has_upstream_rows
    data.warn_of_rows("upstream", 320, said.append)
    assert len(said) == 1 and "keeps nanochat's first 0 rows" in said[0]
    ids, targets = data.eval_rows("val", 50 * 32).batch(range(50))
    want = upstream_rows([tmp_path / "corpus" / "2.parquet"], data.tokenizer, 33, 50)
    assert torch.cat([ids, targets[:, -1:]], dim=1).tolist() == want


def test_the_training_text_kept_for_evaluation_is_no_longer_than_that(odd, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "FIRST_TOKENS", 100 * 32)
    unit = next(unit for unit in units.plan_units(ParquetCorpus(odd / "corpus")) if unit.split == TRAIN_FIRST)
    record = units.pack_unit(unit, odd / "corpus", Tokenizer.load(odd / "tokenizer"), 32, tmp_path)
    assert record["rows"] == record["upstream_rows"] == 100
    whole = (odd / "packed" / "train_first_000000.bin").read_bytes()
    assert (tmp_path / "train_first_000000.bin").read_bytes() == whole[: 100 * 33 * 2]


def test_a_folder_of_an_earlier_version_still_serves(odd, tmp_path, capsys):
    """Its validation split came in units of eight row groups, and it had no rows for evaluation. Packing again replaces those alone."""
    out = tmp_path / "packed"
    shutil.copytree(odd / "packed", out)
    manifest = json.loads((out / "manifest.json").read_text())
    vocabulary, shards = Tokenizer.load(out), []
    for shard in manifest["shards"]:
        if shard["split"] == "train":
            shards.append({key: value for key, value in shard.items() if key != "upstream_rows"})
        else:
            for end in ("bin", "json"):
                (out / f"{shard['name']}.{end}").unlink()
    for number, first in enumerate((0, 8, 16)):
        unit = units.Unit(f"val_{number:06d}", "val", "2.parquet", first, min(first + 8, 18))
        shards.append({**units.pack_unit(unit, odd / "corpus", vocabulary, 32, out), "new": True})
    (out / "manifest.json").write_text(json.dumps({**manifest, "shards": shards}))
    old = PackedData(out)
    assert not old.has_upstream_rows and PackedData(odd / "packed").has_upstream_rows
    said: list[str] = []
    old.warn_of_rows("spaced", 320, said.append)
    PackedData(odd / "packed").warn_of_rows("upstream", 320, said.append)
    assert not said
    old.warn_of_rows("upstream", 320, said.append)
    assert len(said) == 1 and "evaluations take evenly spaced rows" in said[0] and str(out / "manifest.json") in said[0]
    for split in ("train", "val"):
        rows, spaced = old.split(split), old.eval_rows(split, 50 * 32, "spaced")
        for choice in ("upstream", "spaced"):
            assert torch.equal(old.eval_rows(split, 50 * 32, choice).batch(range(50))[0], spaced.batch(range(50))[0])
        assert torch.equal(spaced.batch([49])[0], rows.batch([49 * len(rows) // 50])[0])
    pack.main(config(odd, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    pack.main(config(odd, out))
    assert bins(out) == bins(odd / "packed") and {path.name for path in out.iterdir()} == {
        path.name for path in (odd / "packed").iterdir()
    }


def test_validation_rows_of_an_earlier_version_are_packed_again_though_their_unit_is_the_same(tmp_path):
    """A file of at most eight row groups was one unit then too, of other rows.

    Batches went across row groups, and empty documents were left out.
    """
    tiny.write_corpus(tmp_path / "corpus", docs=60, row_group=10)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=tmp_path / "corpus", out=tmp_path / "tokenizer", vocab_size=300))
    out = tmp_path / "packed"
    pack.main(config(tmp_path, out, workers=1))
    want = bins(out)
    rows, record = out / "val_000000.bin", json.loads((out / "val_000000.json").read_text())
    older = bytes(len(want["val_000000.bin"]))
    rows.write_bytes(older)
    del record["upstream_rows"]
    (out / "val_000000.json").write_text(json.dumps({**record, "sha256": hashlib.sha256(older).hexdigest()}))
    (out / "manifest.json").unlink()
    pack.main(config(tmp_path, out, workers=1))
    assert bins(out) == want


@linux
def test_kill_9_midway_leaves_no_writer_and_the_same_command_continues(fat, tmp_path, capsys):
    """One worker, killed and continued, must end where two uninterrupted ones did: the number of workers shows nowhere either."""
    out = tmp_path / "packed"
    process = start_alone(fat, out, "--workers", 1)
    assert wait_for(lambda: len(list(out.glob("train_*.json"))) >= 3)
    with pytest.raises(UserError, match="another process is packing"):
        pack.main(config(fat, out))
    kill_and_see_everyone_die(process)
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert 3 <= len(finished) < UNITS and not (out / "manifest.json").exists()
    with pytest.raises(UserError, match=r"no packed data in .*run make tokenize"):
        PackedData(out)
    torn = sorted(finished)[1]  # what a crash of the machine may leave
    torn.write_bytes(torn.read_bytes()[:-66])

    capsys.readouterr()
    pack.main(config(fat, out))
    continued = re.search(r"continuing, (\d+) of 52 units are there", capsys.readouterr().out)
    assert int(continued[1]) in (
        len(finished) - 1,
        len(finished) - 2,
    )  # a kill may fall between a unit's rows and its record
    assert sum(path.stat().st_mtime_ns == then for path, then in finished.items()) == int(continued[1])
    assert len(bins(out)) == UNITS and bins(out) == bins(fat / "packed")
    assert digests(out) == digests(fat / "packed")
    assert not list(out.glob(".tmp-*"))

    pack.main(config(fat, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out
    PackedData(out)


@linux
@pytest.mark.parametrize("moment", ["their server starts", "they start"])
def test_kill_9_while_the_workers_start_leaves_none_behind(fat, tmp_path, moment):
    process = start_alone(fat, tmp_path / "packed", "--workers", 1)
    assert wait_for(lambda: (servers if moment == "their server starts" else workers)(process.pid))
    kill_and_see_everyone_die(process)
    assert not (tmp_path / "packed" / "manifest.json").exists()  # they did not end because all was done


@linux
@pytest.mark.parametrize("moment", ["starting", "packing"])
def test_ctrl_c_is_one_line_and_ends_everyone(fat, tmp_path, moment):
    """A terminal sends it to the workers too."""
    process = start_alone(fat, tmp_path / "packed", "--workers", 1)
    assert wait_for(
        lambda: list((tmp_path / "packed").glob("train_*.json")) if moment == "packing" else workers(process.pid)
    )
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


def test_another_tokenizer_length_or_corpus_is_refused(packed, tmp_path):
    out, corpus = tmp_path / "packed", tmp_path / "corpus"
    shutil.copytree(packed / "packed", out)
    with pytest.raises(UserError, match="was packed with sequence length 32; choose another --out or delete it"):
        pack.main(config(packed, out, sequence_len=33))
    tokenizer.main(tokenizer.TokenizerConfig(corpus=packed / "corpus", out=tmp_path / "tokenizer", vocab_size=290))
    with pytest.raises(UserError, match="was packed with another tokenizer"):
        pack.main(config(packed, out, tokenizer=tmp_path / "tokenizer"))
    tiny.write_corpus(corpus, docs=401)
    with pytest.raises(UserError, match="was packed with other corpus files"):
        pack.main(config(packed, out, corpus=corpus))
    assert bins(out) == bins(packed / "packed")
    pack.main(config(packed, out))


def test_a_corpus_too_small_for_the_length_packs_at_a_lower_one(packed, tmp_path):
    with pytest.raises(
        UserError,
        match=r"the corpus is too small for rows of 100000 tokens: 0 training and 0 validation rows.*lower --sequence-len",
    ):
        pack.main(config(packed, tmp_path / "packed", sequence_len=100_000))
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {".lock", "tokenizer.json"}
    pack.main(config(packed, tmp_path / "packed"))
    assert bins(tmp_path / "packed") == bins(packed / "packed")


def test_packing_again_restores_what_is_not_whole(fat, tmp_path):
    """Only the damaged units are packed; the manifest may stay, as long as it can be told that something is wrong."""
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
    assert {path.name for path, then in kept.items() if path.stat().st_mtime_ns != then} == {
        "train_000003.bin",
        "train_000005.bin",
    }
