"""Processes that look for the CPU kernel, with a cache folder and a compiler of their own."""

import os
import tempfile
from pathlib import Path

import pytest

import processes
from gka.impl.cpu import build
from sources import ROOT

COMPILER = next((path for path in map(build.shutil.which, build.COMPILERS) if path), None)
needs_compiler = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


def environment(folder, **variables) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", build.SWITCH)}
    return {**kept, "PYTHONPATH": str(ROOT), build.FOLDER: str(folder), "OMP_NUM_THREADS": "1", **variables}


def ask(folder, **variables):
    """Two lines of what a process does that has not looked for the kernel yet, and what it says."""
    variables = {build.SWITCH: None, **environment(folder, **variables)}  # None: it is not set
    with tempfile.TemporaryDirectory() as output:
        done = processes.call("ask_cpu_kernel", folder=Path(output), env=variables)
    return done.stdout.splitlines(), done.stderr


def wrapper(folder, text: str):
    """A compiler that is a shell script; REAL is the real one."""
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + text.replace("REAL", str(COMPILER)))
    path.chmod(0o755)
    return str(path)
