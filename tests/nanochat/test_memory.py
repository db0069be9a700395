"""The memory arithmetic against torch: parameters counted, saved tensors weighed; rows at once change no result."""

import pytest
import torch

from nanochat_gka.data.loader import PackedData, RowStream
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import GPT, build
from nanochat_gka.train import accumulate_gradients
from nanochat_gka.training import memory
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from tiny import one_line_error
from tiny_gpt import awake
from trainkit_gka.distributed import Runtime

GKA_FORMS = [dict(gka_values="rotated"), dict(gka_values="normalised"), dict(head_offsets="PS")]
GKA_FORMS += [dict(head_offsets="PNSS", value_embeds="all"), dict(channel_bandwidths=True, head_gates=True)]
KINDS = [dict(attention=attention) for attention in ("softmax", "vlt", "gka", "GGGA")]
KINDS += [dict(attention="gka", **form) for form in GKA_FORMS]
KINDS += [dict(attention="VA", head_offsets="PS", offset_layers="all"), dict(attention="GA", head_offsets="PS")]
CPU = torch.device("cpu")
ALONE = Runtime(0, 1, CPU)
GIB = 2**30


def shape(**fields) -> GPTConfig:
    sizes = dict(sequence_len=64, vocab_size=500, n_layer=4, n_head=4, n_kv_head=4, n_embd=128, window_pattern="L")
    return GPTConfig(**{**sizes, **fields})


def saved_bytes(model: GPT, rows: int) -> int:
    """What autograd keeps between forward and backward, each storage once, the weights left out."""
    kept = {}

    def weigh(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.zeros(rows, model.config.sequence_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        loss = model(ids, ids, reduction="sum")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert loss.requires_grad
    return sum(size for pointer, (size, _) in kept.items() if pointer not in weights)


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_activations_are_what_autograd_keeps(fields):
    """Per row, by the difference of two batches. Two gradients as large as the logits (8 V bytes) come later."""
    model = build(shape(**fields), "cpu")
    config = model.config
    kept = saved_bytes(model, 3) - saved_bytes(model, 2)
    expected = memory.row_bytes(config, "cpu") - 8 * config.padded_vocab_size * config.sequence_len
    assert 0.8 < kept / expected < 1.05, kept / expected


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_fixed_bytes_are_what_the_optimiser_holds(fields):
    """Within a hundredth: Muon's second moments are not counted."""
    model = build(shape(**fields), "cpu")
    optimizer = MuonAdamW(parameter_groups(model, OptimConfig()), Runtime(0, 1, torch.device("cpu")))
    held = sum(8 * parameter.numel() for parameter in model.parameters())
    held += sum(4 * tensor.numel() for group in optimizer.groups for tensor in group.state.values())
    assert abs(memory.fixed_bytes(model.config, "cpu")[0] / held - 1) < 0.01


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
    with one_line_error("not even one row fits the GPU's memory; lower --depth"):
        memory.largest_that_runs(4, attempt, runtime)


@pytest.fixture
def model_and_stream(packed):
    data = PackedData(packed / "packed")
    fields = dict(sequence_len=data.sequence_len, vocab_size=data.tokenizer.vocab_size, attention="GA")
    return awake(shape(**fields)), RowStream(data.split("train"), 42)


def test_a_dry_step_holds_and_compiles_what_a_step_does(model_and_stream):
    """Where a step has several micro-batches, all but the first find its gradients in memory."""
    plain, stream = model_and_stream
    compiled, found = [], []

    def backend(graph, inputs):
        compiled.append(len(inputs))
        return graph.forward

    whole = torch.compile(plain, backend=backend, dynamic=False)

    def model(ids, targets, reduction):
        found.append((len(ids), sum(parameter.grad is not None for parameter in plain.parameters())))
        return whole(ids.contiguous(), targets.contiguous(), reduction=reduction)  # as on CUDA

    memory.dry_step(model, 8, 4, stream.rows.sequence_len, CPU)
    plain.zero_grad()
    graphs = len(compiled)
    accumulate_gradients(model, stream, 0, 8, 4, ALONE)
    assert found == [(4, 0), (4, len(list(plain.parameters())))] * 2
    assert graphs == len(compiled) > 0
