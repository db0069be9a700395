"""Packing by several machines, and at size: the parts joined are what one machine makes, in memory of a fixed size."""

import errno
import json
import os
import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from nanochat_gka import pack, tokenizer
from nanochat_gka.data import parts
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.data.units import pack_unit, plan_units
from tiny_pack import config
from trainkit_gka.cli import UserError
from trainkit_gka.files import locked


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A corpus of 12 units, its tokenizer, and `packed` by one machine."""
    root = tmp_path_factory.mktemp("whole")
    tiny.write_corpus(root / "corpus", files=3, docs=400, row_group=10)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(config(root, root / "packed"))
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that has to be the same; the units' own records also say how long packing took."""
    kept = [path for path in folder.iterdir() if path.suffix == ".bin" or path.name in ("manifest.json", "plan.json")]
    return {path.name: path.read_bytes() for path in kept}


def test_parts_joined_are_what_one_machine_makes(whole, tmp_path, capsys):
    """Three machines without a common folder; one of them was killed and did not finish, one packed twice."""
    out, machines = tmp_path / "packed", [tmp_path / f"machine{number}" for number in (1, 2, 3)]
    for number, machine in enumerate(machines, start=1):
        pack.main(config(whole, machine, part=f"{number}/3"))
        assert not (machine / "manifest.json").exists()
    capsys.readouterr()
    pack.main(config(whole, machines[2], part="3/3"))
    assert "4 of 4 units were packed before" in capsys.readouterr().out
    sizes = [len(list((machine / f"part-{number}-of-3").glob("*.bin"))) for number, machine in enumerate(machines, 1)]
    assert sizes == [4, 4, 4]
    (machines[1] / "part-2-of-3/train_000004.bin").unlink()
    for machine in machines:
        shutil.copytree(machine, out, dirs_exist_ok=True)
    pack.main(config(whole, out))
    assert "11 of 12 units were packed before" in capsys.readouterr().out
    assert contents(out) == contents(whole / "packed") and not list(out.glob("part-*"))
    assert PackedData(out).rows_hash() == PackedData(whole / "packed").rows_hash()
    pack.main(config(whole, out, part="2/3"))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out and not list(out.glob("part-*"))


def test_killed_join_is_continued(whole, tmp_path, monkeypatch):
    out, moved = tmp_path / "packed", []
    for part in ("1/2", "2/2"):
        pack.main(config(whole, out, part=part))

    def replace(source, target, moves=os.replace):
        if len(moved) == 5:
            raise KeyboardInterrupt
        moved.append(target)
        moves(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(parts, "os", type("Os", (), {"replace": staticmethod(replace)}))
        with pytest.raises(KeyboardInterrupt):
            pack.main(config(whole, out))
    assert not (out / "manifest.json").exists()
    before = {path.name: path.stat().st_mtime_ns for path in out.rglob("*.bin")}
    pack.main(config(whole, out))
    assert contents(out) == contents(whole / "packed")
    assert before == {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}  # nothing was packed again


def test_rows_that_arrive_before_their_record_are_not_deleted(whole, tmp_path, capsys):
    """Another machine's copy is under way: the join does without these rows, and the next one takes them away."""
    out = tmp_path / "packed"
    pack.main(config(whole, out, part="1/2"))
    part, record = out / "part-1-of-2", out / "part-1-of-2/train_000003.json"
    text, rows = record.read_text(), record.with_suffix(".bin").read_bytes()
    record.unlink()
    pack.main(config(whole, out))
    assert "part-1-of-2 stays: train_000003.bin has no record" in capsys.readouterr().out
    assert (part / "train_000003.bin").read_bytes() == rows and contents(out) == contents(whole / "packed")
    record.write_text(text)
    (out / "manifest.json").unlink()
    pack.main(config(whole, out))
    assert not part.exists() and contents(out) == contents(whole / "packed")


def test_parts_that_are_links_or_on_another_disk_are_one_line(whole, tmp_path, monkeypatch):
    out, part = tmp_path / "packed", tmp_path / "packed/part-1-of-2"
    pack.main(config(whole, out, part="1/2"))
    with monkeypatch.context() as patched:
        full = OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        patched.setattr(parts, "os", SimpleNamespace(replace=Mock(side_effect=full)))
        with pytest.raises(UserError, match=r"part-1-of-2 cannot be joined \(.*\); it must be .* on the disk of"):
            pack.main(config(whole, out))
    files = sorted(part.iterdir())
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="part-1-of-2 is a link; put the part's folder itself into"):
        pack.main(config(whole, out))
    assert sorted(part.iterdir()) == files


