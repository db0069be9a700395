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
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.tokenizer import Tokenizer
from processes import descendants, environment, still_there
from tiny_pack import bins, config

UNITS = 52


def make_corpus(root: Path, **size) -> Path:
    """A corpus, its tokenizer, and `packed` by two workers in one go."""
    tiny.write_corpus(root / "corpus", row_group=10, **size)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(config(root, root / "packed", workers=2))
    return root


@pytest.fixture(scope="module")
def fat(tmp_path_factory):
    """52 units, enough work to be killed in the middle of."""
    return make_corpus(tmp_path_factory.mktemp("fat"), docs=4000)


@pytest.fixture(scope="module")
def thin(tmp_path_factory):
    """12 units."""
    return make_corpus(tmp_path_factory.mktemp("thin"), files=3, docs=400)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that has to be the same; the units' records also say how long packing took."""
    files = [path for path in folder.iterdir() if path.suffix == ".bin" or path.name in ("manifest.json", "plan.json")]
    return {path.name: path.read_bytes() for path in files}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}


# One machine


def start(root: Path, out: Path, units: int = 1) -> subprocess.Popen:
    """Start packing by one worker, in a session of its own, and wait until it has packed some units."""
    flags = ["--corpus", root / "corpus", "--tokenizer", root / "tokenizer", "--out", out, "--workers", 1]
    command = tiny.command("nanochat_gka.pack", *flags, "--sequence-len", 32, "--split-documents", "no")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
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
    before = times(out)
    assert 3 <= len(before) < UNITS and not (out / "manifest.json").exists()
    with tiny.one_line_error("no packed data in .*nanochat_gka.pack"):
        PackedData(out)
    torn = out / sorted(before)[1]  # what a crash of the machine may leave
    torn.write_bytes(torn.read_bytes()[:-66])
    pack.main(config(fat, out))
    continued = int(re.search(r"(\d+) of 52 units were packed before", capsys.readouterr().out)[1])
    assert continued in (len(before) - 1, len(before) - 2)  # a kill may fall between a unit's rows and its record
    assert sum(times(out)[name] == then for name, then in before.items()) == continued
    assert len(bins(out)) == UNITS and contents(out) == contents(fat / "packed") and not list(out.glob(".tmp-*"))
    pack.main(config(fat, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out


def test_ctrl_c_and_a_killed_worker_are_one_line_and_end_every_process(fat, tmp_path):
    """A terminal sends Ctrl-C to the workers too; a full memory kills one of them."""
    process = start(fat, tmp_path / "interrupted")
    started = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    done = tiny.finish(process)
    assert done.returncode == 130 and done.stderr == "interrupted\n", done.stdout + done.stderr
    process = start(fat, tmp_path / "killed")
    started += descendants(process.pid)
    os.kill(started[-1], signal.SIGKILL)  # the forkserver's child
    tiny.assert_one_line_error(tiny.finish(process), "a worker process was killed .*run the same command again")
    assert not still_there(started)


def test_packing_again_restores_damaged_units(fat, tmp_path):
    """And no others. The manifest must be deleted only where damage does not show without reading rows."""
    out = shutil.copytree(fat / "packed", tmp_path / "packed")
    (out / "val_000000.bin").unlink()
    os.truncate(out / "train_000003.bin", 66)
    (out / "train_000005.json").write_text("{")
    before = times(out)
    pack.main(config(fat, out))
    assert contents(out) == contents(fat / "packed")
    assert {name for name in before if times(out)[name] != before[name]} == {"train_000003.bin", "train_000005.bin"}
    flipped = bytearray((out / "val_000000.bin").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (out / "val_000000.bin").write_bytes(flipped)
    Tokenizer.train(tiny.documents(50, 9), 300).save(out)
    (out / "manifest.json").unlink()
    pack.main(config(fat, out))
    assert contents(out) == contents(fat / "packed") and PackedData(out)


# Several machines


def test_parts_joined_are_what_one_machine_makes(thin, tmp_path, capsys, monkeypatch):
    """Three machines without a common folder: one did not finish, one packed twice, and the first join is killed."""
    out, machines = tmp_path / "packed", [tmp_path / f"machine{number}" for number in (1, 2, 3)]
    for number, machine in enumerate([*machines, machines[2]], start=1):
        pack.main(config(thin, machine, part=f"{min(number, 3)}/3"))
    assert "4 of 4 units were packed before" in capsys.readouterr().out
    (machines[1] / "part-2-of-3/train_000004.bin").unlink()
    for machine in machines:
        assert not (machine / "manifest.json").exists() and len(list(machine.glob("part-*/*.json"))) == 6
        shutil.copytree(machine, out, dirs_exist_ok=True)
    before, moved = times(out), []

    def replace(source, target, move=os.replace):
        if len(moved) == 5:
            raise KeyboardInterrupt
        moved.append(target)
        move(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pack, "os", SimpleNamespace(replace=replace))
        pack.main(config(thin, out))
    assert len(bins(out)) == 3 and not (out / "manifest.json").exists()
    pack.main(config(thin, out))
    assert "11 of 12 units were packed before" in capsys.readouterr().out
    assert contents(out) == contents(thin / "packed") and before.items() <= times(out).items()
    pack.main(config(thin, out, part="1/3"))  # does nothing
    assert not list(out.glob("part-*")) and PackedData(out)


def test_wrong_parts_are_one_line(thin, tmp_path):
    out, part = tmp_path / "packed", tmp_path / "packed/part-1-of-2"

    def refused(message, place=out, **changes):
        with tiny.one_line_error(message):
            pack.main(config(thin, place, **changes))

    refused("--part must be NUMBER/COUNT .* such as 2/8, got", part="4/3")
    refused("was packed with sequence length 32", thin / "packed", part="1/2", sequence_len=33)
    pack.main(config(thin, out, part="1/2"))
    refused("part-1-of-2 was packed with sequence length 32", sequence_len=33)
    (out / "plan.json").unlink()
    (part / "plan.json").unlink()
    refused("part-1-of-2 has no plan.json; copy the whole folder")
    assert (part / "train_000003.bin").exists() and not (out / "manifest.json").exists()
