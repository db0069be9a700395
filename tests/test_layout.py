"""The arrows between packages, rooms and files.

runs -> nanochat_gka | deit_gka -> trainkit_gka, gka; gka and trainkit_gka do not know each other, and the trainers
never meet.
"""

import ast
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
MODULES = modules()
NEEDED_BY = {name: {*dependencies(path, MODULES)} - {name} for name, path in MODULES.items()}


def packages_of(package):
    """Path -> the packages that a file of `package` imports."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {path: {name.split(".")[0] for name in imports(path)} for path in paths}


def assert_one_way(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_follow_the_arrows(package):
    foreign = set(PACKAGES) - ALLOWED[package]
    assert not {path: wrong for path, names in packages_of(package).items() if (wrong := names & foreign)}


def test_the_operator_imports_torch_alone():
    """Triton belongs to its folder, transformers to its file, in a function."""
    for path, names in packages_of("gka").items():
        optional = {"triton": {"triton"}, "gka": {"transformers"} if path.name == "huggingface.py" else set()}
        assert names <= sys.stdlib_module_names | {"gka", "torch"} | optional.get(path.parent.name, set()), path


def test_implementations_do_not_import_one_another():
    """An implementation is a file or a folder of gka/impl."""
    parts = {name: ".".join(name.split(".")[:3]) for name in MODULES if name.startswith("gka.impl.")}
    assert not [f"{a} imports {b}" for a in parts for b in NEEDED_BY[a] if parts.get(b, parts[a]) != parts[a]]


def test_files_do_not_import_each_other_in_a_circle():
    """Imports inside functions count: a circle that is hidden there is still one."""
    assert_one_way(NEEDED_BY)


@pytest.mark.parametrize("package", ["nanochat_gka", "deit_gka", "runs"])
def test_rooms_import_one_way_and_no_commands(package):
    """A room is a folder in a package, with what is below it, or a file beside the rooms: a command, if it is one."""
    graph = {}
    commands = {f"{package}.{path.stem}" for path in (ROOT / package).glob("*.py") if ENTRY_POINT in path.read_text()}
    for name in [name for name in MODULES if name.startswith(f"{package}.")]:
        room, *rooms = (".".join(one.split(".")[:2]) for one in (name, *NEEDED_BY[name]))
        graph.setdefault(room, set()).update(one for one in rooms if one != room and one.startswith(f"{package}."))
        assert MODULES[name].parent == ROOT / package or not NEEDED_BY[name] & commands, name
    assert_one_way(graph)


def test_text_is_read_and_written_as_utf8_in_any_locale():
    """Every call that opens a file of text names the encoding, or passes options on."""
    for path in (path for path in tracked(".py") if path.parts[0] != "tests"):
        for call in [node for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]:
            name = ast.unparse(call.func)
            strings = [one.value for one in ast.walk(call) if isinstance(one, ast.Constant) and type(one.value) is str]
            is_text = name in ("open", "os.fdopen") and not any("b" in mode for mode in strings[-2:])
            if is_text or name.endswith((".read_text", ".write_text", "TextIOWrapper")):
                assert {"encoding", None} & {one.arg for one in call.keywords}, f"{path}:{call.lineno}"


def test_importing_the_operator_loads_nothing_of_the_trainers():
    """`import gka` works for an engineer who installed torch alone."""
    optional = ("tyro", "rich", "pyarrow", "tiktoken", "rustbpe", "matplotlib", "wandb", "huggingface_hub", "triton")
    code = f"import sys, gka; print([name for name in {(*optional, 'transformers')} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
