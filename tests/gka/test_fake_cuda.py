"""torch's fake tensors on a CUDA device, as tracing and export use them without a GPU: choices and shapes."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gka import (
    GaussianKernelAttention,
    decode_attention,
    dispatch,
    dot_product_attention,
    gaussian_attention,
    select_impl,
)
from gka.dispatch import IMPLEMENTATIONS
from gka.impl.triton.configs import TABLES, generation

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]
WINDOW = dict(causal=True, window=5, constant_norm=True)
ON_CUDA = [name for name in IMPLEMENTATIONS if name != "cpu"]


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    """Fake tensors in the test. Triton's interpreter, which takes CPU tensors, is off."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with FakeTensorMode():
        yield


def features(dtype=torch.bfloat16, requires_grad=False, tokens=20):
    return torch.empty(2, tokens, 4, 32, dtype=dtype, device="cuda", requires_grad=requires_grad)


def log_sigma():
    return torch.zeros(4, device="cuda")


class Crossings(TorchDispatchMode):
    """Counts what comes from the CPU: there such a copy waits for the GPU, and a CUDA graph cannot hold it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("arguments", [{}, dict(causal=True), WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("impl", ["auto", *ON_CUDA])
def test_every_implementation_gives_what_x_is_like(impl, dtype, arguments):
    """And sdpa nothing that comes from the CPU."""
    for requires_grad in (False, impl != "flex"):
        x = features(dtype, requires_grad)
        crossings = Crossings()
        with crossings if impl == "sdpa" else contextlib.nullcontext():
            y = gaussian_attention(x, log_sigma(), impl=impl, **arguments)
        assert (y.shape, y.dtype, y.device) == (x.shape, dtype, torch.device("cuda", 0))
        assert y.requires_grad == requires_grad
        assert crossings.count == 0


def test_auto_takes_the_kernels_as_if_the_gpu_could_run_them():
    assert select_impl(features()) == select_impl(features(requires_grad=True), **WINDOW) == "triton"
    assert select_impl(features(torch.float64)) == "sdpa"
    lengths = torch.zeros(2, dtype=torch.int64, device="cuda")
    padding = torch.zeros(2, 20, dtype=torch.bool, device="cuda")
    assert select_impl(features(), lengths=lengths) == select_impl(features(), key_padding_mask=padding) == "triton"
    assert select_impl(features(), key_padding_mask=padding, window=5, constant_norm=True) == "triton"  # it is packed
    wide = torch.empty(1, 20, 1, 256, device="cuda")  # too wide for the kernels
    assert (select_impl(wide), select_impl(wide, causal=True), select_impl(wide, window=5)) == ("sdpa", "sdpa", "flex")
    with pytest.raises(ValueError, match="backward pass cannot be traced without a GPU"):
        gaussian_attention(features(requires_grad=True), log_sigma(), impl="flex")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("constant_norm", [False, True])
def test_sdpa_multiplies_in_half_precision_where_a_row_sees_its_own_token(constant_norm, dtype, monkeypatch):
    """In widths that torch's fused kernels take: 32 channels and those of the norms are 40."""
    taken, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention",
        lambda q, *arguments, **options: taken.append((q.dtype, q.shape[-1])) or attend(q, *arguments, **options),
    )  # fmt: skip
    x, seen = features(dtype), torch.empty(20, 20, dtype=torch.bool, device="cuda")
    own = {}, dict(causal=True), dict(window=5), dict(values=features(dtype))
    for arguments in own:
        gaussian_attention(x, log_sigma(), constant_norm=constant_norm, impl="sdpa", **arguments)
    assert set(taken) == {(dtype, 32 if constant_norm else 40)}
    taken.clear()
    for arguments in (dict(keys=features(dtype)), dict(attn_mask=seen)):
        gaussian_attention(x, log_sigma(), constant_norm=constant_norm, impl="sdpa", **arguments)
    assert set(taken) == {(dtype, 32) if constant_norm else (torch.float32, 40)}


