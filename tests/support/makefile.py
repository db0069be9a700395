"""The Makefile in a copy of what it needs, and in place of the environment's Python a script that notes its calls."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from sources import ROOT

TEXT = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z][a-z0-9-]*):.*  ## ", TEXT, re.MULTILINE)
SETTINGS = re.search(r"^SETTINGS := ((?:.*\\\n)*.*)$", TEXT, re.MULTILINE)[1].replace("\\\n", " ").split()
FILES = ("Makefile", "requirements.txt", "pyproject.toml", "runs/check.py", "trainkit_gka/gpus.py", "patches/apply.py")
NOT_INHERITED = re.compile(f"MAKE.*|MFLAGS|CUDA_VISIBLE_DEVICES|PYTHONPATH|{'|'.join(SETTINGS)}")


class Tree:
    """A folder where make runs. settings: by name, for every call."""

    def __init__(self, folder: Path, **settings: str):
        self.folder, self.settings = folder, settings
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.environment = {name: os.environ[name] for name in os.environ if not NOT_INHERITED.fullmatch(name)}

    def command(self, *words: str, **settings: str) -> list[str]:
        assigned = [f"{name}={value}" for name, value in {**self.settings, **settings}.items()]
        return ["make", "-C", str(self.folder), "--no-print-directory", *words, *assigned]

    def make(self, *words: str, **settings: str) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(*words, **settings), capture_output=True, text=True, env=self.environment)

    def record(self, script: str = "") -> None:
        """Make ENV_PYTHON a script that notes the words of each call, and then runs `script`."""
        python = self.folder / "my env/python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" \'\n\' >> calls\n{script}\n')
        python.chmod(0o755)
        self.settings["ENV_PYTHON"] = str(python)

    def calls(self) -> list[list[str]]:
        """The words of the calls so far, from the module on."""
        file = self.folder / "calls"
        text = file.read_text() if file.exists() else ""
        return [call.strip("\0").split("\0")[1:] for call in text.split("\0\n")[:-1]]

    def lines(self, target: str, **settings: str) -> list[list[str]]:
        """The words of the commands that `make -n` shows, from the module on."""
        done = self.make("-n", target, **settings)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.replace("\\\n", " ").splitlines()
        return [shlex.split(line)[2:] for line in lines if " -m " in line and "runs.check" not in line]
