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


def begin(folder, output: Path, **variables) -> processes.Running:
    """Start a process that looks for the kernel, with the cache `folder`; it notes what it says in `output`."""
    environ = {name: value for name, value in os.environ.items() if name not in ("CXX", build.SWITCH)}
    places = {"PYTHONPATH": str(ROOT), build.FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    # None: a variable is not set.
    return processes.start("ask_cpu_kernel", folder=output, env={build.SWITCH: None, **environ, **places, **variables})


def ask(folder, **variables):
    """Two lines of what a process does that has not looked for the kernel yet, and what it says."""
    with tempfile.TemporaryDirectory() as output:
        done = begin(folder, Path(output), **variables).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def wrapper(folder, text: str):
    """A compiler that is a shell script; REAL is the real one."""
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + text.replace("REAL", str(COMPILER)))
    path.chmod(0o755)
    return str(path)


def copier(folder, first: str = ""):
    """A compiler that copies the finished library in place of compiling, which takes seconds. It runs `first` first."""
    version = 'case "$*" in *--version*) exec REAL "$@";; esac'
    return wrapper(folder, f'{first}\n{version}\nfor output; do :; done\ncp {build.library()._name} "$output"\n')