RECIPES = {  # (B, T, H, D), and how the layer calls the operator
    "DeiT-Ti": ((4, 197, 3, 64), {}),
    "DeiT-B": ((4, 197, 12, 64), {}),
    "nanochat d20, window": ((2, 2048, 10, 128), dict(causal=True, window=1024, constant_norm=True)),
    "nanochat d20, full": ((2, 2048, 10, 128), dict(causal=True, window=2048, constant_norm=True)),
    "nanochat d4": ((2, 512, 4, 64), dict(causal=True, constant_norm=True)),
}
CAPABILITIES = {(7, 5): None, (8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_90"}
CAPABILITIES |= dict.fromkeys([(8, 6), (8, 9), (12, 0)], "sm_120")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_run_on_the_kernels(recipe, capability, monkeypatch):
    """On every GPU from the A100 on, in both dtypes, with foreign keys too (head offsets); before it, on others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    shape, arguments = RECIPES[recipe]
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(shape, dtype=dtype, device="cuda:0", requires_grad=True)
        cases = [{}, {"values": x * 2}, *([{"keys": x + 1, "values": x * 2}] if "causal" in arguments else [])]
        chosen = {select_impl(x, **arguments, **other) for other in cases}
        if capability < (8, 0):
            assert chosen <= {"flex", "sdpa"}
            continue
        assert chosen == {"triton"}
        table = TABLES[generation.__wrapped__(x.device)]
        assert table is TABLES[CAPABILITIES[capability]]
        for kernel in ("forward", "decode", "queries", "keys"):
            assert all(table.pick(kernel, x, block_d) for block_d in (32, 64, 128))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_softmax_baseline_and_decoding(requires_grad):
    q, x, cache = features(requires_grad=requires_grad), features(tokens=1), features(tokens=50)
    tables = (torch.empty(64, 16, dtype=torch.bfloat16, device="cuda"),) * 2 if requires_grad else None
    options = dict(rotary=tables, lengths=[40, 50], key_delays=(1, 0, 2, 0), value_delays=(0, 3, 0, 0))
    for window in (None, 5):
        y = dot_product_attention(q, q, q, causal=True, window=window)
        last = decode_attention(x, log_sigma(), cache, window=window, constant_norm=True, **options)
        assert (y.shape, y.dtype, y.is_cuda) == (q.shape, q.dtype, True)
        assert (last.shape, last.dtype, last.is_cuda) == (x.shape, x.dtype, True)


@pytest.mark.parametrize("letters,impl", [("", "triton"), ("NP", "triton"), ("PS", "sdpa")])
def test_the_layer_knows_what_trains_it(letters, impl, monkeypatch):
    """A token's own key is Triton's, whatever the value is; for other keys of any norm it has no gradients."""
    with torch.device("cuda"):
        layer, x = GaussianKernelAttention(128, 4, head_offsets=letters), torch.empty(2, 20, 128)
    taken, choose = [], dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: taken.append(choose(*arguments)) or taken[-1])
    layer(x)
    assert [layer.chosen_impl(20), *taken] == [impl, impl]


@pytest.mark.parametrize("impl", ["sdpa", "triton"])
def test_where_documents_begin_is_not_read(impl):
    """Fake tensors have no numbers; reading those of a GPU would stall."""
    with torch.device("cuda"):
        layer = GaussianKernelAttention(128, 4, causal=True, head_norm=True, head_offsets="PS", impl=impl)
        x = torch.empty(1, 20, 128)
        y = layer(x, cu_seqlens=torch.empty(4, dtype=torch.int32))
    assert (y.shape, y.is_cuda) == (x.shape, True)


def test_the_layer_is_exported_for_a_gpu_that_is_elsewhere():
    with torch.device("cuda"):
        layer = GaussianKernelAttention(128, 4, causal=True)
    graph = torch.export.export(layer, (torch.empty(2, 20, 128, device="cuda"),)).graph
    assert torch.ops.gka.attend.default in [node.target for node in graph.nodes]


def test_masks_of_fake_tensors_are_not_kept_for_real_ones():
    """Nor the other way round: FlexAttention's block masks are kept by shape and device."""
    arguments = dict(causal=True, window=3, constant_norm=True, impl="flex")
    gaussian_attention(torch.empty(1, 30, 2, 16), torch.zeros(2), **arguments)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        x = torch.nn.functional.normalize(torch.randn(1, 30, 2, 16), dim=-1)
        got = gaussian_attention(x, torch.zeros(2), **arguments)
        want = gaussian_attention(x, torch.zeros(2), **{**arguments, "impl": "reference"})
        torch.testing.assert_close(got, want)
