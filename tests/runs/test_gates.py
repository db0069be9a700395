"""The gates of the benchmarks: what is right passes, and what is wrong is stopped before the clock."""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gka import testing
from runs.bench import deit, gpt
from runs.bench.models import gradient
from runs.bench.operators import FORWARD, FULL, Case, gate, operators
from trainkit.distributed import setup

CPU = torch.device("cpu")
CASES = ["2x19x2x16", "3x19x2x16c", "2x33x2x16cw7n", "2x19x2x16n", "2x20x2x16nd"]


@pytest.mark.parametrize("text", CASES)
def test_every_operator_of_a_cpu_passes_its_gate(text):
    case = Case.parse(text)
    for phase in (FORWARD,) if case.queries else (FORWARD, FULL):
        candidates = operators(case, CPU, torch.float32, phase)
        assert [operator.role == "ours" for operator in candidates.values()] == [True] + [False] * (len(candidates) - 1)
        for name, operator in candidates.items():
            if "triton" not in name:
                assert gate(operator, case, phase, CPU, torch.float32) is None, name


@pytest.mark.parametrize("family", ["gka", "softmax"])
def test_the_gate_stops_what_is_wrong(family):
    case = Case.parse("3x19x2x16c")
    right = operators(case, CPU, torch.float32, FULL)[f"{family} sdpa"]

    def judge(change, phase=FULL):
        changed = replace(right, function=lambda *tensors: change(right.function(*tensors), tensors))
        return gate(changed, case, phase, CPU, torch.float32)

    assert judge(lambda y, tensors: y) is None
    assert "y is off by 1.0e-03" in judge(lambda y, tensors: 1.001 * y, FORWARD)
    assert "y is off by nan" in judge(lambda y, tensors: y * float("nan"), FORWARD)
    last = torch.zeros(3, 1, 1, 1)
    last[-1] = 1e-3
    assert "y is off" in judge(lambda y, tensors: y + last, FORWARD)
    place, name = {"gka": (1, "dlog_sigma"), "softmax": (2, "dv")}[family]
    assert name in judge(lambda y, tensors: y + (tensors[place] - tensors[place].detach()).sum() * 0.01)


@pytest.mark.parametrize("kind", ["softmax", "gka"])
def test_the_gate_of_a_whole_language_model_stops_what_is_wrong(kind):
    config = gpt.GPTBenchConfig(depth=1, batch_size=2, sequence_len=16, vocab_size=64).fill("cpu")
    candidate = gpt.Candidate(kind, config, setup("cpu"))
    right, model = candidate.network, candidate.model
    for phase in (gpt.TRAINING, gpt.PREFILL):
        candidate.network = right
        assert candidate.gate(phase) is None
        candidate.network = lambda *arguments: 1.001 * right(*arguments)
        assert "is off by 1.0e-03" in candidate.gate(phase)
    if kind == "gka":  # attention matters in the timed model: another bandwidth is another gradient
        before = gradient(model, lambda: model(candidate.ids, candidate.targets))
        with torch.no_grad():
            model.transformer.h[0].attn.log_sigma -= 1
        assert testing.error(gradient(model, lambda: model(candidate.ids, candidate.targets)), before) > 0.01


@pytest.mark.parametrize(
    "kind, phase", [("gka", deit.INFERENCE), ("gka", deit.TRAINING), (deit.UNFUSED, deit.TRAINING)]
)
def test_the_gate_of_a_whole_vision_model_stops_what_is_wrong(kind, phase):
    candidate = deit.Candidate(kind, "ti", phase, 3, deit.DeitConfig(compile_mode="off").fill("cpu"), CPU)
    assert candidate.gate() is None
    right = candidate.network
    candidate.network = lambda images: 1.01 * right(images)
    assert "is off by" in candidate.gate()


def test_the_unfused_model_builds_w_and_gives_the_fused_models_logits():
    """With the same weights; the sums of W's rows are what its fused twin never has."""
    fused, unfused = (deit.create(kind, "ti", "").eval() for kind in ("gka", deit.UNFUSED))
    unfused.load_state_dict(fused.state_dict())
    images, seen = torch.randn(2, 3, deit.PIXELS, deit.PIXELS), []

    class Products(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.shape[-2:] == (197, 197):
                seen.append(function)
            return result

    with torch.inference_mode():
        with Products():
            logits = fused(images)
        assert not seen
        with Products():
            assert torch.allclose(unfused(images), logits, rtol=1e-4, atol=1e-5)
    assert len(seen) >= 3 * len(unfused.blocks)  # distances, affinities, W
