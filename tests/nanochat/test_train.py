"""Training with real processes: nothing is lost, nothing depends on the number of ranks, mistakes are one line."""

import json
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import tyro
from safetensors.torch import load_file

import tiny
from nanochat_gka import export
from nanochat_gka.data.loader import PackedData, Stream, rows_of_run
from nanochat_gka.model.accounting import scaling_parameters
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.train import TrainConfig, Trainer, main
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit import checkpoint
from trainkit.cli import UserError, run
from trainkit.distributed import Runtime
from trainkit.files import sha256

MODULE = "nanochat_gka.train"
STEPS = 60
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the error is for machines without a CUDA device")


def flags(packed, out, *more):
    return ["--data", packed / "packed", "--out", out, "--results", out / "results.jsonl", *tiny.TRAIN_FLAGS, "--attention", "GA",
            "--num-iterations", STEPS, "--save-every", 4, "--log-every", 1, "--model-tag", "run", *more]  # fmt: skip


def final(out, step=STEPS):
    folder = out / "run" / "checkpoints" / f"step_{step:08d}"
    return [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


def log_steps(out):
    path = out / "run" / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for line in lines if line.endswith("}") and (record := json.loads(line))["event"] == "train"]


@pytest.fixture(scope="module")
def uninterrupted(packed, tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    done = tiny.call(MODULE, *flags(packed, out))
    assert "finished, validation bpb" in done.stdout
    return out


def test_finished_run_learned_and_says_what_it_did(packed, uninterrupted):
    log = [json.loads(line) for line in (uninterrupted / "run" / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in log if record["event"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    evaluations = [record for record in log if record["event"] == "eval"]
    assert evaluations[-1]["val_bpb"] < evaluations[0]["val_bpb"]
    assert evaluations[-1]["sigma"]["layer_0"] != evaluations[0]["sigma"]["layer_0"]
    result = json.loads((uninterrupted / "results.jsonl").read_text())
    assert result["metrics"]["train_tokens"] == STEPS * 8 * tiny.SEQUENCE_LEN
    assert result["metrics"]["train_flops"] == result["metrics"]["train_tokens"] * result["metrics"]["flops_per_token"]
    again = tiny.call(MODULE, *flags(packed, uninterrupted))
    assert "already trained" in again.stdout


def test_a_finished_run_leaves_as_a_folder_that_says_what_it_was_trained_on(uninterrupted, tmp_path):
    run(export.main, export.ExportConfig, ["--run", str(uninterrupted / "run"), "--out", str(tmp_path / "out")])
    loaded, tokens = load(tmp_path / "out"), STEPS * 8 * tiny.SEQUENCE_LEN
    assert (loaded.name, loaded.step, loaded.training["tokens"], loaded.training["settings"]["depth"]) == (
        "run",
        STEPS,
        tokens,
        2,
    )
    assert re.fullmatch(r"[0-9a-f]{7,}\+?|unknown", loaded.training["commit"])
    assert loaded.training == load(uninterrupted / "run").training
    assert f"| training tokens | {tokens:,} ({STEPS} of {STEPS} steps) |" in (tmp_path / "out/README.md").read_text()


def evaluate(run, *more, check=True):
    flags = [
        "--run",
        run,
        "--eval",
        "bpb",
        "--split-tokens",
        512,
        "--device-type",
        "cpu",
        "--results",
        run.parent / "bpb.jsonl",
        *more,
    ]
    return tiny.call("nanochat_gka.evaluate", *flags, check=check)


def test_evaluation_finds_the_rows_of_the_run(packed, tmp_path):
    """Where they were; or beside the run, when both were moved. If they are gone, it says which they were."""
    shutil.copytree(packed / "packed", tmp_path / "there/packed")
    tiny.call(
        MODULE,
        *flags(
            packed,
            tmp_path / "there/out",
            "--data",
            tmp_path / "there/packed",
            "--num-iterations",
            2,
            "--model-tag",
            "mine",
        ),
    )
    run = tmp_path / "there/out/mine"
    given = evaluate(run, "--data", packed / "packed").stdout
    assert "val bpb: " in given and evaluate(run).stdout == given
    (tmp_path / "there").rename(tmp_path / "moved")
    run = tmp_path / "moved/out/mine"
    assert evaluate(run).stdout == evaluate(run / "checkpoints/step_00000002").stdout == given
    (tmp_path / "moved/packed").rename(tmp_path / "hidden")
    sha = PackedData(packed / "packed").tokenizer.sha256[:12]
    wanted = rf"give --data FOLDER with rows of 32 tokens of tokenizer {sha}"
    message = r"the rows that .*mine was trained on, of .*corpus \(2 parquet files, shard_00000.parquet to shard_00001.parquet\), are gone from "
    tiny.assert_one_line_error(evaluate(run, check=False), message + rf".*there/packed; pack them again, or {wanted}")
    assert "val bpb: " in evaluate(run, "--data", tmp_path / "hidden").stdout


def test_a_run_of_an_earlier_version_asks_for_its_rows():
    data = {"tokenizer_sha256": "f" * 64, "sequence_len": 32, "source": [["a.parquet", 1], ["b.parquet", 1]]}
    with pytest.raises(
        UserError, match=r"of an earlier version.*give --data FOLDER with rows of 32 tokens of tokenizer ffffffffffff"
    ):
        rows_of_run(data, Path("out/runs/d4"))
    with pytest.raises(
        UserError, match="is an exported model, which does not say where its rows are; give --data FOLDER"
    ):
        rows_of_run({}, Path("d4-export"))


def test_rows_of_other_text_are_not_the_runs(tmp_path):
    data = {"tokenizer_sha256": "f" * 64, "sequence_len": 32, "source": [["a.parquet", 1], ["b.parquet", 1]]}
    data |= {"corpus": "text", "folder": str(tmp_path / "packed"), "folder_from_run": "../packed"}
    (tmp_path / "packed").mkdir()
    for source, there in ((data["source"], True), ([["a.parquet", 2], ["b.parquet", 1]], False)):
        (tmp_path / "packed/manifest.json").write_text(json.dumps({**data, "source": source}))
        if there:
            assert rows_of_run(data, tmp_path / "run") == tmp_path / "packed"
        else:
            with pytest.raises(UserError, match=r"are gone from .*; pack them again, or give --data FOLDER"):
                rows_of_run(data, tmp_path / "run")


def test_kill_9_at_random_steps_and_resume_is_bit_identical(packed, uninterrupted, tmp_path):
    rng = random.Random(7)
    for kill_at in sorted(rng.sample(range(5, STEPS - 5), 2)):
        process = tiny.start(MODULE, *flags(packed, tmp_path))
        while process.poll() is None and (log_steps(tmp_path) or [0])[-1] < kill_at:
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert "resuming at step" in done.stdout
    assert final(tmp_path) == final(uninterrupted)
    assert log_steps(tmp_path) == list(range(1, STEPS + 1))


def test_kill_9_of_two_ranks_and_resume_is_bit_identical(packed, tmp_path):
    common = ["--num-iterations", 24, "--save-every", 3]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    tiny.call(MODULE, *flags(packed, whole, *common), ranks=2)
    process = tiny.start(MODULE, *flags(packed, killed, *common), ranks=2)
    while process.poll() is None and len(log_steps(killed)) < 10:
        time.sleep(0.002)
    tiny.kill_tree(process)
    assert (log_steps(killed) or [0])[-1] < 24
    tiny.call(MODULE, *flags(packed, killed, *common), ranks=2, real=True)
    assert final(killed, 24) == final(whole, 24)


def test_a_kill_between_the_last_checkpoint_and_the_result_loses_nothing(packed, uninterrupted, tmp_path):
    """As if killed before the final evaluation: its line, the finish line and the result are missing."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    log = tmp_path / "run" / "log.jsonl"
    lines = log.read_text().splitlines()
    cut = [
        line
        for line in lines
        if json.loads(line)["event"] != "finish" and not ('"eval"' in line and json.loads(line)["step"] == STEPS)
    ]
    assert len(cut) == len(lines) - 2
    log.write_text("\n".join(cut) + "\n")
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert "finished, validation bpb" in done.stdout
    results = [json.loads((out / "results.jsonl").read_text())["metrics"] for out in (tmp_path, uninterrupted)]
    assert results[0] == results[1]


def test_the_trainer_follows_the_schedule(packed, tmp_path):
    """The run, step by step with the pieces that have golden numbers of their own: bit-identical weights.

    Base rates that matter, warm-up, warm-down to a fraction, and decay; one micro-batch per step so that no sum is reordered.
    """
    steps, more = (
        8,
        [
            "--warmup-ratio",
            0.25,
            "--warmdown-ratio",
            0.5,
            "--final-lr-frac",
            0.1,
            "--device-batch-size",
            8,
            "--matrix-lr",
            0.5,
            "--weight-decay",
            2,
        ],
    )
    tiny.call(MODULE, *flags(packed, tmp_path, "--num-iterations", steps, *more))
    torch.set_num_threads(1)
    torch.manual_seed(42)
    data = PackedData(packed / "packed")
    fields = dict(
        aspect_ratio=16,
        head_dim=16,
        window_pattern="SL",
        attention="GA",
        sequence_len=tiny.SEQUENCE_LEN,
        vocab_size=data.tokenizer.vocab_size,
    )
    model, reference = (build(GPTConfig.from_depth(depth, **fields), "cpu") for depth in (2, 12))
    batch_ratio = 8 * tiny.SEQUENCE_LEN / 2**19
    decay_scale = batch_ratio**0.5 * scaling_parameters(reference) / scaling_parameters(model)
    groups = parameter_groups(model, OptimConfig(matrix_lr=0.5, weight_decay=2.0), batch_ratio**0.5, decay_scale)
    optimizer = MuonAdamW(groups, Runtime(0, 1, torch.device("cpu")))
    stream = Stream(data.split("train"), 42)
    for step in range(steps):
        optimizer.zero_grad()
        ids, targets = stream.batch(range(8 * step, 8 * step + 8))
        (model(ids, targets, reduction="sum") / ids.numel()).backward()
        optimizer.step([0.5, 1, 1, 1, 1, 0.775, 0.55, 0.325][step], 0.85 + 0.1 * step / 300, 1 - step / steps)
    got = load_file(tmp_path / "run" / "checkpoints" / f"step_{steps:08d}" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["softmax", "gka", "GGGA"])
def test_training_on_cuda_compiled_in_bfloat16(packed, tmp_path, attention):
    more = [
        "--device-type",
        "cuda",
        "--num-iterations",
        40,
        "--attention",
        attention,
        "--head-dim",
        32,
        "--aspect-ratio",
        64,
    ]
    done = tiny.call(MODULE, *flags(packed, tmp_path, *more))
    assert "finished" in done.stdout
    losses = [
        record["loss"]
        for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
        if (record := json.loads(line))["event"] == "train"
    ]
    assert losses[-1] < losses[0] - 0.2


def test_sigterm_saves_the_step_it_is_at(packed, uninterrupted, tmp_path):
    process = tiny.start(MODULE, *flags(packed, tmp_path, "--save-every", "-1"))
    while process.poll() is None and len(log_steps(tmp_path)) < 5:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=tiny.HANG_AFTER)
    assert process.returncode == 0 and "saved; continue with: " in output, output
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


def test_a_corrupted_newest_checkpoint_falls_back(packed, uninterrupted, tmp_path):
    tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 20))
    newest = tmp_path / "run" / "checkpoints" / "step_00000020"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert (
        "model.safetensors does not have its recorded checksum" in done.stdout and "resuming at step 16" in done.stdout
    )
    assert final(tmp_path) == final(uninterrupted)


@pytest.mark.parametrize("others", [[(3, "off")], [(2, "off"), (2, "on")]], ids=str)
def test_any_number_of_ranks_takes_the_same_step(packed, tmp_path, others):
    """8 rows over 1, 2, 3 ranks in micro-batches of at most 3, or compiled over 2; from a trained state, so that every gradient is alive.

    Momentum and first moments after the step are the gradient plus what all runs share.
    """
    tiny.call(MODULE, *flags(packed, tmp_path / "start", "--stop-after", 6, "--scalar-lr", 0))
    before = load_file(tmp_path / "start" / "run" / "checkpoints" / "step_00000006" / "optimizer.safetensors")
    states = {}
    for ranks, compile in ((1, "off"), *others):
        out = tmp_path / f"{ranks}-{compile}"
        shutil.copytree(tmp_path / "start", out)
        tiny.call(MODULE, *flags(packed, out, "--stop-after", 7, "--scalar-lr", 0, "--compile", compile), ranks=ranks)
        states[ranks, compile] = load_file(out / "run" / "checkpoints" / "step_00000007" / "optimizer.safetensors")
    gradients = [name for name in before if name.endswith((".momentum_buffer", ".exp_avg")) and "second" not in name]
    assert len(gradients) == 16
    for name in gradients:
        one = states[1, "off"][name]
        change = one - before[name]
        assert change.norm() > 0, name
        for how, state in states.items():
            difference = (state[name] - one).norm() / change.norm()
            assert difference < 1e-5, f"{name}: {difference:.1e} with {how}"


def test_seven_ranks_train_two_steps(packed, tmp_path):
    """As many ranks as the paper's vision runs have GPUs, on gloo: 8 rows over 7 ranks."""
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--num-iterations", 2), ranks=7)
    assert "finished" in done.stdout


def test_another_rank_count_may_continue_a_run(packed, tmp_path):
    tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 3), ranks=2)
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 5))
    assert "resuming at step 3" in done.stdout


