"""Padding and masks: what is hidden is as if it were not there, in outputs and all gradients, NaN and infinity too."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from gka import GaussianKernelAttention, gaussian_attention, gaussian_weights, select_impl, testing
from gka.dispatch import IMPLEMENTATIONS
from gka.masking import Mask
from gka.testing import Problem, make_features, make_log_sigma
from operator_cases import (
    AUTO_ON_CPU,
    DEVICE,
    FORMS,
    FUSED,
    IMPLS,
    STRIDES,
    TRITON,
    boundaries,
    check_parts,
    gradients,
    half_kept,
    parts_of,
    problem_of,
)

LEARNING = ["reference", *FUSED["cpu"]]
LENGTHS = [9, 4, 0, 1, 23, 23, 60]
SHAPE = (len(LENGTHS), 60, 2, 16)
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning",
    "ignore:flex_attention called without torch.compile:UserWarning",
)


def with_garbage(problem, hidden, filler):
    """The problem with the filler in padded tokens, and in what comes back to them."""
    names = ("x", "values", "grad_y") if problem.keys is None else ("keys", "values")
    tensors = {name: t for name in names if (t := getattr(problem, name)) is not None}
    return replace(problem, **{name: t.masked_fill(hidden, filler) for name, t in tensors.items()})


def rows_of(problem, padding):
    """The tokens of each row, as `check_parts` takes them: every row is the oracle's of its tokens alone."""
    tokens = [(~hidden).nonzero()[:, 0] for hidden in padding]
    parts = [(row, places if problem.keys is None else slice(None), places) for row, places in enumerate(tokens)]
    return [part for part in parts if len(part[2])]


def padded(kind, lengths=LENGTHS):
    """A padding of rows of these lengths: (arguments, mask)."""
    lengths, places = torch.tensor(lengths, dtype=torch.int64), torch.arange(max([1, *lengths]))
    right = places >= lengths[:, None]
    if kind == "lengths":
        return dict(lengths=lengths), right
    mask = {"right": right, "left": right.flip(1)}.get(kind)
    if mask is None:
        mask = torch.rand(right.shape, generator=torch.Generator().manual_seed(3)) < 0.6
        mask[2:3] = True
    return dict(key_padding_mask=mask), mask


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["lengths", "right", "left", "anywhere"])
def test_padding_is_as_if_it_were_not_there(kind, form, impl):
    """For every mask and dtype that is declared: a window counts tokens, and nothing is read from padding."""
    arguments, padding = padded(kind)
    foreign, hidden = FORMS[form][0], padding[:, :, None, None]
    masks = [Mask()] if foreign else [Mask(), Mask(causal=True), Mask(causal=True, window=7), Mask(window=4)]
    dtypes = [t for t in IMPLEMENTATIONS[impl].SERVES.dtypes if kind == "anywhere" and t != torch.float32]
    if impl == "triton":  # whose interpreter gets a bare tl.dot of bfloat16 wrong; test_triton_gpu.py has it on a GPU
        dtypes = dtypes and [torch.float16]
    cases = [*((mask, torch.float32) for mask in masks), *((masks[-1], dtype) for dtype in dtypes)]
    for (mask, dtype), filler in zip(cases, cycle((NAN, INF, 1e4))):
        problem = problem_of(form, SHAPE, impl, dtype, mask, num_queries=21)
        options = dict(causal=mask.causal, window=mask.window, **arguments)
        got = gradients(with_garbage(problem, hidden, filler), impl=impl, **options)
        check_parts(problem, rows_of(problem, padding), got)
        of_padding = ("dkeys", "dvalues") if foreign else ("y", "dx", "dvalues")
        assert not any(got[name].masked_select(hidden).any() for name in of_padding if name in got)
        if foreign:  # a row without any key
            assert not any(got[name][2].any() for name in ("y", "dx") if name in got)


