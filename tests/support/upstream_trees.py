"""Checkouts of the upstreams, patched and as they are, and commands that run in them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sources import ROOT as PROJECT

SCRIPTS = Path(__file__).parent
IMPORTED = {"nanochat": ["tokenizers", "wandb", "psutil"], "deit": ["timm"]}


def run(at, *command, **environment):
    """What a command prints. torch.compile is off: it takes most of a minute, and the patches do not touch it."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(PROJECT), **environment}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run([sys.executable, *map(str, command)], cwd=at, env=environment, **output)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def make_tree(name, patched, folder):
    """The checkout of an upstream in `folder`. Skips the test if the upstream, or something it imports, is absent."""
    variable = f"{name.upper()}_SRC"
    source = os.environ.get(variable) or PROJECT / "vendor" / name
    if not Path(source).exists():
        pytest.skip(f"{name} was not found: run `make vendor`, or set {variable}")
    for module in IMPORTED[name]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{name} imports {module}: pip install -r patches/requirements.txt")
    for action in ["vendor", "apply"][: 1 + patched]:
        run(PROJECT, "patches/apply.py", action, name, "--tree", folder / name, **{variable: str(source)})
    return folder / name


def assert_patched(name, tree):
    """Each patch says which git id its files have after it."""
    header = r"(?m)^diff --git a/(\S+) b/\S+\n(?:new file .*\n)?index \w+\.\.(\w{40})"
    patches = sorted((PROJECT / "patches" / name).glob("*.patch"))
    ids = dict(pair for patch in patches for pair in re.findall(header, patch.read_text()))
    made = subprocess.check_output(["git", "hash-object", "--no-filters", *ids], cwd=tree, text=True).split()
    assert len(ids) > 1 and dict(zip(ids, made)) == ids


def assert_equal(a, b):
    """Two dictionaries of tensors are equal bit by bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
