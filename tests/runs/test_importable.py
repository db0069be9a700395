"""Every module of runs/ is imported: a name that moved is found before a benchmark of an hour ends with it."""

import importlib
from pathlib import Path

import pytest

MODULES = [".".join(path.with_suffix("").parts) for path in sorted(Path("runs").rglob("*.py"))]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(("__init__", "__main__"))])
def test_it_can_be_imported(name):
    importlib.import_module(name)
