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
from gpt_runs import events, final
from nanochat_gka.generation.engine import Engine
from nanochat_gka.training import bits_per_byte

IN_TIME = 10


def test_an_evaluation_in_training_ends_at_once_and_is_made_again(packed, tmp_path, monkeypatch, capsys):
    """The signal comes in the evaluation of step 4, whose weights are saved right before it."""
    words = ["--num-iterations", 8, "--eval-every", 4, "--save-every", -1, "--eval-tokens", 320]
    words += ["--device-batch-size", 1]  # an evaluation is 2 splits of 10 batches
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    gpt_runs.train(packed, whole, *words)
    batches, measure = [], bits_per_byte.nats_and_bytes

    def interrupted(*asked):
        batches.append(asked)
        if len(batches) == 25:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(*asked)

    with monkeypatch.context() as patched:
        patched.setattr(bits_per_byte, "nats_and_bytes", interrupted)
        assert gpt_runs.train(packed, parts, *words) == 0
    assert len(batches) < 28 and "stopped at step 4 of 8, saved; continue with: " in capsys.readouterr().out
    assert [record["step"] for record in events(parts, "eval")] == [0]
    gpt_runs.train(packed, parts, *words)
    kept = ("step", "val_bpb", "train_bpb")
    found = [[[record[key] for key in kept] for record in events(out, "eval")] for out in (parts, whole)]
    assert found[0] == found[1] and [step for step, *_ in found[0]] == [0, 4, 8]
    assert final(parts, 8) == final(whole, 8)


def test_samples_in_training_end_at_once_and_are_written_again(packed, tmp_path, monkeypatch, capsys):
    stream, words = Engine.stream, ["--num-iterations", 4, "--sample-every", 2]

    def interrupted(self, *asked):
        for number, piece in enumerate(stream(self, *asked)):
            if number == 9:
                os.kill(os.getpid(), signal.SIGTERM)
            assert number < 10
            yield piece

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "stream", interrupted)
        gpt_runs.train(packed, tmp_path, *words)
    assert "stopped at step 2 of 4, saved" in capsys.readouterr().out and events(tmp_path, "sample") == []
    gpt_runs.train(packed, tmp_path, *words)
    assert [record["step"] for record in events(tmp_path, "sample")] == [2, 4]


# Commands that stand alone


def wait_until(condition) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


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