@pytest.mark.parametrize("kind,causal,window", [("anywhere", True, 7), ("lengths", True, None), ("left", False, None)])
def test_padding_combines_with_other_masks_and_a_window_counts_tokens(kind, causal, window):
    """In W too."""
    arguments, padding = padded(kind)
    problem = Problem.seeded("normal", SHAPE, torch.float64, with_values=True)
    x, values, log_sigma = problem.x, problem.values, problem.log_sigma.double()
    mask = torch.rand(1, 2, SHAPE[1], SHAPE[1], generator=torch.Generator().manual_seed(1)) < 0.9
    options = dict(causal=causal, window=window)
    got = gaussian_attention(x, log_sigma, values=values, attn_mask=mask, impl="sdpa", **options, **arguments)
    weights = gaussian_weights(x, log_sigma, attn_mask=mask, **options, **arguments)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, values), got, rtol=1e-10, atol=1e-10)
    assert not got[padding].any()
    for row in range(len(x)):
        places = (~padding[row]).nonzero()[:, 0]
        if len(places):
            tokens = [t[row : row + 1, places] for t in (x, values)]
            seen = mask[:, :, places][..., places]
            want = gaussian_attention(tokens[0], log_sigma, values=tokens[1], attn_mask=seen, impl="sdpa", **options)
            torch.testing.assert_close(got[row : row + 1, places], want, rtol=1e-10, atol=1e-10)


def mask_of(kind, num_queries, num_keys):
    """(The options of a kind of mask; which keys a query sees, (Tq, Tk))."""
    if kind in ("attn_mask", "bias"):
        seen = torch.rand(num_queries, num_keys, generator=torch.Generator().manual_seed(4)) < 0.6
        bias = torch.zeros(num_queries, num_keys).masked_fill(~seen, -INF)
        return dict(attn_mask=bias if kind == "bias" else seen), seen
    mask = {"full": Mask(), "causal": Mask(True), "causal window": Mask(True, 5), "window": Mask(False, 5)}[kind]
    return dict(causal=mask.causal, window=mask.window), mask.dense(num_queries, num_keys, torch.device("cpu"))


def touches(seen, place, impl):
    """Which rows, (Tq,), a bad key at that place touches."""
    if impl != "triton":
        return seen[:, place]
    first = place // 32 * 32
    tiles_of_rows = seen[:, first : first + 32].any(1).split(32)
    return torch.cat([rows.any().expand(len(rows)) for rows in tiles_of_rows])


BAD = [  # tokens, a bad number, dtype, constant_norm
    (20, NAN, torch.float32, False),
    (61, INF, torch.float32, True),
    (200, NAN, torch.bfloat16, True),
    (200, INF, torch.bfloat16, False),
    (200, NAN, torch.float32, False),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["full", "causal", "causal window", "window", "attn_mask", "bias"])
def test_what_a_row_sees_is_not_hidden_and_what_it_cannot_see_does_not_touch_it(kind, form, impl):
    """A key of one head, in the middle or last, and a value elsewhere: rows that see neither and their gradients stay.

    With triton a row is touched if one of its tile of 32 rows sees something of the key's tile.
    """
    foreign, with_values = FORMS[form]
    for length, bad, dtype, constant_norm in BAD[:2] if impl == "triton" else BAD:
        num_queries, place = length - 3 * foreign, length // 2 if bad is NAN and length > 20 else length - 1
        options, seen = mask_of(kind, num_queries, length)
        clean = problem_of(form, (2, length, 2, 16), impl, dtype, num_queries=num_queries)
        requested = {name for name, option in options.items() if option is not None and option is not False}
        if unserved := requested - IMPLEMENTATIONS[impl].SERVES.options:
            with pytest.raises(ValueError, match=f"{impl} does not serve {', '.join(unserved)}"):
                gradients(clean, impl, constant_norm=constant_norm, **options)
            return
        problem = clean.map(torch.Tensor.clone)
        (problem.keys if foreign else problem.x)[1, place, 0, 3] = bad
        touched = torch.zeros(2, num_queries, 2, dtype=torch.bool)
        touched[1, :, 0] = touches(seen, place, impl)
        if not foreign:
            touched[1, place, 0] = True
        if with_values:
            problem.values[0, place - 1, 1, 2], touched[0, :, 1] = bad, touches(seen, place - 1, impl)
        for each in (clean, problem):
            each.grad_y[touched] = 0
        got, want = (gradients(each, impl, constant_norm=constant_norm, **options) for each in (problem, clean))
        is_nan = got["y"].isnan().any(-1)
        assert not is_nan[~touched].any()
        if impl == "triton":
            assert bad is INF or is_nan[1, :, 0][seen[:, place]].all()
        elif bad is NAN or not (foreign or kind == "full"):  # a key may be infinitely far away
            assert torch.equal(is_nan, touched)
        if impl == "triton" or kind == "full":
            got, want = dict(y=got["y"]), dict(y=want["y"])
        tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
        torch.testing.assert_close(got.pop("y")[~touched], want.pop("y")[~touched], **tolerance)
        torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("form", ["own", "values"])
