"""The installed package: its commands run the modules that they name, and a missing extra is one line."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from sources import ENTRY_POINT, ROOT
from trainkit_gka.console import GROUP, main
from trainkit_gka.extras import MissingExtra, require_version

COMMANDS = {command.name: command.value for command in entry_points(group=GROUP)}


def test_every_script_names_a_module_that_is_a_command():
    scripts = {script.name for script in entry_points(group="console_scripts") if script.name.startswith("gka-")}
    assert scripts == set(COMMANDS) and len(scripts) > 5
    for module in COMMANDS.values():
        assert ENTRY_POINT in (ROOT / Path(*module.split("."))).with_suffix(".py").read_text(), module


def test_a_script_names_itself_where_a_run_is_continued(tmp_path):
    """As a console script starts, up to the module, which here prints its command."""
    (tmp_path / "prints").mkdir()
    (tmp_path / "prints/it.py").write_text("from trainkit_gka.command import command_line\nprint(command_line())\n")
    (script := tmp_path / "gka-pack").write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "from importlib.metadata import EntryPoint\nfrom trainkit_gka import console\n"
        "console.entry_points = lambda **_: [EntryPoint('gka-pack', 'prints.it', console.GROUP)]\nconsole.main()\n"
    )
    script.chmod(0o755)
    for typed, folder, more in (("gka-pack", ROOT, f"{tmp_path}:"), ("./gka-pack", tmp_path, ""), (script, ROOT, "")):
        words, env = f"{typed} --out 'two words'", {**os.environ, "PATH": f"{more}{os.environ['PATH']}"}
        done = subprocess.run(words, shell=True, capture_output=True, text=True, cwd=folder, env=env)
        assert done.stdout == f"{words}\n", done


def test_a_missing_extra_is_one_line(tmp_path, monkeypatch, capsys):
    """Of a script, with exit code 2, and of `python -m`, where Python prints the error."""
    (tmp_path / "needs_more").mkdir()
    package = "from trainkit_gka.extras import require\nrequire(__name__, 'lm', 'os', 'a_module_that_nobody_has')\n"
    (tmp_path / "needs_more/__init__.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    command = EntryPoint("gka-pack", "needs_more.pack", GROUP)
    monkeypatch.setattr("trainkit_gka.console.entry_points", lambda **_: [command])
    with pytest.raises(SystemExit) as end:
        main()
    words = [sys.executable, "-m", "needs_more.pack"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert (end.value.code, done.returncode) == (2, 1)
    for message in (capsys.readouterr().err, done.stderr):
        assert message.count("\n") == 1 and "a_module_that_nobody_has" in message and '"gka[lm]"' in message


def test_an_older_version_is_named(monkeypatch):
    versions = iter(["5.23.0.dev1", "10.0", "5.9.1"])
    monkeypatch.setattr("importlib.metadata.version", lambda name: next(versions))
    for _ in range(2):
        require_version(__name__, "hf", "transformers", "5.23")
    with pytest.raises(MissingExtra, match=r"transformers 5\.9\.1 is older than 5\.23"):
        require_version(__name__, "hf", "transformers", "5.23")
