"""Training: a run's results, its schedule, the same step on any number of ranks, runs that continue, mistakes."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import gpt_runs
import tiny
from gpt_runs import MODULE, STEPS, flags
from nanochat_gka import evaluate, pack, train
from nanochat_gka.data.loader import PackedData, RowStream
from nanochat_gka.model.accounting import meta_model, scaling_parameters
from nanochat_gka.model.attention import GKAAttention
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.train import TrainConfig
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from tiny import events, final, metrics
from tiny_gpt import PRESET
from tiny_pack import config, rewrite_json
from trainkit_gka import checkpoint
from trainkit_gka.distributed import Runtime
from trainkit_gka.files import sha256


def test_finished_run_learned_and_is_recorded(packed, tmp_path):
    assert "finished, validation bpb" in tiny.call(MODULE, *flags(packed, tmp_path)).stdout
    losses = [record["loss"] for record in events(tmp_path, "train")]
    assert losses[-1] < losses[0] - 0.5
    first, *_, last = events(tmp_path, "eval")
    assert last["val_bpb"] < first["val_bpb"] and last["sigma"]["layer_0"] != first["sigma"]["layer_0"]
    result = metrics(tmp_path)
    assert result["train_tokens"] == STEPS * 8 * tiny.SEQUENCE_LEN and result["warnings"] == []
    assert result["train_flops"] == result["train_tokens"] * result["flops_per_token"]
    assert "already trained" in tiny.call(MODULE, *flags(packed, tmp_path)).stdout


@pytest.mark.parametrize(
    "settings, tag",
    [
        ({}, "d20-gka"),
        (dict(attention="softmax", value_embeds="none"), "d20-softmax-no-VE"),
        (dict(attention="softmax", gka_values="unrotated", offset_layers="all"), "d20-softmax-everywhere"),
        (dict(attention="GGGA", value_embeds="every-layer"), "d20-GGGA-VE-every-layer"),
        (PRESET, "d20-preset"),
        (dict(document_mask=True), "d20-gka-documents"),
        (dict(gka_values="unrotated", model_tag="mine"), "mine"),
    ],
    ids=str,
)
def test_each_form_has_a_run_name(settings, tag):
    assert TrainConfig(depth=20, **settings).tag == tag


def test_a_run_of_the_preset_goes_on_under_its_former_name_and_values(tmp_path):
    config, name = TrainConfig(depth=20, out=tmp_path, **PRESET), "d20-gka-PS-normalised-channels-gates-VE"
    saved = config.identity() | {"gka_values": "normalised", "value_embeds": "all"}
    (tmp_path / name).mkdir()
    assert config.tag == name
    config.check_continues(saved)
    with tiny.one_line_error("--value-embeds is"):
        config.check_continues(saved | {"value_embeds": "none"})


def test_evaluation_finds_the_rows_of_the_run(packed, tmp_path, capsys):
    """Where they were; or beside the run, when both were moved. If they are gone, it names their old place."""

    def evaluation(folder, *more):
        """Exit code and output of evaluating a run."""
        words = ["--run", folder, "--results", folder.parent / "bpb.jsonl", "--eval", "bpb", "--split-tokens", 512]
        code = tiny.exit_code(evaluate.main, evaluate.EvaluateConfig, *words, "--device-type", "cpu", *more)
        return code, *capsys.readouterr()

    shutil.copytree(packed / "packed", tmp_path / "there/packed")
    gpt_runs.train(tmp_path / "there", tmp_path / "there/out", "--num-iterations", 2)
    folder = tmp_path / "there/out/run"
    capsys.readouterr()
    named = evaluation(folder, "--data", packed / "packed")
    assert "val bpb: " in named[1] and evaluation(folder) == named
    (tmp_path / "there").rename(tmp_path / "moved")
    folder = tmp_path / "moved/out/run"
    for place in (folder, folder / "checkpoints/step_00000002"):
        assert evaluation(place)[:2] == named[:2]
        last = (place.parent / "bpb.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["config"]["run"] == "run"  # of a checkpoint too
    (tmp_path / "moved/packed").rename(tmp_path / "hidden")
    code, _, error = evaluation(folder)
    assert code == 2 and error.count("\n") == 1 and "there/packed" in error and "--data FOLDER" in error


def test_the_trainer_follows_the_schedule(packed, tmp_path, one_thread):
    """The run, step by step with the pieces that have golden numbers of their own: bit-identical weights.

    Base rates that matter, warm-up, warm-down to a fraction, and decay; one micro-batch per step, so that sums have one
    order.
    """
    schedule = ["--warmup-ratio", 0.25, "--warmdown-ratio", 0.5, "--final-lr-frac", 0.1]
    steps, more = 8, [*schedule, "--device-batch-size", 8, "--matrix-lr", 0.5, "--weight-decay", 2]
    assert gpt_runs.train(packed, tmp_path, "--num-iterations", steps, *more) == 0
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
    trained = load_file(tmp_path / f"run/checkpoints/step_{steps:08d}/model.safetensors")
    torch.testing.assert_close(trained, dict(model.state_dict()), rtol=1e-6, atol=1e-7)


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

    Momentum and first moments after the step are the gradient plus terms that all runs share.
    """
    start, before, one = trained_a_little
    shutil.copytree(start, tmp_path / "run-of-ranks")
    state = optimizer_after(packed, tmp_path / "run-of-ranks", 7, *more, ranks=ranks)
    gradients = [name for name in before if name.endswith((".momentum_buffer", ".exp_avg")) and "second" not in name]
    assert len(gradients) == 16
    for name in gradients:
        change = one[name] - before[name]
        assert change.norm() > 0, name
        assert (state[name] - one[name]).norm() < 1e-5 * change.norm(), name