def test_sdpa_in_half_precision_throughout_hides_as_well(form):
    """As on CUDA."""
    with half_kept():
        test_padding_is_as_if_it_were_not_there("anywhere", form, "sdpa")
        for kind in ("full", "causal", "causal window", "window"):
            test_what_a_row_sees_is_not_hidden_and_what_it_cannot_see_does_not_touch_it(kind, form, "sdpa")


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("shape", [(9, 9), (2, 1, 9, 9), (3, 9, 9), (1, 3, 1, 9)], ids=str)
def test_general_masks_are_added_to_the_exponents(shape, impl):
    """Against the softmax of the exponents in float64, gradients to the mask too; rows that see nothing are zeros."""
    x, log_sigma = make_features("normal", (2, 9, 3, 8), torch.float64), make_log_sigma(3, 8).double()
    generator = torch.Generator().manual_seed(0)
    added = torch.randn(shape, generator=generator, dtype=torch.float64)
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden[..., :1, :] |= shape[-2] > 1  # the first row sees nothing

    def explicit(x, log_sigma, added):
        apart = (x[:, :, None] - x[:, None]).square().sum(-1).permute(0, 3, 1, 2)
        scores = -apart / (2 * log_sigma.exp().square()[:, None, None]) + added
        empty = added.isneginf().all(-1, keepdim=True)
        weights = torch.where(empty, 0.0, scores).softmax(-1).masked_fill(empty, 0.0)
        return torch.einsum("bhij,bjhd->bihd", weights, x)

    def ours(x, log_sigma, added):
        return gaussian_attention(x, log_sigma, attn_mask=added, impl=impl)

    leaves = [t.clone().requires_grad_() for t in (x, log_sigma, added.masked_fill(hidden, -INF))]
    results = []
    for function in (ours, explicit):
        y = function(*leaves)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    zeros = torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -INF)
    torch.testing.assert_close(ours(x, log_sigma, ~hidden), explicit(x, log_sigma, zeros), rtol=1e-10, atol=1e-10)
    weights = gaussian_weights(x, log_sigma, attn_mask=~hidden)
    assert not weights.masked_select(hidden.expand(2, 3, 9, 9)).any()


def test_auto_takes_what_serves():
    x = torch.zeros(2, 12, 2, 16)
    lengths, anywhere = torch.tensor([12, 7]), torch.tensor([[True] + [False] * 11] * 2)
    assert (select_impl(x), select_impl(x.double())) == (AUTO_ON_CPU, "sdpa")
    assert select_impl(x, lengths=lengths) == select_impl(x, key_padding_mask=anywhere) == AUTO_ON_CPU
    assert select_impl(x, lengths=lengths, impl="triton") == "triton" or DEVICE == "cuda"
    assert select_impl(x, attn_mask=torch.ones(12, 12, dtype=torch.bool)) == "sdpa"
    assert select_impl(x, key_padding_mask=anywhere, window=3) == AUTO_ON_CPU
    with pytest.raises(ValueError, match="cpu does not serve attn_mask"):
        select_impl(x, attn_mask=torch.ones(12, 12), impl="cpu")
    assert select_impl(x, lengths=torch.tensor([12, 12]), impl="flex") == "flex"  # nothing is padding


@pytest.mark.skipif(AUTO_ON_CPU != "cpu", reason="the CPU kernel cannot be built here")
@pytest.mark.parametrize("name,wrong", [
    ("lengths", [[900, 5], [5, 5]]), ("lengths", [[5, 5], [-30, 5]]), ("cu_seqlens", [[0, 3, 900], [0, 2, 5]]),
    ("cu_seqlens", [[0, 2, 5], [0, -30, 5]]),
], ids=str)  # fmt: skip
def test_lengths_that_a_transform_hides_are_checked_before_memory_is_read(name, wrong):
    x, numbers = torch.randn(2, 2 if name == "lengths" else 1, 5, 2, 4), torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{name} must .* number of (keys|tokens), 5"):
        torch.func.vmap(lambda x, n: gaussian_attention(x, torch.zeros(2), **{name: n}))(x, numbers)


