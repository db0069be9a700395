"""Checkpoints: what went in comes out; damage and kills cost at most the newest one, and are noticed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from processes import environment
from trainkit_gka import checkpoint
from trainkit_gka.cli import UserError

TENSORS = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4)},
    "optimizer": {"step": torch.tensor(3), "moment": torch.ones(2)},
}


def save(folder, step, **more):
    return checkpoint.save(folder, step, TENSORS, {"step": step}, **more)


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def test_saved_checkpoint_loads_the_same(tmp_path):
    tensors = {
        "model": {
            "bf16": torch.randn(5, 3).bfloat16(),
            "transposed": torch.randn(3, 4).t(),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 2),
        },
        "other": {
            "flags": torch.tensor([True, False]),
            "double": torch.randn(2, dtype=torch.float64),
            "grad": torch.nn.Parameter(torch.ones(1)),
        },
    }
    (tmp_path / "tokenizer.json").write_text("{}\n")
    state = {"step": 1234, "loss": 0.1 + 0.2, "config": {"depth": 20, "tag": "d20-⌘"}, "list": [1, None, True]}
    checkpoint.save(tmp_path / "run", 1234, tensors, state, files={"tokenizer.json": tmp_path / "tokenizer.json"})
    shutil.copytree(tmp_path / "run" / "step_00001234", tmp_path / "best")
    for newest in (checkpoint.load_newest(tmp_path / "run"), checkpoint.load(tmp_path / "best")):
        assert (newest.step, newest.state) == (1234, state)
        assert (newest.path / "tokenizer.json").read_text() == "{}\n"
        for name, group in tensors.items():
            loaded = newest.tensors(name)
            assert loaded.keys() == group.keys()
            for key, value in group.items():
                assert loaded[key].dtype == value.dtype and torch.equal(loaded[key], value.detach()), key


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [3, 10]
    save(tmp_path, 11, keep=3)
    save(tmp_path, 12, keep=1)
    assert steps(tmp_path) == [12]
    assert checkpoint.load_newest(tmp_path, warn=pytest.fail).step == 12


def test_missing_folder_has_no_checkpoint(tmp_path):
    assert checkpoint.load_newest(tmp_path / "nowhere") is None
    assert checkpoint.load_newest(tmp_path) is None
    with pytest.raises(UserError, match=r"step_00000001 is damaged: manifest not found"):
        checkpoint.load(tmp_path / "step_00000001")


def change(file, edit):
    file.write_bytes(edit(file.read_bytes()))


def flip_a_bit(path):
    change(path / "model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]))


DAMAGE = {  # of a checkpoint's folder, and the file that is named
    "flipped bit": (flip_a_bit, "model.safetensors"),
    "missing tensors": (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors"),
    "missing state": (lambda path: (path / "state.json").unlink(), "state.json"),
    "torn manifest": (lambda path: change(path / "manifest.json", lambda text: text[:-20]), "manifest"),
    "list for a manifest": (lambda path: change(path / "manifest.json", lambda _: b"[]"), "manifest"),
    "empty folder": (lambda path: [file.unlink() for file in path.iterdir()], "manifest"),
}


@pytest.mark.parametrize("damage, named", DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, damage, named):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    assert checkpoint.find_damage(newest) is None
    damage(newest)
    with pytest.raises(UserError, match=f"step_00000002 is damaged: .*{named}"):
        checkpoint.load(newest)
    warnings = []
    assert checkpoint.load_newest(tmp_path, warnings.append).step == 1
    assert len(warnings) == 1 and "step_00000002" in warnings[0] and named in warnings[0]
    damage(tmp_path / "step_00000001")
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
        checkpoint.load_newest(tmp_path, warnings.append)


def test_flipped_bit_in_a_manifest(tmp_path):
    path = save(tmp_path, 1)
    intact, manifest = (path / "manifest.json").read_bytes(), json.loads((path / "manifest.json").read_text())
    for position in range(len(intact)):
        content = bytearray(intact)
        content[position] ^= 1 << position % 8
        (path / "manifest.json").write_bytes(content)
        damage = checkpoint.find_damage(path)
        assert damage or json.loads(content) == manifest, content


def test_a_run_that_fell_back_saves_its_steps_again(tmp_path):
    save(tmp_path, 1)
    flip_a_bit(save(tmp_path, 2))
    save(tmp_path, 2)
    assert checkpoint.load_newest(tmp_path, warn=pytest.fail).step == 2
    flip_a_bit(save(tmp_path, 5))
    assert checkpoint.load_newest(tmp_path, warn=len).step == 2
    save(tmp_path, 4, keep=1)  # keeps the only intact one, and none of a later step
    assert steps(tmp_path) == [4] and checkpoint.load_newest(tmp_path, warn=pytest.fail).step == 4


def test_intact_step_is_not_overwritten(tmp_path):
    path = save(tmp_path, 1)
    before = {file: file.stat().st_ino for file in path.iterdir()}
    assert checkpoint.save(tmp_path, 1, {}, {}) == path
    assert before == {file: file.stat().st_ino for file in path.iterdir()}
    checkpoint.save(tmp_path, 1, {}, {"whose": "another history's"}, again=True)
    assert checkpoint.load(path).state["whose"] == "another history's"


def test_remains_of_a_killed_save_are_deleted(tmp_path):
    shutil.copytree(save(tmp_path, 2), tmp_path / ".tmp-step_00000003")
    assert checkpoint.load_newest(tmp_path, warn=pytest.fail).step == 2
    save(tmp_path, 4)
    assert not list(tmp_path.glob(".tmp-*"))


SAVER = """
import os, sys, torch
from pathlib import Path
from trainkit_gka import checkpoint

torch.set_num_threads(1)
folder = Path(sys.argv[1])
for _ in sys.stdin:  # a line: begin saving in a fresh process, until someone kills it
    if os.fork() == 0:
        newest = checkpoint.load_newest(folder)
        step = newest.step if newest else 0
        print(os.getpid(), flush=True)
        while True:
            step += 1
            weight = torch.full((1_250_000,), step, dtype=torch.float64)
            tensors = {"model": {"weight": weight}, "optimizer": {"weight": weight}}
            checkpoint.save(folder, step, tensors, {"step": step}, keep=1)
            print(f"saved {step}", flush=True)
    os.wait()
    print("killed", flush=True)
"""


def test_kill_9_while_saving_keeps_finished_checkpoints(tmp_path):
    """Ten processes save 20 MB over and over, each killed at another moment of a save.

    They are forked from one, which imports torch once.
    """
    rng, folder, saved = random.Random(1), tmp_path / "run", 0
    command = [sys.executable, "-c", SAVER, folder]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment()
    ) as saver:
        for _ in range(10):
            saver.stdin.write("\n")
            pid, began = int(saver.stdout.readline()), time.monotonic()
            saved = int(saver.stdout.readline().removeprefix("saved "))
            time.sleep(rng.uniform(0, time.monotonic() - began))
            os.kill(pid, signal.SIGKILL)
            while (line := saver.stdout.readline()) != "killed\n":
                saved = int(line.removeprefix("saved "))
            newest = checkpoint.load_newest(folder, warn=pytest.fail)
            assert newest.step in (saved, saved + 1)
            assert newest.state == {"step": newest.step}
            assert all((newest.tensors(name)["weight"] == newest.step).all() for name in ("model", "optimizer"))
        saver.stdin.close()
