"""Training with real processes: what a run leaves, its schedule, the same step on any number of ranks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from gpt_runs import MODULE, STEPS, flags
from nanochat_gka import export
from nanochat_gka.data.loader import PackedData, Stream, rows_of_run
from nanochat_gka.model.accounting import scaling_parameters
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.train import TrainConfig
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import Runtime
from trainkit_gka.progress import read_events


def test_finished_run_learned_and_is_recorded(packed, uninterrupted):
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


def test_finished_run_is_exported_with_its_corpus(uninterrupted, tmp_path):
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
    flags = ["--eval", "bpb", "--split-tokens", 512, "--device-type", "cpu"]
    places = ["--run", run, "--results", run.parent / "bpb.jsonl"]
    return tiny.call("nanochat_gka.evaluate", *places, *flags, *more, check=check)


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
    files = r"2 parquet files, shard_00000.parquet to shard_00001.parquet"
    message = rf"the rows that .*mine was trained on, of .*corpus \({files}\), are gone from .*there/packed; "
    tiny.assert_one_line_error(evaluate(run, check=False), message + rf"pack them again, or {wanted}")
    assert "val bpb: " in evaluate(run, "--data", tmp_path / "hidden").stdout


def test_older_run_asks_for_its_rows():
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


def test_the_trainer_follows_the_schedule(packed, tmp_path):
    """The run, step by step with the pieces that have golden numbers of their own: bit-identical weights.

    Base rates that matter, warm-up, warm-down to a fraction, and decay; one micro-batch per step, so that sums have one
    order.
    """
    schedule = ["--warmup-ratio", 0.25, "--warmdown-ratio", 0.5, "--final-lr-frac", 0.1]
    steps, more = 8, [*schedule, "--device-batch-size", 8, "--matrix-lr", 0.5, "--weight-decay", 2]
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
    shape = ["--attention", attention, "--head-dim", 32, "--aspect-ratio", 64]
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--device-type", "cuda", "--num-iterations", 40, *shape))
    assert "finished" in done.stdout
    losses = [record["loss"] for record in read_events(tmp_path / "run" / "log.jsonl", "train")]
    assert losses[-1] < losses[0] - 0.2


def optimizer_after(packed, out, step, *more, ranks=1):
    """The optimiser's state after `step` steps of the run in `out`, which continues."""
    tiny.call(MODULE, *flags(packed, out, "--stop-after", step, "--scalar-lr", 0, *more), ranks=ranks)
    return load_file(out / f"run/checkpoints/step_{step:08d}/optimizer.safetensors")


@pytest.fixture(scope="module")
def trained_a_little(packed, tmp_path_factory):
    """A run of 6 steps, its optimiser's state, and that after one step more by one process."""
    folder = tmp_path_factory.mktemp("ranks")
    before = optimizer_after(packed, folder / "start", 6)
    shutil.copytree(folder / "start", folder / "one")
    return folder / "start", before, optimizer_after(packed, folder / "one", 7)


@pytest.mark.parametrize("ranks, compile", [(2, "off"), (3, "off"), pytest.param(2, "on", marks=tiny.needs_compiler)])
def test_any_number_of_ranks_takes_the_same_step(packed, trained_a_little, tmp_path, ranks, compile):
    """8 rows over 1, 2, 3 ranks in micro-batches of at most 3, or compiled over 2 in one of 4, from a trained state.

    Momentum and first moments after the step are the gradient plus what all runs share.
    """
    start, before, one = trained_a_little
    shutil.copytree(start, tmp_path / "run-of-ranks")
    more = ["--compile", "on", "--device-batch-size", 4] if compile == "on" else []  # each size is compiled
    state = optimizer_after(packed, tmp_path / "run-of-ranks", 7, *more, ranks=ranks)
    gradients = [name for name in before if name.endswith((".momentum_buffer", ".exp_avg")) and "second" not in name]
    assert len(gradients) == 16
    for name in gradients:
        change = one[name] - before[name]
        assert change.norm() > 0, name
        difference = (state[name] - one[name]).norm() / change.norm()
        assert difference < 1e-5, f"{name}: {difference:.1e}"


def test_seven_ranks_train_two_steps(packed, tmp_path):
    """As many ranks as the paper's vision runs have GPUs, on gloo: 8 rows over 7 ranks."""
    done = tiny.call(MODULE, *flags(packed, tmp_path, "--num-iterations", 2), ranks=7)
    assert "finished" in done.stdout


def test_each_form_of_gka_has_its_own_run_name():
    def tag(**settings):
        return TrainConfig(depth=20, **settings).tag

    assert tag() == tag(attention="gka") == "d20-gka"
    assert tag(attention="gka", gka_values="normalised") == "d20-gka-normalised"
    assert tag(attention="gka", gka_values="normalised", head_offsets="PS") == "d20-gka-PS-normalised"
    assert tag(attention="GGGA", gka_values="normalised") == "d20-GGGA-normalised"
    assert tag(attention="softmax") == "d20-softmax"
    assert tag(attention="softmax", value_embeds="none") == "d20-softmax-no-VE"
    assert tag(attention="gka", head_offsets="PS", value_embeds="all") == "d20-gka-PS-VE"
    assert tag(attention="gka", value_embeds="every-layer") == "d20-gka-VE-every-layer"
    assert tag(attention="gka", gka_values="normalised", model_tag="mine") == "mine"


def test_a_continued_run_continues_its_wandb_run(packed, tmp_path):
    """Two processes, one id, which `wandb sync` sends as one run; WANDB_RUN_ID counts where it is set."""
    words = [*flags(packed, tmp_path, "--wandb", "offline", "--num-iterations", 4)]
    account = tiny.without_account(tmp_path)
    tiny.call(MODULE, *words, "--stop-after", 2, env=account)
    done = tiny.call(MODULE, *words, "--stop-after", 3, env=account)
    assert "resuming at step 2" in done.stdout and "arning: resume" not in done.stderr + done.stdout, done.stderr
    run_id = (tmp_path / "run/wandb_id").read_text().strip()
    first, second = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert {path.name.rpartition("-")[2] for path in (first, second)} == {run_id}
    tiny.call(MODULE, *words, env={**account, "WANDB_RUN_ID": "mine"})
    assert len([*(tmp_path / "run/wandb").glob("offline-run-*-mine")]) == 1
    tiny.call(MODULE, *flags(packed, tmp_path / "none", "--num-iterations", 1), env=account)
    assert not (tmp_path / "none/run/wandb_id").exists()


def test_wandb_offline_has_the_numbers(packed, tmp_path):
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