@pytest.mark.parametrize("impl", LEARNING)
def test_a_padded_row_is_no_row_that_sees(impl):
    """A loss that touches padding leaves the gradients of the tokens finite."""
    x = make_features("normal", (1, 5, 1, 2))
    x[0, 2] = NAN
    x.requires_grad_()
    y = gaussian_attention(x, torch.zeros(1), causal=True, lengths=torch.tensor([4]), impl=impl)
    y[0, [0, 4]].sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("impl", [*LEARNING, TRITON])
def test_tokens_that_are_far_from_padding(impl):
    """Its zeros have no K that could be normalised."""
    far = (make_features("normal", (1, 3, 1, 4)) + 20).requires_grad_()
    hidden = torch.tensor([[False, True, False]])
    gaussian_attention(far, torch.zeros(1), key_padding_mask=hidden, eps=0.0, impl=impl).sum().backward()
    assert far.grad.isfinite().all()
    assert not gaussian_weights(far, torch.zeros(1), key_padding_mask=hidden)[:, :, 1].any()


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_hidden_tokens_may_be_of_any_size(impl):
    x, keys = (make_features("normal", (2, length, 2, 8), seed=length) for length in (5, 7))
    seen = torch.ones(1, 7, dtype=torch.bool)
    seen[0, 3] = False
    large = keys.clone()
    large[:, 3] = 1e6
    outputs = [gaussian_attention(x, torch.zeros(2), keys=k, attn_mask=seen, impl=impl) for k in (keys, large)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


# Padded batches and packed documents


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["lengths", "left", "anywhere", "documents"]),
    form=st.sampled_from(list(FORMS)),
    impl=st.sampled_from(["reference", "sdpa", AUTO_ON_CPU]),
    lengths=st.lists(st.integers(0, 40), max_size=5),
    num_queries=st.integers(1, 70),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 3, 8, 16, 17, 33, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    mask=st.builds(Mask, st.booleans(), st.none() | st.integers(0, 40)),
    strides=st.tuples(*[st.sampled_from(list(STRIDES.values()))] * 3),
    filler=st.sampled_from([0.0, 1e4, NAN, INF]),
    trains=st.booleans(),
)
def test_any_shape_lengths_strides_and_dtype(
    kind, form, impl, lengths, num_queries, heads, head_dim, dtype, mask, strides, filler, trains
):
    """Also of no sequences, and of sequences without tokens."""
    impl = "sdpa" if dtype == torch.float64 else impl
    if kind == "documents":
        lengths, num_queries = [*lengths, 1], None  # as many as keys
        arguments, batch, tokens = dict(cu_seqlens=boundaries(lengths)), 1, sum(lengths)
    else:
        arguments, padding = padded(kind, lengths)
        batch, tokens = padding.shape
        mask = Mask() if FORMS[form][0] else mask
    problem = problem_of(form, (batch, tokens, heads, head_dim), impl, dtype, mask, num_queries)
    parts = parts_of(lengths) if kind == "documents" else rows_of(problem, padding)
    filled = problem if kind == "documents" else with_garbage(problem, padding[:, :, None, None], filler)
    of_x, of_keys, of_y = strides

    def route(x, log_sigma, **tensors):
        tensors = {name: None if t is None else of_keys(t) for name, t in tensors.items()}
        options = dict(causal=mask.causal, window=mask.window, impl=impl, **arguments)
        return of_y(gaussian_attention(of_x(x), log_sigma, **tensors, **options))

    check_parts(problem, parts, testing.run(route, filled if trains else replace(filled, grad_y=None)).named())


class Padded(torch.nn.Module):
    """The operator of a padded batch."""

    def __init__(self, impl):
        super().__init__()
        self.log_sigma, self.impl = torch.nn.Parameter(torch.zeros(2)), impl

    def forward(self, x, lengths):
        return gaussian_attention(x.unflatten(-1, (2, 16)), self.log_sigma, lengths=lengths, impl=self.impl)