def test_every_form_of_gka_has_a_run_name_of_its_own():
    def tag(**settings):
        return TrainConfig(depth=20, **settings).tag

    assert tag(attention="gka") == "d20-gka"
    assert tag(attention="gka", gka_values="normalised") == "d20-gka-normalised"
    assert tag(attention="gka", gka_values="normalised", head_offsets="PS") == "d20-gka-PS-normalised"
    assert tag(attention="GGGA", gka_values="raw") == "d20-GGGA-raw"
    assert (
        tag(attention="softmax") == "d20-softmax" and tag(attention="gka", gka_values="raw", model_tag="mine") == "mine"
    )


def as_saved_before(folder, **said):
    """Make the checkpoint in a run's folder say what one said when normalised values were the default: `said`, in both of its configurations."""
    at = checkpoint.load_newest(folder / "checkpoints").path
    state, manifest = (json.loads((at / name).read_text()) for name in ("state.json", "manifest.json"))
    for name in ("model_config", "train_config"):
        state[name].pop("gka_values", None)
        state[name].update(said)
    (at / "state.json").write_text(json.dumps(state))
    (at / "manifest.json").write_text(json.dumps({**manifest, "state.json": sha256(at / "state.json")}))


@pytest.mark.parametrize("said", [{"gka_values": "normalised"}, {}], ids=["stated", "unstated"])
def test_an_older_run_goes_on_in_its_own_form_or_says_what_differs(packed, tmp_path, said, capsys):
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


