"""Checkpoints: what went in comes out; damage and kills cost at most the newest one, and are noticed."""

import json
import os
import shutil

import pytest
import torch

from trainkit_gka import checkpoint
from trainkit_gka.cli import UserError

TENSORS = {
    "model": {"bf16": torch.randn(5, 3).bfloat16(), "transposed": torch.randn(3, 4).t(), "empty": torch.empty(0, 2)},
    "optimizer": {"scalar": torch.tensor(7), "flags": torch.tensor([True]), "grad": torch.nn.Parameter(torch.ones(1))},
}


def save(folder, step, **more):
    return checkpoint.save(folder, step, TENSORS, {"step": step}, **more)


def steps(folder):
    return sorted(int(path.name[5:]) for path in folder.iterdir())


def change(file, edit):
    file.write_bytes(edit(file.read_bytes()))


def flip_a_bit(path):
    change(path / "model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1]))


def edit_manifest(path, name, digest):
    """Give a file another checksum in the manifest; None drops it."""
    manifest = {**json.loads((path / "manifest.json").read_text()), name: digest}
    (path / "manifest.json").write_text(json.dumps({key: one for key, one in manifest.items() if one is not None}))


def replaced(path):
    """Where the checkpoint `path` was."""
    shutil.rmtree(path)
    return path


def newest(folder):
    return checkpoint.load_newest(folder, warn=pytest.fail)


def test_saved_checkpoint_loads_the_same(tmp_path):
    """Also where it was copied under another name; who may read it is for the umask to say."""
    (tmp_path / "tokenizer.json").write_text("{}\n")
    state = {"step": 1234, "loss": 0.1 + 0.2, "config": {"depth": 20, "tag": "d20-⌘"}, "list": [1, None, True]}
    umask = os.umask(0o027)
    try:
        files = {"tokenizer.json": tmp_path / "tokenizer.json"}
        path = checkpoint.save(tmp_path / "run", 1234, TENSORS, state, files)
    finally:
        os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}
    for loaded in (newest(tmp_path / "run"), checkpoint.load(shutil.copytree(path, tmp_path / "best"))):
        assert (loaded.step, loaded.state) == (1234, state)
        assert (loaded.path / "tokenizer.json").read_text() == "{}\n"
        for name, group in TENSORS.items():
            tensors = loaded.tensors(name)
            assert tensors.keys() == group.keys()
            for key, value in group.items():
                assert tensors[key].dtype == value.dtype and torch.equal(tensors[key], value.detach()), key


def test_a_folder_holds_the_newest_checkpoints_and_no_remains_of_a_killed_save(tmp_path):
    assert checkpoint.load_newest(tmp_path / "nowhere") is newest(tmp_path) is None
    shutil.copytree(save(tmp_path, 1), tmp_path / ".tmp-step_00000003")
    assert newest(tmp_path).step == 1
    for step, keep, there in ((2, 2, [1, 2]), (3, 2, [2, 3]), (10, 2, [3, 10]), (11, 3, [3, 10, 11]), (12, 1, [12])):
        save(tmp_path, step, keep=keep)
        assert steps(tmp_path) == there and newest(tmp_path).step == step