class Packed(torch.nn.Module):
    """The layer of packed documents."""

    def __init__(self, impl):
        super().__init__()
        self.layer = GaussianKernelAttention(32, 2, causal=True, head_offsets="PS", impl=impl)

    def forward(self, x, cu_seqlens):
        return self.layer(x, cu_seqlens=cu_seqlens)


def inputs_of(name, lengths):
    if name == "cu_seqlens":
        return torch.randn(1, sum(lengths), 32), boundaries(lengths)
    return torch.randn(len(lengths), max(lengths), 32), torch.tensor(lengths)


TRAINED = {  # on 40 tokens
    "lengths": ([40, 3, 0], [1, 1, 40], [40, 40, 40], [40, 3, 5]),
    "cu_seqlens": ([40, 0, 0], [1, 1, 38], [20, 0, 20], [13, 13, 14]),
}
SEVERAL = {"lengths": Padded, "cu_seqlens": Packed}
several = pytest.mark.parametrize("name", SEVERAL)


@several
@pytest.mark.parametrize("impl", LEARNING)
def test_an_exported_program_takes_other_lengths(impl, name):
    model, rows = SEVERAL[name](impl), torch.export.Dim("rows", max=64)
    tokens = torch.export.Dim("tokens", min=17, max=512)
    shapes = ({1: tokens}, {0: rows}) if name == "cu_seqlens" else ({0: rows, 1: tokens}, {0: rows})
    program = torch.export.export(model, inputs_of(name, [20, 4, 0]), dynamic_shapes=shapes).module()
    for lengths in ([1, 20, 7], [33, 2, 0, 5]):
        inputs = inputs_of(name, lengths)
        torch.testing.assert_close(program(*inputs), model(*inputs))


@several
@pytest.mark.parametrize("impl", LEARNING)
def test_other_lengths_are_not_compiled_again(impl, name):
    """Compiled or checkpointed, gradients stay what they are."""
    torch._dynamo.reset()
    model, counter = SEVERAL[name](impl), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in TRAINED[name]:
        (x, numbers), results = inputs_of(name, lengths), []
        for forward in (compiled, model, lambda *inputs: checkpoint(model, *inputs, use_reentrant=False)):
            leaf = x.clone().requires_grad_()
            y = forward(leaf, numbers)
            results.append([y, *torch.autograd.grad(y.square().sum(), (leaf, *model.parameters()))])
        torch.testing.assert_close(*results[:2], rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, *results[1:]))
    assert counter.frame_count == 1
    if name == "cu_seqlens":
        compiled(x, boundaries([5] * 8)), compiled(x, boundaries([2] * 20))
        assert counter.frame_count == 2  # for any number of documents


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_of_causal_foreign_keys_is_not_packed(impl):
    """Keys that moved up would be seen by other queries: what packs them refuses, the others are right."""
    torch.manual_seed(0)
    x, keys = torch.randn(1, 4, 2, 16), torch.randn(1, 7, 2, 16)
    padding = torch.tensor([[True, True, False, False, True, False, False]])
    arguments = dict(keys=keys, causal=True, key_padding_mask=padding)
    if "key_padding_mask" not in IMPLEMENTATIONS[impl].SERVES.options:
        with pytest.raises(ValueError, match="key_padding_mask"):
            select_impl(x, impl=impl, **arguments)
        return
    want = gaussian_attention(x.double(), torch.zeros(2), impl="reference", **{**arguments, "keys": keys.double()})
    got = gaussian_attention(x, torch.zeros(2), impl=impl, **arguments)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_below_the_range_of_the_features_is_a_row_of_equal_numbers(impl, dtype):
    torch.manual_seed(0)
    x, mask = torch.randn(1, 5, 1, 16).to(dtype), torch.zeros(5, 5, dtype=torch.float64)
    low = mask.clone()
    low[1], low[3] = -1e300, torch.finfo(torch.float64).min
    y, want = (gaussian_attention(x, torch.zeros(1), attn_mask=one, impl=impl) for one in (low, mask))
    assert y.isfinite().all()
    torch.testing.assert_close(y[:, [0, 2, 4]], want[:, [0, 2, 4]])