@pytest.mark.parametrize(
    "more,message",
    [
        (["--matrix-lr", "0.5"], r"--matrix-lr is 0.5 but the run in .* has 0.02"),
        (["--attention", "softmax"], "--attention is softmax"),
        (["--max-seq-len", "64"], "--max-seq-len 64 but .* holds rows of 32 tokens"),
        (["--total-batch-size", "100"], "--total-batch-size must be a multiple of the context length 32, got 100"),
        (["--attention", "linear"], "or a pattern of their letters such as GGGA, got 'linear'"),
        (["--device-batch-size", "0"], "--device-batch-size must be at least 1"),
        (["--model-tag", "a/b"], "--model-tag must be a plain folder name"),
        pytest.param(["--device-type", "cuda"], "no CUDA device is visible; use --device-type cpu", marks=without_cuda),
        (["--seed", "-1"], "--seed must be between 0 and"),
        (
            ["--weight-decay", "1e6", "--model-tag", "x"],
            r"--weight-decay with --matrix-lr would take .* of every matrix entry away in one step",
        ),
        (["--num-iterations", "0"], "--num-iterations must be at least 1, or -1 for off"),
        (["--matrix-lr", "-0.02"], "--matrix-lr must be between 0 and 1e\\+38"),
        (["--sigma-lr", "nan"], "--sigma-lr must be between 0 and 1e\\+38"),
        (["--model-tag", "x", "--results", "/proc/nowhere/results.jsonl"], "/proc/nowhere: No such file"),
        (["--sigma-squared", "nan"], "--sigma-squared must be at least 0 and finite"),
        (
            ["--target-flops", "inf", "--num-iterations", "-1"],
            "--target-flops must be above 0 and finite, or -1 for off, got inf",
        ),
        (
            ["--attention", "softmax", "--head-offsets", "PS"],
            "head_offsets is for gka layers, and attention=softmax has none",
        ),
        (["--head-offsets", "XY"], "head_offsets must be made of the letters N, P, S"),
        (
            ["--num-iterations", "-1", "--target-param-data-ratio", "-1", "--model-tag", "x"],
            "set one of num_iterations, target_flops",
        ),
    ],
)
def test_bad_flags_are_one_line(packed, uninterrupted, more, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        run(main, TrainConfig, [str(flag) for flag in flags(packed, uninterrupted, *more)])
    assert exit_info.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_errors_of_a_real_process(packed, tmp_path):
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--data", tmp_path / "nowhere"), check=False)
    tiny.assert_one_line_error(done, "no packed data in .*nowhere.*run make tokenize")


def test_a_run_does_not_continue_on_rows_of_another_length(packed, tmp_path):
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


def test_an_error_on_rank_0_alone_ends_all_ranks_at_once(packed, tmp_path):
    """Checksums are verified by rank 0; the others must not wait for it in a collective, nor speak."""
    shutil.copytree(packed / "packed", tmp_path / "packed")
    shard = next((tmp_path / "packed").glob("train_*.bin"))
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--data", tmp_path / "packed"), ranks=2, check=False, real=True)
    assert done.returncode != 0
    assert len(re.findall(r"error: shard .* is corrupt", done.stderr)) == 1
    assert "RuntimeError" not in done.stderr


def test_a_file_where_a_folder_is_expected_is_one_line(packed, tmp_path):
    (tmp_path / "file").touch()
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--out", tmp_path / "file"), check=False)
    tiny.assert_one_line_error(done, "file")


def test_a_second_trainer_is_kept_out(packed, tmp_path):
    process = tiny.start(MODULE, *flags(packed, tmp_path, "--num-iterations", 100000))
    while process.poll() is None and not log_steps(tmp_path):
        time.sleep(0.01)
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--num-iterations", 100000), check=False)
    process.kill()
    process.communicate()
    tiny.assert_one_line_error(done, "another process is training in")


def test_a_loss_that_is_not_finite_stops_and_names_the_last_checkpoint(packed, tmp_path):
    tiny.call(MODULE, *flags(packed, tmp_path, "--stop-after", 4, "--embedding-lr", "1e38"), check=False)
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--embedding-lr", "1e38"), check=False)
    tiny.assert_one_line_error(
        done, r"the gradient is not finite at step \d+; the weights were not touched. Last checkpoint: "
    )


def test_weights_that_an_earlier_step_has_ruined_are_not_called_untouched(packed, tmp_path):
    words = [str(word) for word in flags(packed, tmp_path)]
    trainer = Trainer(tyro.cli(TrainConfig, args=words), Runtime(0, 1, torch.device("cpu")))
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = torch.inf
    with pytest.raises(UserError, match=r"at step 0; an earlier step has ruined the weights. Last checkpoint: none "):
        trainer.step(SimpleNamespace(requested=False))


def test_a_log_that_lacks_values_is_made_up_for(packed, uninterrupted, tmp_path, capsys):
    """The last evaluation and the numbers of the end are made again; lines that say nothing are passed over."""
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    tiny.damage_log(tmp_path / "run/log.jsonl", eval="val_bpb", finish="gap")
    done = tiny.call(MODULE, *flags(packed, tmp_path))
    assert "finished, validation bpb" in done.stdout and "Traceback" not in done.stderr
    old, new = (json.loads((out / "results.jsonl").read_text())["metrics"] for out in (uninterrupted, tmp_path))
    assert old == new


def test_wandb_offline_needs_no_account_and_has_the_numbers(packed, tmp_path):
    done = tiny.call(
        MODULE,
        *flags(packed, tmp_path, "--wandb", "offline", "--num-iterations", 2),
        env=tiny.without_account(tmp_path),
    )
    said = tiny.wandb_text(tmp_path / "run")
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    for event, key in (("train", "loss"), ("eval", "val_bpb"), ("finish", "gap")):
        values = [record[key] for record in log if record["event"] == event]
        assert values and f"{event}/{key}".encode() in said and all(repr(value).encode() in said for value in values)
    assert b"eval/sigma/layer_0/mean" in said and "finished" in done.stdout


def test_wandb_online_without_a_key_is_one_line_and_no_question(packed, tmp_path):
    done = tiny.call(
        MODULE, *flags(packed, tmp_path, "--wandb", "online"), check=False, env=tiny.without_account(tmp_path)
    )
    tiny.assert_one_line_error(
        done, "--wandb online needs the key of an account: set WANDB_API_KEY, or run wandb login once"
    )
    assert log_steps(tmp_path) == []
    key = {**tiny.without_account(tmp_path), "WANDB_API_KEY": "no key"}
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--wandb", "online"), check=False, env=key)
    tiny.assert_one_line_error(done, "--wandb online: .*--wandb offline needs no account")


def test_without_the_wandb_package_it_is_said_what_to_install(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        run(main, TrainConfig, [str(flag) for flag in flags(packed, tmp_path, "--wandb", "offline")])
    assert "pip install wandb, or leave --wandb disabled" in capsys.readouterr().err
