"""The arrows between packages: runs -> nanochat_gka | deit_gka -> trainkit, gka; gka and trainkit do not know each other."""

import subprocess
import sys

import pytest

from sources import ROOT, imports

FORBIDDEN = {
    "gka": ("trainkit", "nanochat_gka", "deit_gka", "runs"),
    "trainkit": ("gka", "nanochat_gka", "deit_gka", "runs"),
    "nanochat_gka": ("deit_gka", "runs"),
    "deit_gka": ("nanochat_gka", "runs"),
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_arrows_never_turn_back(package):
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(FORBIDDEN[package]), f"{path.relative_to(ROOT)} imports {name}"


def test_implementations_do_not_import_one_another():
    """An implementation is a file or a folder of gka/impl."""
    for path in (ROOT / "gka/impl").rglob("*.py"):
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts[:3])
        others = [name for name in imports(path) if name.startswith("gka.impl") and not name.startswith(own)]
        assert not others, path


def test_importing_the_operator_needs_torch_alone():
    """`import gka` must work for an engineer who installed nothing of the trainers."""
    code = "import sys, gka; print([m for m in ('tyro', 'rich', 'pyarrow', 'tiktoken', 'rustbpe', 'matplotlib', 'wandb', 'huggingface_hub', 'triton') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