@pytest.mark.parametrize("count", [1, 2, 7, 12, 40])
def test_every_unit_is_in_one_part(whole, count):
    units = plan_units(ParquetCorpus(whole / "corpus"))
    dealt = [parts.Part(number, count).of(units) for number in range(1, count + 1)]
    assert [unit for part in dealt for unit in part] == units
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_wrong_parts_are_one_line(whole, tmp_path):
    out = tmp_path / "packed"
    for text in ("0/3", "4/3", "2", "a/b", "-1/2", "1/0"):
        with pytest.raises(UserError, match=r"--part must be NUMBER/COUNT .* such as 2/8, got"):
            pack.main(config(whole, out, part=text))
    with pytest.raises(UserError, match=r"packed was packed with sequence length 32; choose another --out"):
        pack.main(config(whole, whole / "packed", part="1/2", sequence_len=33))
    pack.main(config(whole, out, part="1/2", sequence_len=33))
    with pytest.raises(UserError, match=r"part-1-of-2 was packed with sequence length 33"):
        pack.main(config(whole, out))
    shutil.rmtree(out)
    pack.main(config(whole, out, part="1/2"))
    with locked(out / "part-1-of-2", "packing"), pytest.raises(UserError, match=r"another process is packing .*part-1"):
        pack.main(config(whole, out))
    (out / "part-1-of-2/plan.json").unlink()
    with pytest.raises(UserError, match=r"part-1-of-2 has no plan.json; copy the whole folder"):
        pack.main(config(whole, out))
    assert not (out / "manifest.json").exists()


def test_earlier_manifests_have_the_same_rows(whole, tmp_path):
    """They also noted which units were new, and the seconds of each."""
    shutil.copytree(whole / "packed", tmp_path / "packed")
    manifest = json.loads((whole / "packed/manifest.json").read_text())
    shards = [{**shard, "new": True, "seconds": 0.1} for shard in manifest["shards"]]
    (tmp_path / "packed/manifest.json").write_text(json.dumps({**manifest, "shards": shards}))
    want = PackedData(whole / "packed").rows_hash()
    assert PackedData(tmp_path / "packed").rows_hash() == want
    shards[3]["sha256"] = "0" * 64
    (tmp_path / "packed/manifest.json").write_text(json.dumps({**manifest, "shards": shards}))
    assert PackedData(tmp_path / "packed", verify=False).rows_hash() != want


def python_and_arrow_peaks(root: Path, files: int) -> tuple[int, int]:
    """Peak bytes that packing a corpus of `files` tiny files takes here, and those of a worker's part of it."""
    corpus, out = root / f"corpus{files}", root / f"packed{files}"
    corpus.mkdir()
    pq.write_table(pa.table({"text": tiny.documents(20, 0)}), corpus / "shard_00000.parquet")
    for number in range(1, files):
        os.link(corpus / "shard_00000.parquet", corpus / f"shard_{number:05d}.parquet")
    tracemalloc.start()
    try:
        pack.main(config(root, out, corpus=corpus))
        here = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        vocabulary = Tokenizer.load(out)
        for unit in plan_units(ParquetCorpus(corpus)):
            pack_unit(unit, corpus, vocabulary, 32, out)
        return here, tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes()
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_files(whole, tmp_path):
    """But for what the manifest says of every file and unit."""
    (tmp_path / "tokenizer").symlink_to(whole / "tokenizer")
    few, many = python_and_arrow_peaks(tmp_path, 10), python_and_arrow_peaks(tmp_path, 300)
    per_file = [(more - less) / 290 for less, more in zip(few, many)]
    assert per_file[0] < 2500 and per_file[1] < 1000
