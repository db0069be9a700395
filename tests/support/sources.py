"""The project's own files: which are tracked, what their code imports, and which words their pages contain."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gka", "trainkit_gka", "nanochat_gka", "deit_gka", "runs")
ENTRY_POINT = '\nif __name__ == "__main__":\n'
GENERATED = re.compile(r"<!-- (table|study|printed):.*?<!-- /\1 -->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```[^\S\n]*$", re.MULTILINE | re.DOTALL)


def page_blocks(path, language):
    """The fenced blocks of a page in one language, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def tracked(*suffixes):
    """The tracked files that exist, relative to the root, with one of the suffixes, if any are given."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in sorted(filter(None, listing.split("\0")))]
    return [path for path in paths if (ROOT / path).is_file() and (not suffixes or path.suffix in suffixes)]


def imports(path):
    """Absolute names that a file imports, at its top or in a function: `from a import b` is a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules():
    """Name -> path of every module of our packages."""
    paths = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def flags_of(package):
    """Module -> the dataclass of its flags, for every command on top of a package."""
    commands = {}
    for name, path in modules().items():
        flags = re.search(r"\brun\(main, (\w+)\)", path.read_text()) if path.parent == ROOT / package else None
        commands |= {name: getattr(importlib.import_module(name), flags[1])} if flags else {}
    return commands


def dependencies(path, names):
    """Which of the modules `names` a file imports."""
    for name in imports(path):
        package = name.rpartition(".")[0]
        if name in names or package in names:
            yield name if name in names else package
