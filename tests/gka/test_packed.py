"""Packed sequences: every document is as if it were called alone, in outputs and all gradients."""

import pytest
import torch

from gka import GaussianKernelAttention, dot_product_attention, gaussian_attention, select_impl
from gka.dispatch import IMPLEMENTATIONS
from gka.impl import sdpa
from gka.masking import Mask, document_bounds
from gka.testing import make_features
from operator_cases import CPU, FORMS, TRITON, boundaries, check_parts, gradients, parts_of, problem_of

DOCUMENTS = [0, 1, 7, 63, 1, 0, 130, 2, 0]  # their lengths
NUM_TOKENS = sum(DOCUMENTS)
PLACES = [tokens for _, tokens, _ in parts_of(DOCUMENTS)]
PACKING = {"cpu": CPU, "triton": TRITON}
PACKING = [PACKING.get(name, name) for name, one in IMPLEMENTATIONS.items() if "cu_seqlens" in one.SERVES.options]
MASKS = [Mask(), Mask(causal=True), Mask(causal=True, window=7), Mask(window=4), Mask(causal=True, window=100)]


@pytest.mark.parametrize("impl", PACKING)
@pytest.mark.parametrize("form", FORMS)
def test_a_document_is_as_if_it_were_alone(form, impl):
    """NaN stays in its document, in y and in the gradients of tokens, also where the loss touches it."""
    masks, dtypes = MASKS, [t for t in IMPLEMENTATIONS[impl].SERVES.dtypes if t != torch.float32]
    if impl == "triton":  # whose interpreter is slow, and gets a bare tl.dot of bfloat16 wrong
        masks, dtypes = [Mask(), Mask(causal=True), Mask(window=4)], [torch.float16]
    for mask, dtype in [*((mask, torch.float32) for mask in masks), *((MASKS[2], dtype) for dtype in dtypes)]:
        problem = problem_of(form, (1, NUM_TOKENS, 2, 16), impl, dtype, mask)
        options = dict(cu_seqlens=boundaries(DOCUMENTS), causal=mask.causal, window=mask.window)
        got = gradients(problem, impl, **options)
        check_parts(problem, parts_of(DOCUMENTS), got)
        if dtype != torch.float32:
            continue
        bad = torch.zeros(NUM_TOKENS, dtype=torch.bool)
        bad[PLACES[2]] = True  # 63 tokens between documents of 7 and 1
        for t in (problem.x, problem.keys, problem.values):
            if t is not None:
                t[:, bad] = torch.nan
        again = gradients(problem, impl, **options)
        assert again["y"][:, bad].isnan().all()
        for name in set(got) - {"dlog_sigma"}:
            torch.testing.assert_close(again[name][:, ~bad], got[name][:, ~bad])


@pytest.mark.parametrize("impl", [CPU])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_documents_are_divided_among_threads(count, impl, threads):
    """The first has all of them where there are 8, and each has some where there is 1."""
    lengths = [3, 260, 0, 5, 31, 30]
    threads(count)
    for form, dtype in (("own", torch.float32), ("other keys and values", torch.float32), ("own", torch.bfloat16)):
        problem = problem_of(form, (1, sum(lengths), 2, 16), impl, dtype)
        got = [gradients(problem, impl, cu_seqlens=boundaries(lengths)) for _ in range(2)]
        assert all(torch.equal(got[0][name], got[1][name]) for name in got[0])
        check_parts(problem, parts_of(lengths), got[0])


@pytest.mark.parametrize("mask", MASKS[:4], ids=str)
def test_the_softmax_baseline_of_documents(mask):
    q, k, v = (
        make_features("normal", (1, NUM_TOKENS, 2, 16), torch.float64, seed).requires_grad_() for seed in range(3)
    )
    options = dict(causal=mask.causal, window=mask.window)
    got = dot_product_attention(q, k, v, cu_seqlens=boundaries(DOCUMENTS), **options)
    parts = [dot_product_attention(*(t[:, at] for t in (q, k, v)), **options) for at in PLACES]
    want, grad_y = torch.cat(parts, 1), torch.randn_like(q)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*(torch.autograd.grad(y, (q, k, v), grad_y) for y in (got, want)), rtol=1e-9, atol=1e-9)


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


# The layer

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
    parts = [layer(x[:, at], need_weights=True) for at in PLACES]
    want = torch.cat([y for y, _ in parts], 1)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves, grad_y) for y in (got, want)), rtol=1e-8, atol=1e-8)
    blocks = torch.zeros_like(weights)
    for at, (_, alone) in zip(PLACES, parts, strict=True):
        blocks[..., at, at] = alone
    torch.testing.assert_close(weights, blocks, rtol=1e-9, atol=1e-9)
