"""Wheel and source archive hold what is tracked; the operator imports where torch alone is installed."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sources import ROOT, tracked

INSTALLED = {"gka", "trainkit_gka", "nanochat_gka", "deit_gka"}

ABSENT = ["numpy", "safetensors", "timm", "transformers", "tyro", "rich", "tqdm", "yaml", "scipy", "pandas", "PIL"]
IMPORT_ALL = f"""
import importlib, sys

sys.modules.update(dict.fromkeys({ABSENT}))
for name in sys.argv[2:]:
    importlib.import_module(name)
assert sys.modules["gka"].__file__.startswith(sys.argv[1])
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the tracked files: what a clone has."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone: what is tracked is compared with what is packed")
    copy = tmp_path_factory.mktemp("clone")
    for path in tracked():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, copy / path)
    return copy


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The built wheel, unpacked; without the network."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=out)
    (path,) = out.glob("gka-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(out / "unpacked")
    return out / "unpacked"


@pytest.mark.slow
def test_every_module_imports_with_torch_alone(wheel, tmp_path):
    """As if other packages were not installed. Triton comes with torch, or not."""
    modules = {path.relative_to(wheel).with_suffix("") for path in (wheel / "gka").rglob("*.py")}
    names = {".".join(path.parts).removesuffix(".__init__") for path in modules if "triton" not in path.parts}
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(wheel)}
    subprocess.run([sys.executable, "-BPc", IMPORT_ALL, wheel, *names], check=True, cwd=tmp_path, env=environ)


def test_the_wheel_holds_every_tracked_file_of_its_packages_and_no_other(wheel):
    files = {path.relative_to(wheel) for path in wheel.rglob("*") if path.is_file()}
    expected = {path for path in tracked() if path.parts[0] in INSTALLED}
    assert {path for path in files if not path.parts[0].endswith(".dist-info")} == expected
    assert {Path("gka/py.typed"), Path("gka/impl/cpu/source/forward.cpp"), Path("deit_gka/README.md")} <= expected


@pytest.mark.slow
def test_the_source_archive_holds_every_tracked_file(source, tmp_path):
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], check=True, capture_output=True, text=True, cwd=source)
    (path,) = tmp_path.glob("gka-*.tar.gz")
    with tarfile.open(path) as archive:
        files = {Path(*Path(member.name).parts[1:]) for member in archive if member.isfile()}
    assert set(tracked()) - files == set()
    made = {path for path in files - set(tracked()) if path.parts[0] != "gka.egg-info"}
    assert made == {Path("PKG-INFO"), Path("setup.cfg")}
