"""A signal ends what takes long within seconds, and the same command goes on: evaluations, CORE, samples, packing."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import processes
import tiny
import tiny_core
from gpt_runs import MODULE, final, flags
from nanochat_gka.generation.engine import Engine
from nanochat_gka.train import TrainConfig, main
from trainkit_gka.cli import run
from trainkit_gka.progress import read_events

STEPS, IN_TIME = 8, 10
LONG = ["--num-iterations", STEPS, "--eval-every", 4, "--save-every", -1]
LONG += ["--eval-tokens", 10**6, "--device-batch-size", 1]  # a second or two for each evaluation


def events(out, event):
    return [record["step"] for record in read_events(out / "run/log.jsonl", event)]


def bpb(out):
    return [
        (record["step"], record["val_bpb"], record["train_bpb"])
        for record in read_events(out / "run/log.jsonl", "eval")
    ]


def wait_until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def stop_at(step: int, out, process) -> subprocess.CompletedProcess:
    """Send SIGTERM while the evaluation of `step` runs: after the checkpoint, which comes right before."""
    wait_until(lambda: (out / f"run/checkpoints/step_{step:08d}/manifest.json").exists() or not process.alive())
    os.kill(process.processes[-1].pid, signal.SIGTERM)  # one rank is enough
    began = time.monotonic()
    done = process.wait()
    assert time.monotonic() - began < IN_TIME
    return done


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_in_training_ends_at_once_and_is_made_again(packed, tmp_path, ranks):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny.call(MODULE, *flags(packed, whole, *LONG), ranks=ranks)
    process = processes.start(MODULE, *flags(packed, parts, *LONG), ranks=ranks, folder=tmp_path / "output")
    done = stop_at(4, parts, process)
    assert done.returncode == 0 and f"stopped at step 4 of {STEPS}, saved; continue with: " in done.stdout, done.stderr
    assert events(parts, "eval") == [0] and not done.stderr
    tiny.call(MODULE, *flags(packed, parts, *LONG), ranks=ranks)
    assert events(parts, "eval") == [0, 4, 8] and events(parts, "train") == [*range(1, STEPS + 1)]
    assert bpb(parts) == bpb(whole) and final(parts, STEPS) == final(whole, STEPS)


def test_an_evaluation_under_torchrun_ends_at_once(packed, tmp_path):
    process = tiny.start(MODULE, *flags(packed, tmp_path, *LONG), ranks=2)
    wait_until((tmp_path / "run/checkpoints/step_00000004/manifest.json").exists)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=tiny.HANG_AFTER)
    assert time.monotonic() - began < IN_TIME and process.returncode == 0, output
    assert f"stopped at step 4 of {STEPS}, saved; continue with: " in output and "Traceback" not in output
    assert events(tmp_path, "eval") == [0]


def test_samples_in_training_end_at_once_and_are_written_again(packed, tmp_path, monkeypatch, capsys):
    stream = Engine.stream

    def interrupted(self, *asked):
        for number, piece in enumerate(stream(self, *asked)):
            if number == 9:
                os.kill(os.getpid(), signal.SIGTERM)
            assert number < 10
            yield piece

    words = list(map(str, flags(packed, tmp_path, "--num-iterations", 4, "--sample-every", 2)))
    with processes.signals_kept():
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "stream", interrupted)
            run(main, TrainConfig, words)
        assert "stopped at step 2 of 4, saved" in capsys.readouterr().out and events(tmp_path, "sample") == []
        run(main, TrainConfig, words)
    assert events(tmp_path, "sample") == [2, 4]


# --- Commands that stand alone ---


def stop_alone(module, *words, line: str = "", until=None) -> str:
    """Start a command, send it SIGTERM when it has printed `line` or `until` holds; its output."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        tiny.command(module, *words), stdout=pipe, stderr=pipe, text=True, env=processes.environment()
    )
    output = ""
    while line not in output:
        output += (read := process.stdout.readline())
        assert read, process.stderr.read()
    if until:
        wait_until(lambda: until() or process.poll() is not None)
    started = processes.descendants(process.pid)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=tiny.HANG_AFTER)
    assert time.monotonic() - began < IN_TIME
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert errors.splitlines()[-1] == "stopped by SIGTERM" and "Traceback" not in errors, errors
    assert not processes.still_there(started)
    return output + rest


def half_written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".tmp")]


def test_an_evaluation_ends_at_once_and_records_nothing(trained, packed, tmp_path):
    words = ["--run", trained[0], "--data", packed / "packed", "--device-type", "cpu", "--device-batch-size", 1]
    words += ["--eval", "bpb", "--split-tokens", -1, "--results", tmp_path / "results.jsonl"]
    output = stop_alone("nanochat_gka.evaluate", *words, line="tiny-run: ")
    assert "val bpb" not in output and not (tmp_path / "results.jsonl").exists()


def test_core_ends_at_once_and_keeps_the_finished_tasks(trained, tmp_path):
    bundle = tiny_core.write_bundle(tmp_path / "bundle")
    for label in ("arc_easy", "winograd"):
        path = bundle / "eval_data" / tiny_core.TASKS[label][0]
        path.write_text(path.read_text() * 200)
    words = ["--run", trained[0], "--bundle", bundle, "--out", tmp_path / "core", "--device-type", "cpu"]
    output = stop_alone("nanochat_gka.eval_core", *words, line="[1/5] copa: accuracy")
    lines = [json.loads(line) for line in next((tmp_path / "core").glob("*.jsonl")).read_text().splitlines()]
    assert "arc_easy" not in output and len(lines) == 1 and not half_written(tmp_path)


def test_sampling_ends_at_once(trained):
    words = ["--run", trained[0], "--device-type", "cpu", "--prompt", "the kernel", "--num-samples", 100000]
    assert stop_alone("nanochat_gka.generate", *words, "--stream", line="the kernel").startswith("the kernel")


@pytest.mark.parametrize("moment", ["packing", "the tokenizer"])
def test_preparing_text_ends_at_once(tmp_path, moment):
    corpus, out = tiny.write_corpus(tmp_path / "corpus", docs=20000, row_group=500), tmp_path / "out"
    if moment == "the tokenizer":
        words = ["--corpus", corpus, "--out", out, "--vocab-size", 8192]
        stop_alone("nanochat_gka.tokenizer", *words, until=(out / "train.json").exists)
        assert not (out / "tokenizer.json").exists()
        return
    tiny.call("nanochat_gka.tokenizer", "--corpus", corpus, "--out", tmp_path / "tokenizer", "--vocab-size", 300)
    words = ["--corpus", corpus, "--tokenizer", tmp_path / "tokenizer", "--out", out, "--sequence-len", 32]
    stop_alone("nanochat_gka.pack", *words, "--workers", 2, until=lambda: [*out.glob("train_*.json")])
    assert not (out / "manifest.json").exists()
    done = tiny.call("nanochat_gka.pack", *words, "--workers", 1)
    assert "units were packed before" in done.stdout and not half_written(out)
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "tokenizer", whole)
    tiny.call("nanochat_gka.pack", *words[:4], "--out", whole, *words[6:], "--workers", 1)
    assert {p.name: p.read_bytes() for p in out.glob("*.bin")} == {p.name: p.read_bytes() for p in whole.glob("*.bin")}
