"""The gates of the benchmarks: what is right passes, and what is wrong is stopped before the clock."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend

from gka import testing
from gka.impl.cpu import build
from gka.masking import Mask
from runs.bench import baselines, deit, gpt, models
from runs.bench.models import EAGER, TRAINING
from runs.bench.operators import FORWARD, FULL, Case, gate, operators
from trainkit_gka.compiling import BLOCKS
from trainkit_gka.distributed import setup

CPU = torch.device("cpu")
ABSENT = ("triton", "gka cpu") if build.obstacle() else ("triton",)
GPT = gpt.Case.parse("d2-b2-t16-v64", "cpu")
CASES = ["3x33x2x16p5", "3x33x2x16p33", "2x19x2x16", "3x19x2x16c", "2x70x2x16cw7n", "2x70x2x16w66", "2x19x2x16n"]
CASES += ["2x20x2x16nd", "2x20x2x16ndk", "2x19x2x16v", "2x20x2x16cw7nvk", "1x520x1x16cn"]


def language(kind, dtype="float32", phase=TRAINING, mode="off", case=GPT):
    return gpt.LanguageCandidate(gpt.LanguageSubject(case, phase, setup("cpu"), kind), dtype, mode)


def vision(kind, dtype="float32", phase=TRAINING, batch=1, mode="off"):
    case = deit.Case.parse(f"deit-ti-b{batch}", "cpu")
    return models.Candidate(deit.VisionSubject(case, phase, CPU, kind), dtype, mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", CASES)
def test_every_operator_of_a_cpu_passes_its_gate(text, dtype, monkeypatch):
    monkeypatch.setattr(baselines, "PRODUCTS_BLOCK", 16)  # so that these lengths have several
    case = Case.parse(text)
    for phase in (FORWARD,) if case.queries else (FORWARD, FULL):
        candidates = operators(case, CPU, dtype, phase)
        assert [operator.role == "ours" for operator in candidates.values()] == [True] + [False] * (len(candidates) - 1)
        for name, operator in candidates.items():
            if not any(absent in name for absent in ABSENT):
                assert gate(operator, case, phase, CPU) is None, name


def test_bfloat16_is_compared_with_both_dtypes_of_softmax_and_a_window_with_blocks():
    candidates = operators(Case.parse("2x70x2x16cw7n"), CPU, torch.bfloat16, FULL)
    softmax = {name: each.dtype for name, each in candidates.items() if each.role == "baseline"}
    kernels = ["softmax dense mask", "softmax products", "softmax blocks of 64"]
    assert softmax == {**dict.fromkeys(kernels, torch.bfloat16)} | {
        f"{name}, float32": torch.float32 for name in kernels
    }
    assert {each.dtype for each in candidates.values() if each.family == "gka"} == {torch.bfloat16}
    assert "softmax blocks of 64" not in operators(Case.parse("2x70x2x16cn"), CPU, torch.float32, FULL)


def test_products_leave_out_what_the_mask_hides():
    """A key that is NaN reaches the queries that see it alone; decoding reads the keys of its window alone."""
    q, k, v = (testing.make_features("normal", (1, 20, 2, 16), seed=seed) for seed in range(3))
    k[:, 19] = float("nan")
    y = baselines.products(Mask(causal=True))(q, k, v)
    assert y[:, :19].isfinite().all() and y[:, 19].isnan().all()
    torch.testing.assert_close(
        baselines.products(Mask(True, 4))(q[:, 18:19], k[:, :19], v[:, :19]),
        baselines.products(Mask(True, 4))(q[:, :19], k[:, :19], v[:, :19])[:, 18:],
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_softmax_language_models_take_products_where_these_are_faster(compiled, monkeypatch):
    """Whole softmax models are timed at their fastest: in bfloat16 on a CPU that multiplies it, while memory allows."""
    calls, products = [], baselines.products
    monkeypatch.setattr(baselines, "products", lambda mask: calls.append(mask) or products(mask))
    monkeypatch.setattr(baselines, "multiplies_bfloat16", lambda: True)

    def layers_with_products(dtype: str) -> int:
        torch._dynamo.reset()
        calls.clear()
        one = language("softmax", dtype)
        network = torch.compile(one.model, backend="aot_eager", fullgraph=True) if compiled else one.model
        network(one.subject.inputs, one.subject.targets).backward()
        return len(calls)

    assert layers_with_products("bfloat16") == 0
    with baselines.fastest_in_language_models():
        assert layers_with_products("bfloat16") == 2
        assert layers_with_products("float32") == 0
        monkeypatch.setattr(baselines, "MOST_SCORES", 0)
        assert layers_with_products("bfloat16") == 0


@pytest.mark.parametrize("family", ["gka", "softmax"])
def test_the_gate_stops_what_is_wrong(family):
    case = Case.parse("3x19x2x16c")
    right = operators(case, CPU, torch.float32, FULL)[f"{family} sdpa"]

    def judge(change, phase=FULL):
        def function(x, log_sigma, *, keys, values):
            y = right.function(x, log_sigma, keys=keys, values=values)
            return change(y, log_sigma if family == "gka" else values)

        return gate(replace(right, function=function), case, phase, CPU)

    assert judge(lambda y, other: y) is None
    assert "y is off by 1.0e-03" in judge(lambda y, other: 1.001 * y, FORWARD)
    assert "y is off by nan" in judge(lambda y, other: y * float("nan"), FORWARD)
    last = torch.zeros(3, 1, 1, 1)
    last[-1] = 1e-3
    assert "y is off" in judge(lambda y, other: y + last, FORWARD)
    name = {"gka": "dlog_sigma", "softmax": "dvalues"}[family]
    assert name in judge(lambda y, other: y + (other - other.detach()).sum() * 0.01)


LANGUAGE = [("softmax", "float32"), ("gka", "float32"), ("gka-preset", "bfloat16"), ("softmax-preset", "float32")]
WHOLE = [(language, *one, phase) for one in LANGUAGE for phase in (TRAINING, gpt.PREFILL, "decode-8")]
WHOLE += [(vision, "gka", "float32", deit.INFERENCE), (vision, "gka", "bfloat16", TRAINING)]
WHOLE += [(vision, deit.UNFUSED, "float32", TRAINING), (vision, deit.SOFTMAX_UNFUSED, "bfloat16", TRAINING)]


@pytest.mark.parametrize("build, kind, dtype, phase", WHOLE)
def test_the_gate_of_a_whole_model_stops_what_is_wrong(build, kind, dtype, phase):
    candidate = build(kind, dtype, phase)
    assert candidate.gate() is None
    place = "decoder" if phase == "decode-8" else "network"
    right, factor = getattr(candidate, place), {language: 1.001, vision: 1.01}[build] if dtype == "float32" else 1.1

    def wrong(*arguments, **options):
        answer = right(*arguments, **options)
        return (None, lambda n: factor * answer[1](n)) if place == "decoder" else factor * answer

    setattr(candidate, place, wrong)
    assert "is off by" in candidate.gate()


def gradient_of(one):
    return models.gradient(one.model, lambda: one.model(one.subject.inputs, one.subject.targets))


@pytest.mark.parametrize("kind, programs", [("gka", 3), (models.HELD, 4), ("vision", 1)])
def test_blocks_are_compiled_one_by_one_and_those_that_are_alike_once(kind, programs, monkeypatch):
    """A language model has its loss beside its blocks, which differ in windows and, of softmax, in value embeddings."""
    monkeypatch.setattr(models, "SDPBackend", SimpleNamespace(CUDNN_ATTENTION=SDPBackend.MATH))
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    case = gpt.Case.parse("d8-b2-t16-v64-SSSL", "cpu")
    candidate = vision("gka", mode=BLOCKS) if kind == "vision" else language(kind, mode=BLOCKS, case=case)
    assert candidate.gate() is None and counter.frame_count == programs


def test_of_a_large_gradient_a_sample_is_judged(monkeypatch):
    one = language("gka")
    every = gradient_of(one)
    monkeypatch.setattr(models, "MOST_JUDGED", 1000)
    some = gradient_of(one)
    assert 500 < len(some) < 1500 and torch.isin(some, every).all()


def test_attention_matters_in_the_timed_model():
    """Another bandwidth is another gradient."""
    one = language("gka")
    before = gradient_of(one)
    with torch.no_grad():
        one.model.transformer.h[0].attn.log_sigma -= 1
    after = gradient_of(one)
    assert testing.error(after, before) > 0.01


@pytest.mark.parametrize("build", [language, vision])
def test_candidates_of_one_kind_share_weights_and_leave_them_as_they_are(build):
    single = build("gka")
    half = type(single)(single.subject, "bfloat16")
    assert all(a is b for a, b in zip(single.model.parameters(), half.model.parameters(), strict=True))
    before = [p.detach().clone() for p in single.subject.model.parameters()]
    for candidate in (single, half):
        candidate.step(0)
    assert all(map(torch.equal, before, single.subject.model.parameters()))


def test_eager_models_are_timed_beside_compiled_ones_on_a_cpu_but_do_not_decode_twice():
    config = gpt.GPTBenchConfig(dtypes=["float32"], skip=["preset"])
    both = models.keys_of(gpt.KINDS, config, "default", CPU)
    assert {key.mode for key in both} == {"", EAGER} and not [key for key in both if "preset" in key.kind]
    assert {key.mode for key in models.keys_of(gpt.KINDS, config, "off", CPU)} == {""}
    modes = {phase: [key.mode for key in both if gpt.takes_part(key, phase, "float32")] for phase in gpt.PHASES}
    assert modes == {
        TRAINING: ["", EAGER] * 3, gpt.PREFILL: ["", EAGER] * 2, "decode-1": [""] * 4, "decode-8": [""] * 4
    }  # fmt: skip


def test_the_unfused_model_is_the_papers_formula_and_gives_the_fused_models_logits(monkeypatch):
    """With the same weights; `plain_attention` builds distances, affinities and W, which the fused model never has."""
    fused, unfused = (deit.create(kind, "ti").eval() for kind in ("gka", deit.UNFUSED))
    unfused.load_state_dict(fused.state_dict())
    plain, calls = deit.plain_attention, []
    monkeypatch.setattr(deit, "plain_attention", lambda *tensors: calls.append(1) or plain(*tensors))
    images = torch.randn(2, 3, deit.PIXELS, deit.PIXELS)
    with torch.inference_mode():
        logits = fused(images)
        assert not calls and torch.allclose(unfused(images), logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == len(unfused.blocks)
