"""The demo: its commands side by side, how they end, and the length that a slow machine gets."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tyro

from nanochat_gka.model.config import ModelFlags
from runs.demo import __main__ as demo
from runs.demo import language, vision
from runs.jobs import Job, SideBySide
from sources import ROOT

TRAINER = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("training", flush=True)
time.sleep(60)
"""
DEMO = """
import sys
from pathlib import Path
from runs.jobs import Job, SideBySide, run
from trainkit_gka.cli import run as command

words = ["-n", "1", "-r", "1", sys.argv[1]]
folder = Path(sys.argv[2])
jobs = [Job(name, "timeit", words, folder / name, 1) for name in "ab"]
commands = {"one": lambda: [run("timeit", words) for _ in range(2)]}
commands["several"] = lambda: SideBySide(jobs, 1).run()
command(lambda config: commands[sys.argv[3]](), dict, [])
"""


@pytest.mark.parametrize("which, number", [("one", signal.SIGHUP), ("several", signal.SIGTERM)])
def test_a_signal_ends_a_sequence_of_commands_after_they_have_saved(which, number, tmp_path):
    words = [sys.executable, "-c", DEMO, TRAINER, tmp_path, which]
    output = tmp_path / ("a/output.txt" if which == "several" else "printed")
    with subprocess.Popen(words, cwd=ROOT, stdout=open(tmp_path / "printed", "w"), stderr=subprocess.PIPE) as process:
        while not output.exists() or "training\n" not in output.read_text():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == 128 + number
    assert output.read_text().count("training\n") == output.read_text().count("saved\n") == 1
    assert not (tmp_path / "b").exists()


def job(folder, name, code):
    return Job(name, "timeit", ["-n", 1, "-r", 1, code], folder, steps=1)


def test_a_failing_command_ends_all_with_its_last_line_and_code(tmp_path, capfd):
    """It fails once the other has started, which shows that they run side by side."""
    here = f"import os, pathlib, sys, time; there = pathlib.Path({str(tmp_path / 'there')!r}); "
    fails = here + "\nwhile not there.exists(): time.sleep(0.01)\nprint('error: it failed', flush=True); os._exit(2)"
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails/output.txt").write_text("error: of an earlier start\n")
    jobs = [job(tmp_path / "fails", "fails", fails)]
    jobs += [job(tmp_path / "sleeps", "sleeps", here + "there.touch(); time.sleep(600)")]
    with pytest.raises(SystemExit) as stopped:
        SideBySide(jobs, 2).run()
    assert stopped.value.code == 2 and jobs[1].process.poll() is not None
    assert capfd.readouterr().err.startswith("error: it failed\n")


def test_the_papers_form_is_trained_beside_ours():
    forms = {name: tyro.cli(ModelFlags, args=variant.flags) for name, variant in language.VARIANTS.items()}
    assert (forms["gka-paper"].gka_values, forms["gka-paper"].head_offsets) == ("rotated", "")
    assert (forms["gka-offsets"].gka_values, forms["gka-offsets"].head_offsets) == ("unrotated", "PS")


@pytest.mark.parametrize("slower, steps, epochs", [(0.5, 400, 50), (2, 80, 10), (50, 40, 5)])
def test_a_slow_machine_gets_fewer_steps_and_keeps_them(tmp_path, monkeypatch, slower, steps, epochs):
    pace = {"tokens_per_second": language.STEP_TOKENS / (language.SECONDS_PER_STEP * slower)}
    timed = SimpleNamespace(finish=lambda: pace)
    monkeypatch.setattr(language, "timing_jobs", lambda *_: [timed])
    monkeypatch.setattr(SideBySide, "run", lambda self: (tmp_path / "timing").mkdir())
    monkeypatch.setattr(vision, "MODELS", 6)
    chosen = demo.choose_length(tmp_path, language.DEPTH, 1, 2, ["language", "vision"])
    assert chosen == (steps, epochs)
    monkeypatch.setattr(language, "timing_jobs", lambda *_: pytest.fail("timed again"))
    assert demo.choose_length(tmp_path, language.DEPTH, 1, 2, ["language", "vision"]) == chosen
    fixed = demo.DemoConfig(out=tmp_path, steps=30, epochs=2)
    assert demo.lengths(fixed, 2) == (30, 2)
