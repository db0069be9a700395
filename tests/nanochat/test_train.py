"""Training: what a run leaves and says of itself, its schedule, the same step on any number of ranks."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import gpt_runs
import tiny
from gpt_runs import MODULE, STEPS, events, flags, metrics
from nanochat_gka import evaluate
from nanochat_gka.data.loader import PackedData, RowStream
from nanochat_gka.model.accounting import scaling_parameters
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.train import TrainConfig
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit_gka.distributed import Runtime

TOKENS = STEPS * 8 * tiny.SEQUENCE_LEN


# What a run leaves


def test_finished_run_learned_and_is_recorded(packed, uninterrupted):
    losses = [record["loss"] for record in events(uninterrupted, "train")]
    assert losses[-1] < losses[0] - 0.5
    first, *_, last = events(uninterrupted, "eval")
    assert last["val_bpb"] < first["val_bpb"] and last["sigma"]["layer_0"] != first["sigma"]["layer_0"]
    result = metrics(uninterrupted)
    assert result["train_tokens"] == TOKENS and result["train_flops"] == TOKENS * result["flops_per_token"]
    assert result["warnings"] == []
    assert "already trained" in tiny.call(MODULE, *flags(packed, uninterrupted)).stdout


TAGS = [
    ({}, "d20-gka"),
    (dict(gka_values="normalised"), "d20-gka-normalised"),
    (dict(gka_values="normalised", head_offsets="PS"), "d20-gka-PS-normalised"),
    (dict(attention="GGGA", gka_values="normalised"), "d20-GGGA-normalised"),
    (dict(attention="softmax"), "d20-softmax"),
    (dict(attention="softmax", value_embeds="none"), "d20-softmax-no-VE"),
    (dict(head_offsets="PS", value_embeds="all"), "d20-gka-PS-VE"),
    (dict(value_embeds="every-layer"), "d20-gka-VE-every-layer"),
    (dict(gka_values="normalised", model_tag="mine"), "mine"),
]


@pytest.mark.parametrize("settings, tag", TAGS, ids=str)
def test_each_form_of_gka_has_its_own_run_name(settings, tag):
    assert TrainConfig(depth=20, **settings).tag == tag


# The rows of a run


def evaluation(folder, capsys, *more):
    """Exit code and output of evaluating a run."""
    words = ["--run", folder, "--results", folder.parent / "bpb.jsonl", "--eval", "bpb", "--split-tokens", 512]
    code = tiny.exit_code(evaluate.main, evaluate.EvaluateConfig, *words, "--device-type", "cpu", *more)
    return code, capsys.readouterr()


def test_evaluation_finds_the_rows_of_the_run(packed, tmp_path, capsys):
    """Where they were; or beside the run, when both were moved. If they are gone, it says which they were."""
    shutil.copytree(packed / "packed", tmp_path / "there/packed")
    gpt_runs.train(tmp_path / "there", tmp_path / "there/out", "--num-iterations", 2)
    folder = tmp_path / "there/out/run"
    capsys.readouterr()
    _, given = evaluation(folder, capsys, "--data", packed / "packed")
    assert "val bpb: " in given.out and evaluation(folder, capsys)[1].out == given.out
    (tmp_path / "there").rename(tmp_path / "moved")
    folder = tmp_path / "moved/out/run"
    for place in (folder, folder / "checkpoints/step_00000002"):
        assert evaluation(place, capsys)[1].out == given.out
    written = [(file.parent / "bpb.jsonl").read_text().splitlines() for file in (folder, place)]
    assert {json.loads(line)["config"]["run"] for lines in written for line in lines} == {"run"}  # of a checkpoint too
    (tmp_path / "moved/packed").rename(tmp_path / "hidden")
    code, (_, error) = evaluation(folder, capsys)
    assert code == 2 and error.count("\n") == 1 and "there/packed" in error and "give --data FOLDER with rows" in error


def test_ids_that_are_not_in_the_vocabulary_name_file_and_row(packed, tmp_path, capsys):
    """Of a damaged file whose checksum nobody verifies; training reads the rows in another order."""
    shutil.copytree(packed / "packed", tmp_path / "packed")
    path = tmp_path / "packed/train_000000.bin"
    rows = np.fromfile(path, dtype="<u2").reshape(-1, tiny.SEQUENCE_LEN + 1)
    for first_wrong in (60000, 300):
        rows[1, 5] = rows[1, 6] = first_wrong
        rows.tofile(path)
        assert gpt_runs.train(tmp_path, tmp_path / "out", "--no-verify-data", "--save-every", -1) == 2
        errors = capsys.readouterr().err
        assert f"{path} is damaged: row 1 has id {first_wrong}, and the vocabulary has 300 tokens" in errors
        assert errors.count("\n") == 1


# Steps


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
    fields = dict(aspect_ratio=16, head_dim=16, window_pattern="SL", attention="GA", sequence_len=tiny.SEQUENCE_LEN)
    fields |= dict(vocab_size=data.tokenizer.vocab_size)
    model, reference = (build(GPTConfig.from_depth(depth, **fields), "cpu") for depth in (2, 12))
    batch_ratio = 8 * tiny.SEQUENCE_LEN / 2**19
    decay_scale = batch_ratio**0.5 * scaling_parameters(reference) / scaling_parameters(model)
    groups = parameter_groups(model, OptimConfig(matrix_lr=0.5, weight_decay=2.0), batch_ratio**0.5, decay_scale)
    optimizer = MuonAdamW(groups, Runtime(0, 1, torch.device("cpu")))
    stream = RowStream(data.split("train"), 42)
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
    tiny.call(MODULE, *flags(packed, tmp_path, "--device-type", "cuda", "--num-iterations", 40, *shape))
    losses = [record["loss"] for record in events(tmp_path, "train")]
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


COMPILED = pytest.param(2, ["--compile", "on", "--device-batch-size", 4], marks=[tiny.needs_compiler, pytest.mark.slow])


@pytest.mark.parametrize("ranks, more", [(3, []), COMPILED], ids=["3", "2 compiled"])
def test_any_number_of_ranks_takes_the_same_step(packed, trained_a_little, tmp_path, ranks, more):
    """8 rows over 1, 2, 3 ranks in micro-batches of at most 3, or compiled over 2 in one of 4, from a trained state.

    Momentum and first moments after the step are the gradient plus what all runs share.
    """
    start, before, one = trained_a_little
    shutil.copytree(start, tmp_path / "run-of-ranks")
    state = optimizer_after(packed, tmp_path / "run-of-ranks", 7, *more, ranks=ranks)
    gradients = [name for name in before if name.endswith((".momentum_buffer", ".exp_avg")) and "second" not in name]
    assert len(gradients) == 16
    for name in gradients:
        change = one[name] - before[name]
        assert change.norm() > 0, name
        difference = (state[name] - one[name]).norm() / change.norm()
        assert difference < 1e-5, f"{name}: {difference:.1e}"