def add_settings(folder, **settings):
    """Add settings to those of the model and the run in the newest checkpoint, as runs of the study have them."""
    at = checkpoint.load_newest(folder / "checkpoints").path
    state = json.loads((at / "state.json").read_text())
    rewrite_json(at / "state.json", **{name: state[name] | settings for name in ("model_config", "train_config")})
    rewrite_json(at / "manifest.json", **{"state.json": sha256(at / "state.json")})


def test_a_run_of_the_study_goes_on_and_research_forms_name_their_commit(packed, tmp_path, capsys):
    words, research = ["--num-iterations", 4], dict(mixing="none", rotary="full", kernel="gaussian", gka_window=0)
    research |= dict(short_conv=0, short_conv_lr=0.02, project_value_embeds=False)
    gpt_runs.train(packed, tmp_path / "whole", *words)
    gpt_runs.train(packed, tmp_path, *words, "--stop-after", 2)
    add_settings(tmp_path / "run", **research)
    assert load(tmp_path / "run").step == 2
    shutil.copytree(tmp_path / "run", tmp_path / "research/run")
    assert gpt_runs.train(packed, tmp_path, *words) == 0
    assert final(tmp_path, 4) == final(tmp_path / "whole", 4)
    add_settings(tmp_path / "research/run", kernel="mean")
    error = gpt_runs.refused(packed, tmp_path / "research", *words)
    assert "kernel=mean" in error and "0438d460" in error
    with tiny.one_line_error("kernel=mean .*0438d460"):
        load(tmp_path / "research/run")


# Mistakes are one line

BAD = [
    ("--max-seq-len 64", "--max-seq-len 64 but .* holds rows of 32 tokens"),
    ("--total-batch-size 100", "--total-batch-size must be a multiple of .* 32, got 100"),
    ("--total-batch-size 64000", "[0-9]+ training rows and a step takes 2,000: give more text"),
    ("--attention linear", "or a pattern of their letters such as GGGA, got 'linear'"),
    ("--weight-decay 1e6", "--weight-decay with --matrix-lr would take .* away in one step"),
    ("--depth 1000 --attention softmax", r"--depth 1000 is a model of \d.* parameters .* GB of memory and there are"),
]


@pytest.mark.parametrize("more,message", BAD)
def test_bad_flags_are_one_line(packed, tmp_path, more, message):
    assert re.search(message, gpt_runs.refused(packed, tmp_path, *more.split()))


def test_more_processes_than_rows_are_refused():
    training = TrainConfig(depth=2, num_iterations=1, total_batch_size=8 * tiny.SEQUENCE_LEN)
    model = meta_model(training.shape(2, tiny.SEQUENCE_LEN, 300))
    with tiny.one_line_error("8 rows for 9 processes; raise --total-batch-size"):
        training.horizon(model, processes=9)


def test_dense_masks_of_documents_are_small(packed, tmp_path, monkeypatch):
    """Here of 64 tokens, two rows: sdpa, which other processors fall back on, mixes all rows at once."""
    monkeypatch.setattr(train, "MOST_PACKED", 64)
    monkeypatch.setattr(GKAAttention, "operator", lambda *_: "sdpa")
    shape = dict(depth=2, aspect_ratio=16, head_dim=16, num_iterations=1, total_batch_size=8 * tiny.SEQUENCE_LEN)
    settings = dict(data=packed / "packed", out=tmp_path, device_batch_size=8, **shape)
    for document_mask, rows in ((True, 2), (False, 8)):
        one = TrainConfig(document_mask=document_mask, **settings)
        assert train.Trainer(one, Runtime(0, 1, torch.device("cpu"))).batch_size == rows
    monkeypatch.setattr(train, "MOST_PACKED", 31)
    for attention in ("gka", "softmax"):
        error = gpt_runs.refused(packed, tmp_path, "--document-mask", "--attention", attention)
        assert "rows have 32: pack rows of at most 31 tokens" in error


@pytest.mark.parametrize("local_rank, checks", [("0", True), ("1", False)])
def test_every_machine_checks_its_own_copy_of_the_rows(packed, tmp_path, monkeypatch, capsys, local_rank, checks):
    """By its first process: here one byte is wrong."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    shutil.copytree(packed / "packed", tmp_path / "packed")
    shard = next((tmp_path / "packed").glob("train_0*.bin"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    code = gpt_runs.train(tmp_path, tmp_path, "--num-iterations", 1)
    assert code == (2 if checks else 0) and ("wrong checksum" in capsys.readouterr().err) == checks


def test_nonfinite_gradient_names_the_last_checkpoint(packed, tmp_path):
    for _ in range(2):
        error = gpt_runs.refused(packed, tmp_path, "--embedding-lr", "1e38")
    assert re.search(r"the gradient is not finite at step \d+; the weights were not touched. Last checkpoint: ", error)


def test_rows_of_another_length_and_another_dtype_are_refused(packed, tmp_path):
    pack.main(config(packed, tmp_path / "longer", sequence_len=64))
    assert gpt_runs.train(packed, tmp_path, "--stop-after", 2) == 0
    refused = gpt_runs.refused(packed, tmp_path, "--data", tmp_path / "longer")
    assert "was packed with another context length than the run in" in refused
    assert "--dtype is bfloat16 but the run in" in gpt_runs.refused(packed, tmp_path, "--dtype", "bfloat16")
