"""make in a bare copy of the tree, for the tests of its settings."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from makefile import LAUNCHER, SETTINGS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make(tmp_path):
    """Run make in a bare copy of the tree: no environment, no outputs."""
    for name in ("Makefile", "requirements.txt", "pyproject.toml", *(f"runs/{name}.py" for name in LAUNCHER)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    # These tests run under `make test`: its settings and its talk of entering folders are not theirs.
    settings = {"MFLAGS", "CUDA_VISIBLE_DEVICES", *SETTINGS}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key not in settings}
    kept.pop("PYTHONPATH", None)

    def run(*words, env=None):
        return subprocess.run(
            ["make", *words], cwd=tmp_path, capture_output=True, text=True, env={**kept, **(env or {})}
        )

    return run


@pytest.fixture
def ready(tmp_path):
    """An environment that make takes for installed."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
