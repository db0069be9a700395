"""Language runs that are killed, stopped or older go on where they were, to the bit."""

import json
import os
import random
import shutil
import signal
import time

import pytest

import gpt_runs
import processes
import tiny
from gpt_runs import MODULE, STEPS, events, final, flags, log_steps
from nanochat_gka import pack
from nanochat_gka.model.checkpoints import load
from tiny_pack import config, rewrite_json
from trainkit_gka import checkpoint
from trainkit_gka.distributed import Runtime
from trainkit_gka.files import sha256


def test_killed_run_resumes_bit_identical(packed, uninterrupted, tmp_path):
    rng = random.Random(7)
    for kill_at in sorted(rng.sample(range(5, STEPS - 5), 2)):
        process = processes.start(MODULE, *flags(packed, tmp_path), folder=tmp_path / "output")
        while process.alive() and (log_steps(tmp_path) or [0])[-1] < kill_at:
            time.sleep(0.002)
        process.kill()
        assert process.processes[0].exitcode == -signal.SIGKILL
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert "resuming at step" in done.stdout
    assert final(tmp_path) == final(uninterrupted)
    assert log_steps(tmp_path) == list(range(1, STEPS + 1))


def test_killed_ranks_resume_bit_identical_and_as_one_process(packed, tmp_path):
    """Under torchrun; then one process goes on, which adds in another order."""
    common = ["--num-iterations", 24, "--save-every", 3]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tiny.call(MODULE, *flags(packed, whole, *common), ranks=2)
    process = tiny.start(MODULE, *flags(packed, killed, *common), ranks=2)
    while process.poll() is None and len(log_steps(killed)) < 10:
        time.sleep(0.002)
    tiny.kill_tree(process)
    reached = (log_steps(killed) or [0])[-1]
    assert reached < 24
    shutil.copytree(killed, tmp_path / "alone")
    tiny.call(MODULE, *flags(packed, killed, *common), ranks=2)
    assert final(killed, 24) == final(whole, 24)
    assert gpt_runs.train(packed, tmp_path / "alone", *common) == 0 and log_steps(tmp_path / "alone")[-1] == 24


def as_saved_before(folder, **said):
    """Make a run's checkpoint look as when normalised values were the default: it states `said` of the values."""
    at = checkpoint.load_newest(folder / "checkpoints").path
    state = json.loads((at / "state.json").read_text())
    for name in ("model_config", "train_config"):
        state[name].pop("gka_values", None)
        state[name].update(said)
    (at / "state.json").write_text(json.dumps(state))
    rewrite_json(at / "manifest.json", **{"state.json": sha256(at / "state.json")})


def test_older_run_keeps_its_form_or_names_the_flag(packed, tmp_path, capsys):
    """A run of normalised values, which it does not state, has the name that is the paper's form's today."""

    def train(until, *more):
        return gpt_runs.train(packed, tmp_path, "--attention", "gka", "--model-tag", "", "--stop-after", until, *more)

    own = ["--gka-values", "normalised", "--model-tag", "d2-gka"]
    assert train(2, *own) == 0
    as_saved_before(tmp_path / "d2-gka")
    assert load(tmp_path / "d2-gka").model.config.gka_values == "normalised"
    assert train(4) == 2
    error = capsys.readouterr().err
    assert f"--gka-values is rotated but the run in {tmp_path / 'd2-gka'} has normalised" in error
    assert "--model-tag d2-gka" in error
    assert train(4, *own) == 0
    assert load(tmp_path / "d2-gka").step == 4 and load(tmp_path / "d2-gka").model.config.gka_values == "normalised"
    assert train(2, *own[:2]) == 0 and (tmp_path / "d2-gka-normalised").is_dir()


def test_an_older_softmax_run_goes_on(packed, tmp_path, capsys):
    assert gpt_runs.train(packed, tmp_path, "--attention", "softmax", "--stop-after", 2) == 0
    as_saved_before(tmp_path / "run", gka_values="normalised")
    assert gpt_runs.train(packed, tmp_path, "--attention", "softmax", "--stop-after", 4) == 0
    assert "resuming at step 2" in capsys.readouterr().out and load(tmp_path / "run").step == 4


def test_rows_of_another_length_are_refused(packed, tmp_path, capsys):
    pack.main(config(packed, tmp_path / "longer", sequence_len=64))
    assert gpt_runs.train(packed, tmp_path, "--stop-after", 2) == 0
    assert gpt_runs.train(packed, tmp_path, "--data", tmp_path / "longer") == 2
    assert "was packed with another context length than the run in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "event, keys, more",
    [
        ("eval", ("val_bpb", "train_bpb"), ["--eval-every", 2, "--eval-tokens", 320, "--device-batch-size", 1]),
        ("sample", ("texts",), ["--sample-every", 2]),
    ],
)
def test_what_a_signal_ends_in_training_is_made_again(event, keys, more, packed, tmp_path, monkeypatch, capsys):
    """The signal comes after some batches or tokens at step 2, whose weights are saved right before it."""
    words, whole, parts = ["--num-iterations", 4, "--save-every", -1, *more], tmp_path / "whole", tmp_path / "parts"
    gpt_runs.train(packed, whole, *words)
    rounds, calls = Runtime.rounds, []

    def interrupted(runtime, items, stop):
        calls.append(items)
        for number, item in enumerate(rounds(runtime, items, stop)):
            if len(calls) == 3 and number == 4:  # step 0 evaluated both splits
                os.kill(os.getpid(), signal.SIGTERM)
            assert len(calls) < 3 or number < 5
            yield item

    with monkeypatch.context() as patched:
        patched.setattr(Runtime, "rounds", interrupted)
        assert gpt_runs.train(packed, parts, *words) == 0
    assert "stopped at step 2 of 4, saved; continue with: " in capsys.readouterr().out
    assert 2 not in [record["step"] for record in events(parts, event)] and load(parts / "run").step == 2
    gpt_runs.train(packed, parts, *words)
    records = [[[record[key] for key in ("step", *keys)] for record in events(out, event)] for out in (parts, whole)]
    assert records[0] == records[1] and [step for step, *_ in records[0]][-2:] == [2, 4]
    assert final(parts, 4) == final(whole, 4)
