"""The arrows between packages: runs -> nanochat_gka | deit_gka -> gka; inside gka, attention and runtime do not meet."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "gka/attention": ("gka.runtime", "nanochat_gka", "deit_gka", "runs"),
    "gka/runtime": ("gka.attention", "nanochat_gka", "deit_gka", "runs"),
    "nanochat_gka": ("deit_gka", "runs", "gka.attention"),
    "deit_gka": ("nanochat_gka", "runs", "gka.attention"),
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", FORBIDDEN)
def test_arrows_never_turn_back(package):
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(FORBIDDEN[package]), f"{path.relative_to(ROOT)} imports {name}"


def test_implementations_do_not_import_one_another():
    """An implementation is a file, or several that share the first word of their names."""
    for path in (ROOT / "gka/attention/impl").glob("*.py"):
        others = [name for name in imports(path) if name.startswith("gka.attention.impl")]
        assert all("_" in path.stem and name.startswith(f"gka.attention.impl.{path.stem.split('_')[0]}_") for name in others), path.name


def test_importing_the_operator_needs_torch_alone():
    """`import gka` must work for an engineer who installed nothing of the trainers."""
    code = "import sys, gka; print([m for m in ('tyro', 'rich', 'pyarrow', 'tiktoken', 'rustbpe', 'matplotlib', 'wandb', 'huggingface_hub', 'triton') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
