"""Patched DeiT: it builds, trains, resumes and evaluates our models, and its own softmax models are untouched.

Needs a checkout, from `make vendor` or DEIT_SRC, and what that imports (patches/requirements.txt).
"""

import json
import subprocess

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from upstream_trees import PROJECT, SCRIPTS, assert_equal, run

pytestmark = pytest.mark.upstream


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Class folders of random JPEGs."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(random.integers(0, 255, (80, 70, 3), dtype=np.uint8))
                picture.save(folder / split / name / f"{number}.jpg")
    return folder


def deit(at, images, out, model, *flags):
    command = ["main", "--model", model, "--data-path", images, "--output_dir", out, "--device", "cpu"]
    size = ["--input-size", 64, "--batch-size", 4, "--num_workers", 1, "--epochs", 2, "--warmup-epochs", 1]
    return run(at, SCRIPTS / "upstream_deit.py", *command, *size, *flags)


def log(out):
    return [json.loads(line) for line in (out / "log.txt").read_text().splitlines()]


def test_deit_builds_our_models(tree):
    names = [f"deit_{size}_{kind}_patch16_224" for size in ("tiny", "small", "base") for kind in ("gka", "vlt")]
    script = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "import timm_compat, timm, models, models_v2, deit_gka\n"
        "options = dict(num_classes=10, img_size=64, drop_rate=0.0, drop_path_rate=0.1, drop_block_rate=None)\n"
        "[timm.create_model(name, **options) for name in sys.argv[1:]]\n"
    )
    run(tree("deit"), "-c", script, *names)


def test_deit_trains_resumes_and_evaluates_gka(tree, images, tmp_path):
    at, name = tree("deit"), "deit_tiny_gka_patch16_224"
    deit(at, images, tmp_path, name, "--clip-grad", 1.0, "--min-lr", 1e-6)
    assert [line["epoch"] for line in log(tmp_path)] == [0, 1]
    for line in log(tmp_path):
        assert all(np.isfinite(line[key]) for key in ("train_loss", "test_acc1", "test_ema_acc1", "test_ema_loss"))
    deit(at, images, tmp_path, name, "--resume", tmp_path / "checkpoint.pth", "--epochs", 3)
    assert [line["epoch"] for line in log(tmp_path)] == [0, 1, 2]
    printed = deit(at, images, tmp_path, name, "--resume", tmp_path / "checkpoint.pth", "--eval")
    assert "Accuracy of the network on the 8 test images" in printed


def test_deits_softmax_is_untouched_bit_by_bit(tree, tmp_path):
    for patched in (False, True):
        run(tree("deit", patched), SCRIPTS / "upstream_deit.py", "model", tmp_path / str(patched))
    assert_equal(load_file(tmp_path / "False"), load_file(tmp_path / "True"))


def test_evaluating_the_average_keeps_training_the_same(tree, images, tmp_path, tmp_path_factory):
    """Upstream's main.py does not start with today's timm, so the tree to compare with has the first patch alone."""
    first = tmp_path_factory.mktemp("first")
    git = ["git", "-C", str(tree("deit", patched=False))]
    subprocess.run([*git, "worktree", "add", "-q", "--detach", str(first / "deit")], check=True, capture_output=True)
    patch = PROJECT / "patches" / "deit" / "0001-timm-1.patch"
    subprocess.run(["git", "-C", str(first / "deit"), "apply", "--unidiff-zero", str(patch)], check=True)
    logs = []
    for at, out in ((first / "deit", tmp_path / "first"), (tree("deit"), tmp_path / "all")):
        deit(at, images, out, "deit_tiny_patch16_224")
        logs.append(log(out))
    for one, other in zip(*logs, strict=True):
        assert one == {key: value for key, value in other.items() if "ema" not in key}
        assert "test_ema_acc1" in other
