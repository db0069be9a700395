"""Packed sequences: every document is as if it were called alone, in outputs and all gradients."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from gka import (
    GaussianKernelAttention,
    dot_product_attention,
    gaussian_attention,
    gaussian_weights,
    select_impl,
    testing,
)
from gka.dispatch import IMPLEMENTATIONS
from gka.impl import sdpa
from gka.masking import Mask, document_bounds
from gka.offsets import HeadOffsets
from gka.testing import Problem, make_features
from operator_cases import AUTO_ON_CPU, CPU, IMPLS, STRIDES, TRITON, check_parts, gradients

DOCUMENTS = [0, 1, 7, 63, 1, 0, 130, 2, 0]  # their lengths
NUM_TOKENS = sum(DOCUMENTS)
PACKING = {"cpu": CPU, "triton": TRITON}
PACKING = [PACKING.get(name, name) for name, one in IMPLEMENTATIONS.items() if "cu_seqlens" in one.SERVES.options]
FORMS = {  # whether keys are not the queries, whether values are not the keys
    "own": (False, False),
    "values": (False, True),
    "other keys": (True, False),
    "other keys and values": (True, True),
}
MASKS = [Mask(), Mask(causal=True), Mask(causal=True, window=7), Mask(window=4), Mask(causal=True, window=100)]
NAN = float("nan")


def boundaries(lengths, dtype=torch.int32):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


def places_of(lengths):
    """The tokens of every document that has some."""
    numbers = boundaries(lengths).tolist()
    return [slice(begin, end) for begin, end in pairwise(numbers) if end > begin]


def packed_problem(form, mask, dtype, impl, lengths=DOCUMENTS, heads=2, head_dim=16):
    other_keys, with_values = FORMS[form]
    eps = 1e-6 if IMPLEMENTATIONS[impl].SERVES.applies_eps and not other_keys else 0.0
    shape = (1, sum(lengths), heads, head_dim)
    problem = Problem.seeded("normal", shape, dtype, with_values=with_values, mask=mask, eps=eps)
    if dtype == torch.float64:
        problem = replace(problem, log_sigma=problem.log_sigma.double())
    return replace(problem, keys=make_features("normal", shape, dtype, seed=3)) if other_keys else problem


def slack_of(dtype):
    return 1e-6 if dtype in (torch.float16, torch.bfloat16) else 0.0


@pytest.mark.parametrize("impl", PACKING)
@pytest.mark.parametrize("form", FORMS)
def test_a_document_is_as_if_it_were_alone(form, impl):
    masks, dtypes = MASKS, [t for t in IMPLEMENTATIONS[impl].SERVES.dtypes if t != torch.float32]
    if impl == "triton":  # whose interpreter is slow, and gets a bare tl.dot of bfloat16 wrong
        masks, dtypes = [Mask(), Mask(causal=True), Mask(window=4)], [torch.float16]
    for mask, dtype in [*((mask, torch.float32) for mask in masks), *((MASKS[2], dtype) for dtype in dtypes)]:
        problem, options = packed_problem(form, mask, dtype, impl), dict(causal=mask.causal, window=mask.window)
        got = gradients(problem, impl, cu_seqlens=boundaries(DOCUMENTS), **options)
        check_parts(problem, [(0, places, places) for places in places_of(DOCUMENTS)], got, slack_of(dtype))


@pytest.mark.parametrize("impl", PACKING)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
def test_nan_stays_in_its_document(mask, form, impl):
    """In y and the gradients of tokens, also where the loss touches it."""
    lengths = [0, 1, 7, 40, 1, 0, 19]
    options = dict(cu_seqlens=boundaries(lengths), causal=mask.causal, window=mask.window)
    clean = packed_problem(form, mask, torch.float32, impl, lengths)
    bad = clean.map(torch.Tensor.clone)
    places = places_of(lengths)[2]  # 40 tokens between documents of 7 and 1
    for t in (bad.x, bad.keys, bad.values):
        if t is not None:
            t[:, places] = NAN
    got, want = (gradients(problem, impl, **options) for problem in (bad, clean))
    assert got["y"][:, places].isnan().all()
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[places] = False
    for name in set(got) - {"dlog_sigma"}:
        torch.testing.assert_close(got[name][:, others], want[name][:, others], rtol=1e-5, atol=1e-6)


def random_case_is_wrong(seed):
    """What an implementation gets wrong of documents of random lengths, features and strides; None if it is right."""
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 2, draw.randint(0, 40), draw.randint(0, 40)]) for _ in range(draw.randint(1, 9))] + [
        1
    ]
    impl, form = draw.choice(["reference", "sdpa", *[AUTO_ON_CPU] * 3]), draw.choice(list(FORMS))
    dtype = draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    mask = Mask(draw.random() < 0.5, draw.choice([None, draw.randint(0, 50)]))
    shape = draw.randint(1, 3), draw.choice([1, 3, 8, 17, 64, 128])
    problem = packed_problem(form, mask, dtype, impl, lengths, *shape)
    strides = {name: draw.choice(list(STRIDES.values())) for name in ("x", "keys", "values")}
    problem = problem if draw.random() < 0.7 else replace(problem, grad_y=None)

    def route(x, log_sigma, **tensors):
        tensors = {name: None if t is None else strides[name](t) for name, t in tensors.items()}
        options = dict(cu_seqlens=boundaries(lengths), causal=mask.causal, window=mask.window, impl=impl)
        return gaussian_attention(strides["x"](x), log_sigma, **tensors, **options)

    try:
        got = testing.run(route, problem).named()
        complete = packed_problem(form, mask, dtype, impl, lengths, *shape)
        check_parts(complete, [(0, places, places) for places in places_of(lengths)], got, slack_of(dtype))
    except Exception as error:
        return f"seed {seed}, {impl}, {form}, {lengths}, {shape}, {dtype}, {mask}: {type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("first, last", [(0, 60), pytest.param(60, 1000, marks=pytest.mark.slow)])
def test_random_documents_strides_and_dtypes(first, last):
    wrong = list(filter(None, map(random_case_is_wrong, range(first, last))))
    assert not wrong, "\n".join([f"{len(wrong)} cases", *wrong])


@pytest.mark.parametrize("impl", IMPLS)
def test_documents_are_served_or_refused_by_name(impl):
    x, two = make_features("normal", (1, 9, 2, 16)), boundaries([4, 5])
    if "cu_seqlens" in IMPLEMENTATIONS[impl].SERVES.options:
        assert select_impl(x, cu_seqlens=two, impl=impl) == impl
    else:
        with pytest.raises(ValueError, match=f"{impl} does not serve cu_seqlens"):
            select_impl(x, cu_seqlens=two, impl=impl)


@pytest.mark.parametrize("impl", [CPU])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_documents_are_divided_among_threads(threads, impl):
    """The first has all of them where there are 8, and each has some where there is 1."""
    lengths, before = [3, 260, 0, 5, 31, 30], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for form, dtype in (("own", torch.float32), ("other keys and values", torch.float32), ("own", torch.bfloat16)):
            problem = packed_problem(form, Mask(), dtype, impl, lengths)
            got = [gradients(problem, impl, cu_seqlens=boundaries(lengths)) for _ in range(2)]
            assert all(torch.equal(got[0][name], got[1][name]) for name in got[0])
            check_parts(problem, [(0, places, places) for places in places_of(lengths)], got[0], slack_of(dtype))
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(AUTO_ON_CPU != "cpu", reason="the CPU kernel cannot be built here")
def test_boundaries_that_a_transform_hides_are_checked_before_memory_is_read():
    x = torch.randn(2, 1, 5, 2, 4)
    for wrong in ([[0, 3, 900], [0, 2, 5]], [[0, 2, 5], [0, -30, 5]]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the number of tokens, 5"):
            torch.func.vmap(lambda x, n: gaussian_attention(x, torch.zeros(2), cu_seqlens=n))(
                x, torch.tensor(wrong).int()
            )


@pytest.mark.parametrize("impl", ["sdpa"])
@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
def test_the_softmax_baseline_of_documents(mask, impl):
    q, k, v = (
        make_features("normal", (1, NUM_TOKENS, 2, 16), torch.float64, seed).requires_grad_() for seed in range(3)
    )
    options = dict(causal=mask.causal, window=mask.window, impl=impl)
    got = dot_product_attention(q, k, v, cu_seqlens=boundaries(DOCUMENTS), **options)
    parts = [dot_product_attention(*(t[:, at] for t in (q, k, v)), **options) for at in places_of(DOCUMENTS)]
    want, grad_y = torch.cat(parts, 1), torch.randn_like(q)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(y, (q, k, v), grad_y) for y in (got, want)), rtol=1e-9, atol=1e-9)


def test_weights_are_blocks_on_the_diagonal():
    x = make_features("normal", (1, 9, 2, 8), torch.float64)
    got = gaussian_weights(x, torch.zeros(2), cu_seqlens=boundaries([2, 0, 6, 1]), causal=True)
    want = torch.zeros(1, 2, 9, 9, dtype=torch.float64)
    for at in (slice(0, 2), slice(2, 8), slice(8, 9)):
        want[..., at, at] = gaussian_weights(x[:, at], torch.zeros(2), causal=True)
    torch.testing.assert_close(got, want)


def test_bounds_of_documents():
    starts, ends = document_bounds(boundaries([0, 2, 0, 3, 1, 0]), 6)
    assert (starts.tolist(), ends.tolist()) == ([0, 0, 2, 2, 2, 5], [2, 2, 5, 5, 5, 6])
    assert starts.dtype == ends.dtype == torch.int32
    places = torch.arange(6)
    for wrong in ([3, -7], [0, 90], [0, 2], [4, 1, 5], [-9, 50, -3]):  # no kernel may read beyond the tokens
        starts, ends = document_bounds(torch.tensor(wrong, dtype=torch.int32), 6)
        assert ((starts >= 0) & (starts <= places) & (places < ends) & (ends <= 6)).all()


def test_one_document_is_a_plain_call():
    x = make_features("normal", (1, 9, 2, 16))
    for lengths in ([9], [0, 9, 0]):
        assert select_impl(x, cu_seqlens=boundaries(lengths), impl="flex") == "flex"  # which has no documents
        got = gaussian_attention(x, torch.zeros(2), cu_seqlens=boundaries(lengths))
        assert torch.equal(got, gaussian_attention(x, torch.zeros(2)))


def test_sdpa_refuses_what_its_mask_would_not_fit():
    x = torch.zeros(()).expand(1, sdpa.MOST_PACKED + 1, 2, 16)
    two = boundaries([5, x.shape[1] - 5])
    with pytest.raises(ValueError, match="at most 16384 tokens, got 16385"):
        select_impl(x, cu_seqlens=two, impl="sdpa")
    with pytest.raises(ValueError, match="at most 16384 tokens, got 16385"):
        select_impl(x.double(), cu_seqlens=two)  # which nothing else takes
    assert select_impl(x[:, 1:], cu_seqlens=boundaries([5, x.shape[1] - 6]), impl="sdpa") == "sdpa"


# Head offsets and the layer


@pytest.mark.parametrize("delays", [((0, 1, 0), (1, 0, 0)), ((3, 0, 2), (0, 0, 1))])
def test_head_offsets_begin_anew_in_each_document(delays):
    pairing = HeadOffsets("PSN", 3)
    pairing.key_delays, pairing.value_delays = delays
    keys, values = (
        make_features("normal", (1, NUM_TOKENS, 3, 4), torch.float64, seed).requires_grad_() for seed in (0, 1)
    )
    got = pairing(keys, values, document_bounds(boundaries(DOCUMENTS), NUM_TOKENS)[0])
    parts = [pairing(keys[:, at], values[:, at]) for at in places_of(DOCUMENTS) if at.stop - at.start > 3]
    for side, t in enumerate(got):
        at = [at for at in places_of(DOCUMENTS) if at.stop - at.start > 3]
        assert all(torch.equal(t[:, one], part[side]) for one, part in zip(at, parts, strict=True))


TABLES = tuple(torch.randn(2, max(DOCUMENTS), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("options", [
    dict(), dict(head_norm=True, channel_bandwidths=True, head_offsets="PS"), dict(head_offsets="NSP", window=3),
    dict(preset="text"), dict(rotary=TABLES),  # no angles, whose differences alone would matter
], ids=lambda options: "+".join(options) or "paper")  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_of_documents(options, causal):
    torch.manual_seed(0)
    layer = GaussianKernelAttention(24, 4, causal=causal, **options).double()
    x, grad_y = torch.randn(2, 1, NUM_TOKENS, 24, dtype=torch.float64)
    leaves = (x.requires_grad_(), *layer.parameters())
    got, weights = layer(x, cu_seqlens=boundaries(DOCUMENTS), need_weights=True)
    parts = [layer(x[:, at], need_weights=True) for at in places_of(DOCUMENTS)]
    want = torch.cat([y for y, _ in parts], 1)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves, grad_y) for y in (got, want)), rtol=1e-8, atol=1e-8)
    for at, (_, alone) in zip(places_of(DOCUMENTS), parts, strict=True):
        torch.testing.assert_close(weights[..., at, at], alone, rtol=1e-9, atol=1e-9)


# Transforms


class Packed(torch.nn.Module):
    def __init__(self, impl):
        super().__init__()
        self.layer = GaussianKernelAttention(32, 2, causal=True, head_offsets="PS", impl=impl)

    def forward(self, x, cu_seqlens):
        return self.layer(x, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("impl", [impl for impl in PACKING if impl not in ("triton", TRITON)])
def test_other_lengths_are_not_compiled_again(impl):
    torch._dynamo.reset()
    model, x = Packed(impl), torch.randn(1, 40, 32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ([40, 0, 0], [1, 1, 38], [20, 0, 20], [13, 13, 14]):
        results = []
        for forward in (compiled, model):
            leaf = x.clone().requires_grad_()
            y = forward(leaf, boundaries(lengths))
            results.append([y, *torch.autograd.grad(y.square().sum(), (leaf, *model.parameters()))])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    compiled(x, boundaries([5] * 8)), compiled(x, boundaries([2] * 20))
    assert counter.frame_count == 2  # for any number of documents


@pytest.mark.parametrize("impl", [impl for impl in PACKING if impl not in ("triton", TRITON)])
def test_an_exported_program_takes_other_documents(impl):
    model, documents, tokens = (
        Packed(impl),
        torch.export.Dim("documents", max=64),
        torch.export.Dim("tokens", min=17, max=512),
    )
    example = torch.randn(1, 20, 32), boundaries([4, 16])
    program = torch.export.export(model, example, dynamic_shapes=({1: tokens}, {0: documents})).module()
    for lengths in ([1, 20, 7], [0, 33]):
        inputs = torch.randn(1, sum(lengths), 32), boundaries(lengths)
        torch.testing.assert_close(program(*inputs), model(*inputs))


@pytest.mark.parametrize("impl", ["sdpa", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_a_gpu(dtype, impl, monkeypatch):
    """By torch's fake tensors, of which no number can be read."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # it takes CPU tensors
    with FakeTensorMode():
        x, log_sigma = torch.empty(1, 20, 2, 16, dtype=dtype, device="cuda"), torch.zeros(2, device="cuda")
        cu_seqlens = torch.empty(4, dtype=torch.int32, device="cuda")
        y = gaussian_attention(x, log_sigma, causal=True, cu_seqlens=cu_seqlens, impl=impl)
        keys, values = HeadOffsets("PS", 2)(x, x, document_bounds(cu_seqlens, 20)[0])
    assert y.shape == keys.shape == values.shape == x.shape and keys.device.type == "cuda"
