"""Language runs that are killed, stopped, damaged or older go on where they were, to the bit."""

import json
import random
import shutil
import signal
import time

import pytest

import processes
import tiny
from gpt_runs import MODULE, STEPS, final, flags, log_steps
from nanochat_gka.model.checkpoints import load
from nanochat_gka.train import TrainConfig, main
from trainkit_gka import checkpoint
from trainkit_gka.cli import run
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


def test_killed_ranks_resume_bit_identical(packed, tmp_path):
    common = ["--num-iterations", 24, "--save-every", 3]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tiny.call(MODULE, *flags(packed, whole, *common), ranks=2)
    process = tiny.start(MODULE, *flags(packed, killed, *common), ranks=2)
    while process.poll() is None and len(log_steps(killed)) < 10:
        time.sleep(0.002)
    tiny.kill_tree(process)
    assert (log_steps(killed) or [0])[-1] < 24
    tiny.call(MODULE, *flags(packed, killed, *common), ranks=2)
    assert final(killed, 24) == final(whole, 24)


def test_kill_before_the_result_loses_nothing(packed, uninterrupted, tmp_path):
    """As if killed before the final evaluation: its line, the finish line and the result are missing."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_text().splitlines()
    ends = [line for line in lines if json.loads(line)["step"] == STEPS]
    cut = [line for line in lines if line not in ends or json.loads(line)["event"] not in ("eval", "finish")]
    assert len(cut) == len(lines) - 2
    log.write_text("\n".join(cut) + "\n")
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert "finished, validation bpb" in done.stdout
    results = [json.loads((out / "results.jsonl").read_text())["metrics"] for out in (tmp_path, uninterrupted)]
    assert results[0] == results[1]


def test_sigterm_saves_the_step_it_is_at(packed, uninterrupted, tmp_path):
    process = processes.start(MODULE, *flags(packed, tmp_path, "--save-every", "-1"), folder=tmp_path / "output")
    while process.alive() and len(log_steps(tmp_path)) < 5:
        time.sleep(0.002)
    process.signal(signal.SIGTERM)
    done = process.wait()
    assert done.returncode == 0 and "saved; continue with: " in done.stdout, done.stdout + done.stderr
    tiny.call(MODULE, *flags(packed, tmp_path))
    assert final(tmp_path) == final(uninterrupted)


def test_sigterm_to_torchrun_saves_on_every_rank(packed, uninterrupted, tmp_path):
    process = tiny.start(MODULE, *flags(packed, tmp_path, "--save-every", "-1", "--num-iterations", 100000), ranks=2)
    while process.poll() is None and len(log_steps(tmp_path)) < 5:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=tiny.HANG_AFTER)
    assert "saved; continue with: " in output, output
    assert len(list((tmp_path / "run" / "checkpoints").glob("step_*"))) == 1


def test_corrupted_checkpoint_falls_back(packed, uninterrupted, tmp_path):
    tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 20))
    newest = tmp_path / "run" / "checkpoints" / "step_00000020"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert "model.safetensors does not have its recorded checksum" in done.stdout
    assert "resuming at step 16" in done.stdout
    assert final(tmp_path) == final(uninterrupted)


def test_another_rank_count_may_continue_a_run(packed, tmp_path):
    tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 3), ranks=2)
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 5))
    assert "resuming at step 3" in done.stdout


def as_saved_before(folder, **said):
    """Make a run's checkpoint look as when normalised values were the default: it states `said` of the values."""
    at = checkpoint.load_newest(folder / "checkpoints").path
    state, manifest = (json.loads((at / name).read_text()) for name in ("state.json", "manifest.json"))
    for name in ("model_config", "train_config"):
        state[name].pop("gka_values", None)
        state[name].update(said)
    (at / "state.json").write_text(json.dumps(state))
    (at / "manifest.json").write_text(json.dumps({**manifest, "state.json": sha256(at / "state.json")}))


@pytest.mark.parametrize("said", [{"gka_values": "normalised"}, {}], ids=["stated", "unstated"])
def test_older_run_keeps_its_form_or_names_the_flag(packed, tmp_path, said, capsys):
    """A run of normalised values has the name that is the paper's form's today."""

    def train(until, *more):
        words = flags(packed, tmp_path, "--attention", "gka", "--model-tag", "", "--stop-after", until, *more)
        try:
            run(main, TrainConfig, [str(word) for word in words])
        except SystemExit as left:
            return left.code
        return 0

    assert train(2, "--gka-values", "normalised", "--model-tag", "d2-gka") == 0
    as_saved_before(tmp_path / "d2-gka", **said)
    assert load(tmp_path / "d2-gka").model.config.gka_values == "normalised"
    assert train(4) == 2
    has = said.get("gka_values", "normalised")
    assert (
        f"--gka-values is rotated but the run in {tmp_path / 'd2-gka'} has {has}; use its value with --model-tag d2-gka"
        in capsys.readouterr().err
    )
    assert train(4, "--gka-values", "normalised", "--model-tag", "d2-gka") == 0
    assert load(tmp_path / "d2-gka").step == 4 and load(tmp_path / "d2-gka").model.config.gka_values == "normalised"
    assert train(2, "--gka-values", "normalised") == 0 and (tmp_path / "d2-gka-normalised").is_dir()


def test_an_older_softmax_run_goes_on(packed, tmp_path, capsys):
    words = flags(packed, tmp_path, "--attention", "softmax")
    run(main, TrainConfig, [str(word) for word in [*words, "--stop-after", 2]])
    as_saved_before(tmp_path / "run", gka_values="normalised")
    run(main, TrainConfig, [str(word) for word in [*words, "--stop-after", 4]])
    assert "resuming at step 2" in capsys.readouterr().out and load(tmp_path / "run").step == 4


def test_rows_of_another_length_are_refused(packed, tmp_path):
    from nanochat_gka import pack

    pack.main(
        pack.PackConfig(
            corpus=packed / "corpus",
            tokenizer=packed / "tokenizer",
            out=tmp_path / "longer",
            sequence_len=64,
            workers=1,
        )
    )
    tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 2))
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--data", tmp_path / "longer"), check=False)
    tiny.assert_one_line_error(done, "was packed with another context length than the run in")


def test_missing_log_values_are_evaluated_again(packed, uninterrupted, tmp_path, capsys):
    """The last evaluation and the numbers of the end are made again; lines that say nothing are passed over."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    tiny.damage_log(tmp_path / "run/log.jsonl", eval="val_bpb", finish="gap")
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert "finished, validation bpb" in done.stdout and "Traceback" not in done.stderr
    old, new = (json.loads((out / "results.jsonl").read_text())["metrics"] for out in (uninterrupted, tmp_path))
    assert old == new
