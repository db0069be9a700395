"""Broken images, and a disk that is gone, in vision training."""

import json
import os
import re
import shutil

import pytest

from deit_gka.training.reports import trusted
from vision_runs import begin, records, train, wait_for_step


def spoil(pictures, folder):
    shutil.copytree(pictures, folder)
    names = [folder / "train/class_0/bad_1.jpg", folder / "train/class_2/bad_2.jpg", folder / "val/class_1/bad_3.jpg"]
    for name in names:
        name.write_bytes(b"" if "2" in name.name else b"no picture")
    return [str(name) for name in names]


@pytest.mark.parametrize("ranks", [1, 2])
def test_broken_images_are_counted_and_listed(pictures, tmp_path, ranks):
    names = spoil(pictures, tmp_path / "data")
    done = train(
        tmp_path / "data", tmp_path / "out", "--epochs", 3, "--repeated-aug", 1, "--save-every", "-1", ranks=ranks
    )
    listed = (tmp_path / "out/run/broken_images.txt").read_text().splitlines()
    assert {line.split("\t")[0] for line in listed} == set(names)
    if ranks == 1:
        assert len(listed) == 3 and all(done.stderr.count(f"warning: {name} cannot be read") == 1 for name in names)
    reasons = dict(line.split("\t") for line in listed)
    assert "not a JPEG" in reasons[names[0]] and "empty" in reasons[names[1]]
    last = records(tmp_path / "out", "eval")[-1]
    assert (last["images"], last["broken"]) == (27, 1) and 4 <= last[
        "broken_train"
    ] <= 6  # 80 images, 72 drawn an epoch
    assert "broken training images" in done.stdout and "on 27 images, 1 more are broken" in done.stdout
    assert json.loads((tmp_path / "out/results.jsonl").read_text())["metrics"]["broken_train"] == last["broken_train"]


def test_a_broken_file_may_have_any_name(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    folder = next((tmp_path / "data/val").iterdir())
    (folder / os.fsdecode(b"caf\xe9.jpg")).touch()
    for _ in range(2):  # the second run reads the list of the first
        done = train(tmp_path / "data", tmp_path / "out", "--epochs", 1, "--warmup-epochs", 1)
    assert "already trained" in done.stdout
    assert b"caf\xe9.jpg\tthe file is empty" in (tmp_path / "out/run/broken_images.txt").read_bytes()


def test_an_evaluation_of_few_images_is_not_the_best():
    disk_trouble, fine = {"images": 500, "broken": 100, "top1": 90.0}, {"images": 598, "broken": 2, "top1": 60.0}
    assert trusted([disk_trouble, fine]) == trusted([fine, disk_trouble]) == [fine] and trusted([]) == []
    always_broken = [{"images": 117, "broken": 3, "top1": accuracy} for accuracy in (10.0, 20.0)]
    assert trusted(always_broken) == always_broken


def test_a_disk_that_is_gone_is_one_line(pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "data")
    more = ["--epochs", 1000, "--num-workers", 3]  # on fewer cores torch would warn
    process = begin(tmp_path / "data", tmp_path / "out", *more)
    wait_for_step(process, tmp_path / "out", 8)
    (tmp_path / "data/train").rename(tmp_path / "data/elsewhere")
    done = process.wait()
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("warning: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert re.fullmatch(
        r"error: none of \d+ images in a row can be read, the first is .*; is the disk still there\?", lines[0]
    )
