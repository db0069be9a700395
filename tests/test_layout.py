"""The arrows between packages, rooms and files.

runs -> nanochat_gka | deit_gka -> trainkit_gka, gka; gka and trainkit_gka do not know each other, and the trainers
never meet.
"""

import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from sources import ENTRY_POINT, PACKAGES, ROOT, dependencies, imports, modules, tracked

ALLOWED = {
    "gka": {"gka"},
    "trainkit_gka": {"trainkit_gka"},
    "nanochat_gka": {"nanochat_gka", "trainkit_gka", "gka"},
    "deit_gka": {"deit_gka", "trainkit_gka", "gka"},
    "runs": set(PACKAGES),
}


def files(package):
    return sorted((ROOT / package).rglob("*.py"))


def entry_points(package):
    """The commands on top of a package: `python -m package.name`."""
    return {f"{package}.{path.stem}" for path in (ROOT / package).glob("*.py") if ENTRY_POINT in path.read_text()}


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_follow_the_arrows(package):
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in imports(path)
        if name.split(".")[0] in set(PACKAGES) - ALLOWED[package]
    ]
    assert not wrong


def test_the_operator_imports_torch_alone():
    """Triton belongs to its own folder, transformers to its file, in a function."""
    standard = sys.stdlib_module_names | {"gka", "torch"}
    wrong = []
    for path in files("gka"):
        allowed = standard | ({"triton"} if path.is_relative_to(ROOT / "gka/impl/triton") else set())
        allowed |= {"transformers"} if path == ROOT / "gka/huggingface.py" else set()
        wrong += [
            f"{path.relative_to(ROOT)} imports {name}" for name in imports(path) if name.split(".")[0] not in allowed
        ]
    assert not wrong


def test_implementations_do_not_import_one_another():
    """An implementation is a file or a folder of gka/impl."""
    names = modules()
    wrong = []
    for path in files("gka/impl"):
        ours = ".".join(path.relative_to(ROOT).with_suffix("").parts[:3])
        wrong += [
            f"{path.relative_to(ROOT)} imports {name}"
            for name in dependencies(path, names)
            if name.startswith("gka.impl.") and name != ours and not name.startswith(f"{ours}.")
        ]
    assert not wrong


@pytest.mark.parametrize("package", ["nanochat_gka", "deit_gka", "runs"])
def test_rooms_do_not_import_entry_points(package):
    names, commands = modules(), entry_points(package)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        if path.parent != ROOT / package
        for name in dependencies(path, names)
        if name in commands
    ]
    assert not wrong


def test_files_do_not_import_each_other_in_a_circle():
    """Imports inside functions count: a circle that is hidden there is still one."""
    names = modules()
    graph = {name: set(dependencies(path, names)) - {name} for name, path in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", ["nanochat_gka", "deit_gka", "runs"])
def test_rooms_import_one_way(package):
    """A room is a folder in a package, with what is below it; a file beside the rooms is one of its own."""
    names, graph = modules(), {}
    for name, path in names.items():
        if name.startswith(f"{package}."):
            rooms = {".".join(other.split(".")[:2]) for other in dependencies(path, names)}
            room = ".".join(name.split(".")[:2])
            graph.setdefault(room, set()).update(other for other in rooms - {room} if other.startswith(f"{package}."))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_tests_do_not_import_tests():
    """What tests share is in tests/support."""
    paths = [path for path in tracked(".py") if path.parts[0] == "tests"]
    wrong = [path for path in paths for name in imports(ROOT / path) if re.search(r"(^|\.)test_", name)]
    assert not wrong


def test_importing_the_operator_loads_nothing_of_the_trainers():
    """`import gka` works for an engineer who installed torch alone."""
    optional = ("tyro", "rich", "pyarrow", "tiktoken", "rustbpe", "matplotlib", "wandb", "huggingface_hub", "triton")
    optional += ("transformers",)
    code = f"import sys, gka; print([name for name in {optional} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
