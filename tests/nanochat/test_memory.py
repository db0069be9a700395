"""The memory arithmetic against torch: parameters counted, saved tensors weighed; a dry step leaves nothing behind."""

import random

import pytest
import torch

import gpt_checks
import tiny
from nanochat_gka import train
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.train import Trainer, accumulate_gradients
from nanochat_gka.training import memory
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import Runtime

GKA_FORMS = [dict(gka_values="rotated"), dict(gka_values="normalised"), dict(head_offsets="PS")]
GKA_FORMS += [dict(head_offsets="PNSS", value_embeds="all"), dict(channel_bandwidths=True, head_gates=True)]
KINDS = [dict(attention=attention) for attention in ("softmax", "vlt", "gka", "GGGA")]
KINDS += [dict(attention="gka", **form) for form in GKA_FORMS]
KINDS += [dict(attention="VA", head_offsets="PS", offset_layers="all"), dict(attention="GA", head_offsets="PS")]
CPU = torch.device("cpu")
GIB = 2**30


def shape(**fields) -> GPTConfig:
    return GPTConfig(
        **{
            "sequence_len": 64,
            "vocab_size": 500,
            "n_layer": 4,
            "n_head": 4,
            "n_kv_head": 4,
            "n_embd": 128,
            "window_pattern": "L",
            **fields,
        }
    )


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_activations_are_what_autograd_keeps(fields):
    gpt_checks.activations_are_what_autograd_keeps(build(shape(**fields), "cpu"))


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_memory_is_counted_without_a_model(fields):
    gpt_checks.memory_is_what_the_optimiser_holds(build(shape(**fields), "cpu"))


@pytest.mark.parametrize("fields", [KINDS[0], KINDS[6], KINDS[-1]], ids=str)
def test_the_optimizers_state_is_dealt_out(fields):
    """On each of three ranks: what the optimiser allocates, padding and small tensors that all ranks keep included."""
    config = shape(n_layer=6, **fields)
    model = build(config, "cpu")
    held = [sum(8 * parameter.numel() for parameter in model.parameters())] * 3
    for rank in range(3):
        optimizer = MuonAdamW(parameter_groups(model, OptimConfig()), Runtime(rank, 3, CPU))
        held[rank] += sum(4 * tensor.numel() for group in optimizer.groups for tensor in group.state.values())
    assert len(set(held)) == 1
    assert memory.fixed_bytes(config, "cpu", ranks=3)[0] == pytest.approx(held[0], rel=0.01)
    assert memory.fixed_bytes(config, "cpu")[0] > 1.2 * held[0]


def test_the_papers_model_on_the_usual_gpus():
    """d20 at 2,048 tokens: rows grow with the memory, from a card of 24 GB on, to upstream's 32 rows and no more."""
    for attention in ("softmax", "gka"):
        config = GPTConfig.from_depth(20, attention=attention)
        rows = [memory.rows_at_once(config, "cuda", size * GIB) for size in (24, 32, 80, 141)]
        assert rows == sorted(rows) and rows[0] >= 2 and rows[2] >= 16 and rows[3] == 32
        for size, count in zip((24, 32, 80), rows):
            held = memory.fixed_bytes(config, "cuda")
            assert held[0] + max(held[1], count * memory.row_bytes(config, "cuda")) < size * GIB


class Ranks(Runtime):
    """A run whose other rank cannot take more than `limit` rows."""

    limit = 3

    def any(self, flag: bool) -> bool:
        return flag or self.asked > self.limit


def test_rows_are_halved_until_they_fit_every_rank():
    tried = []

    def attempt(rows):
        tried.append(rows)
        runtime.__dict__["asked"] = rows
        if rows > 10:
            raise torch.OutOfMemoryError("full")

    runtime = Ranks(0, 2, CPU)
    assert memory.largest_that_runs(25, attempt, runtime) == 2 and tried == [25, 13, 7, 4, 2]
    runtime.__dict__["limit"] = 0
    with pytest.raises(UserError, match="not even one row fits the GPU's memory; lower --depth"):
        memory.largest_that_runs(4, attempt, runtime)


def config(packed, out, *more) -> train.TrainConfig:
    flags = [
        "--data",
        packed / "packed",
        "--out",
        out,
        "--results",
        out / "results.jsonl",
        *tiny.TRAIN_FLAGS,
        "--attention",
        "GA",
        "--model-tag",
        "run",
    ]
    import tyro

    return tyro.cli(train.TrainConfig, args=[str(flag) for flag in (*flags, "--num-iterations", 6, *more)])


def test_a_dry_step_leaves_no_trace(packed, tmp_path):
    trainer = Trainer(config(packed, tmp_path), Runtime(0, 1, CPU))
    before = {
        name: tensor.clone() for name, tensor in (trainer.model.state_dict() | trainer.optimizer.state_dict()).items()
    }
    states = torch.get_rng_state(), random.getstate()
    trainer.dry_step(5)
    after = trainer.model.state_dict() | trainer.optimizer.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_a_dry_step_holds_what_a_step_holds(packed, tmp_path):
    """Where a step has several micro-batches, all but the first find its gradients in memory.

    And what it compiles is what training runs.
    """
    trainer = Trainer(config(packed, tmp_path), Runtime(0, 1, CPU))
    compiled, found = [], []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    whole = torch.compile(trainer.model, backend=backend, dynamic=False)

    def model(ids, targets, reduction):
        found.append((len(ids), sum(parameter.grad is not None for parameter in trainer.model.parameters())))
        return whole(ids.contiguous(), targets.contiguous(), reduction=reduction)  # as on CUDA

    trainer.compiled, parameters = model, len(list(trainer.model.parameters()))
    assert trainer.rows == 8
    trainer.dry_step(4)
    graphs = len(compiled)
    accumulate_gradients(model, trainer.stream, 0, trainer.rows, 4, trainer.runtime)
    assert found == [(4, 0), (4, parameters)] * 2
    assert graphs == len(compiled) > 0
    trainer.optimizer.zero_grad()
    trainer.dry_step(8)
    assert found[4:] == [(8, 0)]


def test_auto_is_the_same_update(packed, tmp_path):
    """Rows at once decide the order of sums and nothing else."""
    gradients = []
    for size in ("auto", "1", "3"):
        torch.manual_seed(0)
        trainer = Trainer(config(packed, tmp_path, "--device-batch-size", size), Runtime(0, 1, CPU))
        assert (trainer.batch_size == 8) if size == "auto" else (trainer.batch_size == int(size))
        with torch.no_grad():
            for block in trainer.model.transformer.h:
                block.attn.c_proj.weight.normal_(std=0.1)
                block.mlp.c_proj.weight.normal_(std=0.1)
        loss = accumulate_gradients(trainer.model, trainer.stream, 0, trainer.rows, trainer.batch_size, trainer.runtime)
        gradients.append([loss, *(parameter.grad for parameter in trainer.model.parameters())])
    for other in gradients[1:]:
        for one, two in zip(gradients[0], other):
            assert (one - two).norm() <= 1e-5 * one.norm()


def test_too_large_model_is_refused_before_building(packed, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        argv = ["--data", packed / "packed", "--out", tmp_path, "--results", tmp_path / "results.jsonl"]
        run(
            train.main,
            train.TrainConfig,
            [*map(str, argv), "--attention", "softmax", "--depth", "10000", "--device-type", "cpu"],
        )
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --depth 10000 is a model of 4.9")
    assert "e+16 parameters (width 640,000)" in message
    assert message.count("\n") == 1 and "GB of memory and there are" in message
