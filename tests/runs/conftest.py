"""make in a bare copy of the tree, and the commands that it would run."""

import os
import shlex
import shutil
import subprocess

import pytest

from makefile import LAUNCHER, SETTINGS
from runs import make as launcher
from runs.settings import read
from sources import ROOT


@pytest.fixture
def bare(tmp_path):
    """A bare copy of the tree: what make needs, no environment, no outputs."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml", *(f"runs/{name}.py" for name in LAUNCHER)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def make(bare):
    """Run make itself in the bare copy."""
    # These tests run under `make test`: its settings and its talk of entering folders are not theirs.
    settings = {"MFLAGS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", *SETTINGS}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key not in settings}

    def run(*words, env=None):
        return subprocess.run(["make", *words], cwd=bare, capture_output=True, text=True, env={**kept, **(env or {})})

    return run


@pytest.fixture
def lines(bare, monkeypatch):
    """The lines for the shell that make would show for some targets, asked of its launcher in this process.

    look=False: as if they were to run, with all that is checked first; raises runs.settings.Problem.
    """
    monkeypatch.chdir(bare)

    def ask(*targets, look=True, **settings):
        return launcher.chain(list(targets), {"PYTHON": "python3", **read(settings)}, look)

    return ask


@pytest.fixture
def commands(lines):
    """The same lines as lists of words."""
    return lambda *targets, **settings: [shlex.split(line) for line in lines(*targets, **settings)]


@pytest.fixture
def ready(tmp_path):
    """An environment that make takes for installed."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()


@pytest.fixture
def scripted(tmp_path, ready):
    """Makes the environment's Python a script for the shell, which is called with the words of a command."""

    def write(script):
        python = tmp_path / ".venv/bin/python"
        python.parent.mkdir()
        python.write_text("#!/bin/sh\n" + script)
        python.chmod(0o755)

    return write
