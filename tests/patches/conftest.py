"""Checkouts of the upstreams, each made once for the tests of a file."""

import functools
import importlib.util
import os
from pathlib import Path

import pytest

from upstream_trees import PROJECT, run

IMPORTED = {"nanochat": ["tokenizers", "wandb", "psutil"], "deit": ["timm"]}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A function: the checkout of an upstream, patched or not. Skips the test without it and what it imports."""

    @functools.cache
    def make(name, patched):
        variable, folder = f"{name.upper()}_SRC", tmp_path_factory.mktemp("upstream") / name
        source = os.environ.get(variable) or PROJECT / "vendor" / name
        if not Path(source).exists():
            pytest.skip(f"{name} was not found: run `make vendor`, or set {variable}")
        for module in IMPORTED[name]:
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{name} imports {module}: pip install -r patches/requirements.txt")
        for action in ["vendor", "apply"][: 1 + patched]:
            run(PROJECT, "patches/apply.py", action, name, "--tree", folder, **{variable: str(source)})
        return folder

    return lambda name, patched=True: make(name, patched)
