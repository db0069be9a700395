"""The wheel: the operator imports where torch alone is installed, and its types travel with it."""

import contextlib
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Imports every module of the wheel; beside the standard library only the given top-level packages are found.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys

wheel, *allowed = sys.argv[1:]
allowed = {"gka", *allowed, *sys.stdlib_module_names}

class NothingElse:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in allowed and not package.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"{name} is not one of torch's requirements", name=name)

sys.meta_path.insert(0, NothingElse())
sys.path.insert(0, wheel)
import gka

assert gka.__file__.startswith(wheel), gka.__file__
needs_triton = set() if "triton" in allowed else {"launch", "forward", "backward", "head", "tiles"}
for module in pkgutil.walk_packages(gka.__path__, "gka."):
    if module.name.rpartition(".")[2] not in needs_triton:
        importlib.import_module(module.name)
        print(module.name)
"""


def packages_of(distribution: str) -> set[str]:
    """The top-level packages of a distribution and of everything it requires, as far as they are installed."""
    found, waiting = set(), [distribution]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                needed = [text for text in metadata.requires(name) or [] if "extra ==" not in text]
                waiting += [normalised(re.match(r"[\w.-]+", text)[0]) for text in needed]
    owners = metadata.packages_distributions()
    return {package for package, names in owners.items() if found & {normalised(name) for name in names}}


def normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The built wheel, unpacked; without the network."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "gka"):
        (source / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=out)
    (path,) = out.glob("gka-*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(out / "unpacked")
    return out / "unpacked"


def test_every_module_imports_with_torch_alone(wheel, tmp_path):
    allowed = packages_of("torch") | packages_of("triton")
    assert "torch" in allowed and not allowed & {"numpy", "timm", "tyro", "safetensors"}
    command = [sys.executable, "-P", "-c", IMPORT_ALL, wheel, *sorted(allowed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    modules = {path.relative_to(ROOT).with_suffix("") for path in (ROOT / "gka").rglob("*.py")}
    expected = {".".join(path.parts).removesuffix(".__init__") for path in modules} - {"gka"}
    skipped = expected - set(done.stdout.split())
    assert not skipped or "triton" not in allowed, skipped


def test_the_wheel_carries_types_and_the_kernel_and_no_tests(wheel):
    assert (wheel / "gka/py.typed").exists()
    sources = {path.name for path in (ROOT / "gka/impl/cpu/source").iterdir()}
    assert {"request.h", "forward.cpp"} <= sources
    assert {path.name for path in (wheel / "gka/impl/cpu/source").iterdir()} == sources
    assert not list(wheel.rglob("test_*.py"))
