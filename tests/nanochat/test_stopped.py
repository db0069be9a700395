"""A signal ends what takes long within seconds, and the same command goes on."""

import json
import os
import signal
import subprocess
import time

import gpt_runs
import processes
import tiny
import tiny_core
from gpt_runs import MODULE, final, flags

STEPS, IN_TIME = 8, 10
LONG = ["--num-iterations", STEPS, "--eval-every", 4, "--save-every", -1]
LONG += ["--eval-tokens", 10**6, "--device-batch-size", 1]  # a second or two for each evaluation


def steps(out, event):
    return [record["step"] for record in gpt_runs.events(out, event)]


def wait_until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_an_evaluation_in_training_ends_at_once_and_is_made_again(packed, tmp_path):
    """Of two ranks, one of which gets the signal after the checkpoint, which comes right before the evaluation."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny.call(MODULE, *flags(packed, whole, *LONG), ranks=2)
    process = processes.start(MODULE, *flags(packed, parts, *LONG), ranks=2, folder=tmp_path / "output")
    saved = parts / "run/checkpoints/step_00000004/manifest.json"
    wait_until(lambda: saved.exists() or not process.alive())
    os.kill(process.processes[-1].pid, signal.SIGTERM)
    began = time.monotonic()
    done = process.wait()
    assert time.monotonic() - began < IN_TIME
    assert done.returncode == 0 and f"stopped at step 4 of {STEPS}, saved; continue with: " in done.stdout, done.stderr
    assert steps(parts, "eval") == [0] and not done.stderr
    tiny.call(MODULE, *flags(packed, parts, *LONG), ranks=2)
    assert steps(parts, "eval") == [0, 4, 8] and steps(parts, "train") == [*range(1, STEPS + 1)]
    bits = [
        [(record["val_bpb"], record["train_bpb"]) for record in gpt_runs.events(out, "eval")] for out in (parts, whole)
    ]
    assert bits[0] == bits[1] and final(parts, STEPS) == final(whole, STEPS)


# Commands that stand alone


def stop_alone(module, *words, line: str = "", until=None) -> str:
    """Start a command, send it SIGTERM when it has printed `line` or `until` holds; its output."""
    pipe = subprocess.PIPE
    command, environment = tiny.command(module, *words), processes.environment()
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    output = ""
    while line not in output:
        output += (read := process.stdout.readline())
        assert read, process.stderr.read()
    if until:
        wait_until(lambda: until() or process.poll() is not None)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=tiny.HANG_AFTER)
    assert time.monotonic() - began < IN_TIME
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert errors.splitlines()[-1] == "stopped by SIGTERM" and "Traceback" not in errors, errors
    return output + rest


def test_core_ends_at_once_and_keeps_the_finished_tasks(trained, tmp_path):
    bundle = tiny_core.write_bundle(tmp_path / "bundle")
    path = bundle / "eval_data" / tiny_core.TASKS["arc_easy"][0]
    path.write_text(path.read_text() * 400)
    words = ["--run", trained[0], "--bundle", bundle, "--out", tmp_path / "core", "--device-type", "cpu"]
    output = stop_alone("nanochat_gka.eval_core", *words, line="[1/5] copa: accuracy")
    lines = [json.loads(line) for line in next((tmp_path / "core").glob("*.jsonl")).read_text().splitlines()]
    assert "arc_easy" not in output and len(lines) == 1


def test_training_a_tokenizer_ends_at_once(tmp_path):
    corpus, out = tiny.write_corpus(tmp_path / "corpus", docs=20000, row_group=500), tmp_path / "out"
    words = ["--corpus", corpus, "--out", out, "--vocab-size", 8192]
    stop_alone("nanochat_gka.tokenizer", *words, until=(out / "train.json").exists)
    assert not (out / "tokenizer.json").exists()
