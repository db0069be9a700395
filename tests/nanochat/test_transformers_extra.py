"""Transformers is an extra: what is said without it, and that nothing else here needs it."""

import importlib
import re
import sys

import pytest

from sources import ROOT, imports
from trainkit_gka.extras import MissingExtra

pytest.importorskip("transformers", "5.23", reason='needs transformers: pip install -e ".[hf]"')
importlib.import_module("nanochat_gka.hf")


def test_without_transformers_or_with_an_older_one_one_line_names_the_extra(monkeypatch):
    """Nothing else imports it: the other commands work without."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "nanochat_gka.hf")
    with pytest.raises(MissingExtra, match=re.escape('transformers is not installed: run pip install "gka[hf]"')):
        importlib.import_module("nanochat_gka.hf")
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "nanochat_gka.hf")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.1")
    [oldest] = re.findall(r'"transformers>=([\d.]+)[,"]', (ROOT / "pyproject.toml").read_text())
    with pytest.raises(MissingExtra, match=f"transformers 4.57.1 is older than {oldest}: run pip install"):
        importlib.import_module("nanochat_gka.hf")
    libraries = {"transformers", "tokenizers", "peft", "accelerate"}
    files = [
        path for path in (ROOT / "nanochat_gka").rglob("*.py") if libraries & {n.split(".")[0] for n in imports(path)}
    ]
    folders = {str(path.relative_to(ROOT / "nanochat_gka").parent) for path in files}
    assert folders == {"hf", "core_metric"}
