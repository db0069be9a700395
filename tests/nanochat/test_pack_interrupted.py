"""Packing that is killed, interrupted, damaged or done by several machines ends in the rows that one makes at once."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny
from nanochat_gka import pack, tokenizer
from nanochat_gka.data import parts
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.tokenizer import Tokenizer
from processes import descendants, environment, still_there
from tiny_pack import bins, config

UNITS = 52


def make_corpus(root: Path, **size) -> Path:
    tiny.write_corpus(root / "corpus", row_group=10, **size)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that has to be the same; the units' own records also say how long packing took."""
    kept = [path for path in folder.iterdir() if path.suffix == ".bin" or path.name in ("manifest.json", "plan.json")]
    return {path.name: path.read_bytes() for path in kept}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}


# One machine


@pytest.fixture(scope="module")
def fat(tmp_path_factory):
    """A corpus of 52 units, enough work to be killed in the middle of, and `packed` by two workers in one go."""
    root = make_corpus(tmp_path_factory.mktemp("fat"), docs=4000)
    pack.main(config(root, root / "packed", workers=2))
    return root


def start(root: Path, out: Path, units: int = 1) -> subprocess.Popen:
    """Start packing by one worker, in a session of its own, and wait until it has packed some units."""
    flags = ["--corpus", root / "corpus", "--tokenizer", root / "tokenizer", "--out", out, "--workers", 1]
    command = tiny.command("nanochat_gka.pack", *flags, "--sequence-len", 32, "--split-documents", "no")
    options = {"text": True, "env": environment(), "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    while len(list(out.glob("train_*.json"))) < units:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    return process


def test_the_same_command_continues_after_kill_9(fat, tmp_path, capsys):
    """One process, killed and continued, makes the same folder as two that were not interrupted."""
    out = tmp_path / "packed"
    process = start(fat, out, units=3)
    with tiny.one_line_error("another process is packing"):
        pack.main(config(fat, out))
    started = descendants(process.pid)
    process.kill()
    assert tiny.finish(process).returncode == -signal.SIGKILL and not still_there(started)
    finished = times(out)
    assert 3 <= len(finished) < UNITS and not (out / "manifest.json").exists()
    with tiny.one_line_error(r"no packed data in .*nanochat_gka.pack"):
        PackedData(out)
    torn = out / sorted(finished)[1]  # what a crash of the machine may leave
    torn.write_bytes(torn.read_bytes()[:-66])
    capsys.readouterr()
    pack.main(config(fat, out))
    continued = int(re.search(r"(\d+) of 52 units were packed before", capsys.readouterr().out)[1])
    assert continued in (len(finished) - 1, len(finished) - 2)  # a kill may fall between a unit's rows and its record
    assert sum(times(out)[name] == then for name, then in finished.items()) == continued
    assert len(bins(out)) == UNITS and contents(out) == contents(fat / "packed") and not list(out.glob(".tmp-*"))
    pack.main(config(fat, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out


def test_ctrl_c_is_one_line_and_ends_every_process(fat, tmp_path):
    """A terminal sends it to the workers too."""
    process = start(fat, tmp_path / "packed")
    started = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    done = tiny.finish(process)
    assert done.returncode == 130 and done.stderr == "interrupted\n", done.stdout + done.stderr
    assert not still_there(started)


def test_a_killed_worker_is_one_line(fat, tmp_path):
    """What the kernel does when memory runs out."""
    process = start(fat, tmp_path / "packed")
    worker = descendants(process.pid)[-1]  # the forkserver's child
    os.kill(worker, signal.SIGKILL)
    tiny.assert_one_line_error(tiny.finish(process), "a worker process was killed .*run the same command again")


def test_packing_again_restores_damaged_units(fat, tmp_path):
    """And no others. The manifest must be deleted only where damage does not show without reading rows."""
    out = tmp_path / "packed"
    shutil.copytree(fat / "packed", out)
    (out / "val_000000.bin").unlink()
    os.truncate(out / "train_000003.bin", 66)
    (out / "train_000005.json").write_text("{")
    with tiny.one_line_error(r"val_000000.bin is missing"):
        PackedData(out)
    kept = times(out)
    pack.main(config(fat, out))
    assert contents(out) == contents(fat / "packed")
    assert {name for name in kept if times(out)[name] != kept[name]} == {"train_000003.bin", "train_000005.bin"}
    flipped = bytearray((out / "val_000000.bin").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (out / "val_000000.bin").write_bytes(flipped)
    Tokenizer.train(tiny.documents(50, 9), 300).save(out)
    (out / "manifest.json").unlink()
    pack.main(config(fat, out))
    assert contents(out) == contents(fat / "packed")
    PackedData(out)


# Several machines


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A corpus of 12 units, its tokenizer, and `packed` by one machine."""
    root = make_corpus(tmp_path_factory.mktemp("whole"), files=3, docs=400)
    pack.main(config(root, root / "packed"))
    return root


def test_parts_joined_are_what_one_machine_makes(whole, tmp_path, capsys):
    """Three machines without a common folder; one of them was killed and did not finish, one packed twice."""
    out, machines = tmp_path / "packed", [tmp_path / f"machine{number}" for number in (1, 2, 3)]
    for number, machine in enumerate(machines, start=1):
        pack.main(config(whole, machine, part=f"{number}/3"))
        assert not (machine / "manifest.json").exists()
        assert len(list((machine / f"part-{number}-of-3").glob("*.bin"))) == 4
    capsys.readouterr()
    pack.main(config(whole, machines[2], part="3/3"))
    assert "4 of 4 units were packed before" in capsys.readouterr().out
    (machines[1] / "part-2-of-3/train_000004.bin").unlink()
    for machine in machines:
        shutil.copytree(machine, out, dirs_exist_ok=True)
    pack.main(config(whole, out))
    assert "11 of 12 units were packed before" in capsys.readouterr().out
    assert contents(out) == contents(whole / "packed") and not list(out.glob("part-*"))
    assert PackedData(out).rows_hash() == PackedData(whole / "packed").rows_hash()


def test_a_killed_join_is_continued(whole, tmp_path, monkeypatch):
    out, moved = tmp_path / "packed", []
    for part in ("1/2", "2/2"):
        pack.main(config(whole, out, part=part))

    def replace(source, target, moves=os.replace):
        if len(moved) == 5:
            raise KeyboardInterrupt
        moved.append(target)
        moves(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(parts, "os", SimpleNamespace(replace=replace))
        pack.main(config(whole, out))
    assert not (out / "manifest.json").exists()
    before = times(out)
    pack.main(config(whole, out))
    assert contents(out) == contents(whole / "packed") and times(out) == before  # nothing was packed again


def test_wrong_parts_are_one_line(whole, tmp_path):
    out, part = tmp_path / "packed", tmp_path / "packed/part-1-of-2"

    def refused(message, place=out, **changes):
        with tiny.one_line_error(message):
            pack.main(config(whole, place, **changes))

    refused(r"--part must be NUMBER/COUNT .* such as 2/8, got", part="4/3")
    refused("was packed with sequence length 32", whole / "packed", part="1/2", sequence_len=33)
    pack.main(config(whole, out, part="1/2", sequence_len=33))
    refused("part-1-of-2 was packed with sequence length 33")
    shutil.rmtree(out)
    pack.main(config(whole, out, part="1/2"))
    (part / "plan.json").unlink()
    refused("part-1-of-2 has no plan.json; copy the whole folder")
    assert (part / "train_000003.bin").exists() and not (out / "manifest.json").exists()