DAMAGE = {  # of a checkpoint's folder, and the file that is named
    "flipped bit": (flip_a_bit, "model.safetensors"),
    "missing tensors": (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors"),
    "missing state": (lambda path: (path / "state.json").unlink(), "state.json"),
    "torn manifest": (lambda path: change(path / "manifest.json", lambda text: text[:-20]), "manifest"),
    "list for a manifest": (lambda path: change(path / "manifest.json", lambda _: b"[]"), "manifest"),
    "tensors that are not listed": (lambda path: edit_manifest(path, "model.safetensors", None), "model.safetensors"),
    "state that is not listed": (lambda path: edit_manifest(path, "state.json", None), "state.json"),
    "number for a checksum": (lambda path: edit_manifest(path, "model.safetensors", 5), "model.safetensors"),
    "no file name": (lambda path: edit_manifest(path, "a\0/", "5"), "a"),
    "a file in its place": (lambda path: replaced(path).write_text(""), "manifest"),
    "dangling link": (lambda path: replaced(path).symlink_to("gone/deep"), "manifest"),
    "link to itself": (lambda path: replaced(path).symlink_to(path.name), "manifest"),
    "empty folder": (lambda path: [file.unlink() for file in path.iterdir()], "manifest"),
}


@pytest.mark.parametrize("damage, named", DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, damage, named):
    """The run goes on from the one before it, and saves its steps again."""
    paths, warnings = [save(tmp_path, step, keep=3) for step in (1, 2, 5)], []
    for path, before in ((paths[2], 2), (paths[1], 1)):
        assert checkpoint.find_damage(path) is None
        damage(path)
        with pytest.raises(UserError, match=f"{path.name} is damaged: .*{named}"):
            checkpoint.load(path)
        assert checkpoint.load_newest(tmp_path, warnings.append).step == before
    assert [text.split("step_")[1][:8] for text in warnings] == ["00000005", "00000005", "00000002"]
    assert all(named in text for text in warnings)
    save(tmp_path, 2, keep=1)  # the only intact ones are that and 1, and none of a later step is left
    assert steps(tmp_path) == [2] and newest(tmp_path).step == 2
    damage(paths[1])
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
        checkpoint.load_newest(tmp_path, warnings.append)


def test_a_checkpoint_that_is_deleted_while_it_is_read(tmp_path, monkeypatch):
    """After it was opened it can be read to its end; before, the newest one takes its place."""
    save(tmp_path, 1)
    opened = newest(tmp_path)
    save(tmp_path, 2, keep=1)
    assert torch.equal(opened.tensors("model")["bf16"], TENSORS["model"]["bf16"]) and steps(tmp_path) == [2]
    with pytest.raises(UserError, match=r"has no ema\.safetensors"):
        opened.tensors("ema")
    for name in ("sha256", "read_json"):
        function, at = getattr(checkpoint, name), newest(tmp_path).step

        def delete(path, *more, function=function, at=at):
            monkeypatch.undo()
            save(tmp_path, at + 1, keep=1)
            return function(path, *more)

        monkeypatch.setattr(checkpoint, name, delete)
        assert newest(tmp_path).step == at + 1


def test_the_run_of_a_checkpoint_has_its_folders_name(tmp_path):
    """Also where its folder of checkpoints is a link, or the run or the checkpoint is named by one."""
    path = save(tmp_path / "scratch/of-d4", 8)
    (tmp_path / "runs/d4").mkdir(parents=True)
    (tmp_path / "runs/d4/checkpoints").symlink_to(path.parent)
    (tmp_path / "latest").symlink_to("runs/d4")
    inner = checkpoint.checkpoint_path(save(tmp_path / "runs/d6/checkpoints", 8).parent, 8)
    (tmp_path / "chosen").symlink_to(inner)
    for place in ("runs/d4", "runs/d4/checkpoints/step_00000008", "latest", "latest/checkpoints/step_00000008"):
        assert checkpoint.run_folder(tmp_path / place).name == "d4"
    assert checkpoint.run_folder(tmp_path / "chosen").name == "d6"


def test_flipped_bit_in_a_manifest(tmp_path):
    path = save(tmp_path, 1)
    intact, manifest = (path / "manifest.json").read_bytes(), json.loads((path / "manifest.json").read_text())
    for position in range(len(intact)):
        content = bytearray(intact)
        content[position] ^= 1 << position % 8
        (path / "manifest.json").write_bytes(content)
        damage = checkpoint.find_damage(path)
        assert damage or json.loads(content) == manifest, content


def test_intact_step_is_not_overwritten(tmp_path):
    path = save(tmp_path, 1)
    before = {file: file.stat().st_ino for file in path.iterdir()}
    assert checkpoint.save(tmp_path, 1, {}, {}) == path
    assert before == {file: file.stat().st_ino for file in path.iterdir()}
    checkpoint.save(tmp_path, 1, {}, {"whose": "another history's"}, again=True)
    assert checkpoint.load(path).state["whose"] == "another history's"
