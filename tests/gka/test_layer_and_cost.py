"""The layer as a user plugs it in, and the cost model against the paper's tables and the built layer."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import gka.flops  # noqa: F401
from gka import GaussianKernelAttention, GaussianMultiheadAttention, attention_cost, gaussian_attention
from operator_cases import CPU
from sharding import check_trains_as_in_bfloat16, process_group


@pytest.mark.parametrize("head_norm", [False, True])
def test_layer_is_split_operator_project(head_norm):
    layer = GaussianKernelAttention(48, 3, head_norm=head_norm, causal=True, window=4)
    x = torch.randn(2, 11, 48)
    heads = x.view(2, 11, 3, 16)
    heads = nn.functional.rms_norm(heads, (16,)) if head_norm else heads
    y = gaussian_attention(heads, layer.log_sigma, causal=True, window=4, impl="reference")
    torch.testing.assert_close(layer(x), layer.proj(y.flatten(-2)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_norm", [False, True])
def test_channel_bandwidths_scale_what_is_compared_alone(head_norm):
    """Equal to the diagonal metric's kernel in float64; nothing changes while the scales are 1; they are learned."""
    layer = GaussianKernelAttention(12, 2, head_norm=head_norm, channel_bandwidths=True).double()
    plain, x = GaussianKernelAttention(12, 2, head_norm=head_norm).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    plain.load_state_dict({name: t for name, t in layer.state_dict().items() if name != "log_scale"})
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-12, atol=1e-12)

    with torch.no_grad():
        layer.log_scale.copy_(torch.linspace(-1, 1, 12))
    values = x.view(2, 7, 2, 6)
    values = nn.functional.rms_norm(values, (6,)) if head_norm else values
    compared = values * layer.log_scale.exp().view(2, 6)
    compared = nn.functional.rms_norm(compared, (6,)) if head_norm else compared
    apart = (compared[:, :, None] - compared[:, None]).square().sum(-1)  # (B, Tq, Tk, H)
    weights = (-apart / (2 * layer.log_sigma.exp().square())).softmax(2)
    want = layer.proj(torch.einsum("bijh,bjhd->bihd", weights, values).flatten(2))
    torch.testing.assert_close(layer(x), want, rtol=2e-6, atol=2e-6)  # the layer's eps of a row sum
    layer(x).square().sum().backward()
    assert layer.log_scale.grad.abs().min() > 0
    layer.reset_parameters()
    assert not layer.log_scale.any() and "channel_bandwidths=True" in repr(layer)


@pytest.mark.parametrize("options", [dict(), dict(head_norm=True, channel_bandwidths=True)], ids=str)
def test_layer_with_padding_masks_context_and_weights(options):
    layer = GaussianKernelAttention(48, 3, **options)
    x, context, lengths = torch.randn(2, 11, 48), torch.randn(2, 7, 48), (11, 5)
    padding = torch.arange(11) >= torch.tensor(lengths)[:, None]
    y = layer(x, key_padding_mask=padding)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(y[row, :length], layer(x[row : row + 1, :length])[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(y[1, 5:], layer.proj.bias.expand(6, 48))

    y, weights = layer(x, context, key_padding_mask=padding[:, 4:], need_weights=True)
    assert y.shape == x.shape and weights.shape == (2, 3, 11, 7) and not weights[1, :, :, 1:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 11))
    # A row with one key takes its value, whatever the query is.
    heads = context[1:, :1].view(1, 1, 3, 16)
    heads = nn.functional.rms_norm(heads, (16,)) if "head_norm" in options else heads
    torch.testing.assert_close(y[1:], layer.proj(heads.flatten(2)).expand(1, 11, 48), rtol=1e-4, atol=1e-5)

    causal = torch.ones(11, 11).tril().bool()
    same = GaussianKernelAttention(48, 3, causal=True, **options)
    same.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x, attn_mask=causal), same(x), rtol=1e-4, atol=1e-4)


def test_layer_learns_its_bandwidth():
    """A target made with another sigma is fitted by gradient descent on log_sigma alone."""
    torch.manual_seed(1)
    x = torch.randn(8, 20, 32)
    teacher, student = (GaussianKernelAttention(32, 2, sigma_squared=squared) for squared in (3.0, 12.0))
    student.proj.load_state_dict(teacher.proj.state_dict())
    optimizer = torch.optim.Adam([student.log_sigma], lr=0.05)
    target = teacher(x).detach()
    for _ in range(150):
        optimizer.zero_grad()
        (student(x) - target).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(student.log_sigma, teacher.log_sigma, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 0.04), (torch.float16, 0.005)])
def test_layer_in_another_dtype(dtype, tolerance):
    layer, x = GaussianKernelAttention(32, 2), torch.randn(2, 9, 32)
    want = layer(x)
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), want, rtol=tolerance, atol=tolerance)
    y.sum().backward()
    assert layer.log_sigma.grad.dtype == dtype


@pytest.mark.parametrize("options", [dict(), dict(head_norm=True, causal=True, window=3)], ids=str)
def test_layer_under_fsdp_in_bfloat16(options, tmp_path):
    model, x = nn.Sequential(GaussianKernelAttention(32, 2, **options)), torch.randn(2, 9, 32).bfloat16()
    with process_group(tmp_path):
        check_trains_as_in_bfloat16(model, lambda m: m, lambda m: m(x).float().square().sum())


FX = [dict(), dict(head_norm=True, causal=True, window=3), dict(channel_bandwidths=True)]


@pytest.mark.parametrize("options", FX, ids=str)
def test_torch_fx_traces_a_model_that_has_the_layer(options):
    """One graph for all lengths and batches, with the layer's parameters in it."""
    model = nn.Sequential(nn.LayerNorm(32), GaussianKernelAttention(32, 2, **options), nn.Linear(32, 5))
    graph = torch.fx.symbolic_trace(model)
    for shape in ((2, 9, 32), (1, 4, 32)):
        x = torch.randn(shape)
        assert torch.equal(graph(x), model(x))
    graph(x).sum().backward()
    assert model[1].log_sigma.grad.all()


def test_layer_under_autocast():
    """It takes inputs of any dtype but float64, which autocast does not cast either."""
    layer, x = GaussianKernelAttention(32, 2), torch.randn(2, 9, 32)
    multihead = GaussianMultiheadAttention(32, 2)
    multihead.load_state_dict({name.replace("proj", "out_proj"): t for name, t in layer.state_dict().items()})
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tokens = x.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = layer(tokens), layer(tokens, x)[:1], multihead(*[tokens.transpose(0, 1)] * 3)[0].transpose(0, 1)
        for y in outputs:
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y.float(), layer(x)[: len(y)], rtol=0.04, atol=0.04)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="x must have the dtype of the layer's"):
        layer(x.double())


def test_layer_takes_what_its_projection_casts_by_itself():
    """Such as a quantised one."""

    class Stored(nn.Linear):
        """Multiplies in the dtype of what it gets."""

        def __init__(self, linear):
            super().__init__(32, 32)
            del self.weight
            self.weight, self.bias = linear.weight.detach().bfloat16(), linear.bias

        def forward(self, x):
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)

    layer, x = GaussianKernelAttention(32, 2), torch.randn(2, 9, 32)
    want = layer(x)
    layer.proj = Stored(layer.proj)
    torch.testing.assert_close(layer(x), want, rtol=0.01, atol=0.01)


def test_layer_compiled_exported_and_mapped_with_context():
    """One graph each, in spite of what the door checks."""
    layer, x, context = GaussianKernelAttention(32, 2), torch.randn(2, 9, 32), torch.randn(2, 4, 32)
    want = layer(x, context)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, context), want)
    torch.testing.assert_close(torch.export.export(layer, (x, context)).module()(x, context), want)
    concrete = dict(key_padding_mask=None, attn_mask=None, is_causal=False, need_weights=False)
    torch.testing.assert_close(torch.fx.symbolic_trace(layer, concrete_args=concrete)(x, context), want)
    one_by_one = torch.func.vmap(lambda x, c: layer(x[None], c[None])[0])
    torch.testing.assert_close(one_by_one(x, context), want, rtol=1e-5, atol=1e-5)
    parameters = dict(layer.named_parameters())
    torch.testing.assert_close(torch.func.functional_call(layer, parameters, (x, context)), want)


def test_layer_survives_the_meta_device():
    with torch.device("meta"):
        layer = GaussianKernelAttention(32, 2, sigma_squared=5.0)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    torch.testing.assert_close(layer.log_sigma.exp().square(), torch.full((2,), 5.0))
    assert torch.isfinite(layer(torch.randn(1, 3, 32))).all()


@pytest.mark.parametrize("bias", [False, True])
def test_cost_counts_the_built_layer(bias):
    layer = GaussianKernelAttention(64, 4, bias=bias)
    assert attention_cost("gka", 64, 4, 10, bias=bias).parameters == sum(p.numel() for p in layer.parameters())


def test_bytes():
    softmax, gka = (attention_cost(kind, 128, 4, 100, batch=2) for kind in ("softmax", "gka"))
    assert gka.cache_bytes * 2 == softmax.cache_bytes == 2 * 2 * 100 * 128 * 2
    assert gka.operator_bytes * 2 == softmax.operator_bytes
    assert gka.matrix_bytes == 2 * 4 * 100 * 100 * 2
    assert attention_cost("gka", 128, 4, 100, window=10).flops == 100 * (2 * 128 * 128 + 4 * 10 * 128)


def counted(call, *arguments) -> tuple[int, object]:
    """(FLOPs that torch's counter sees, what the call returned)."""
    with FlopCounterMode(display=False) as counter:
        returned = call(*arguments)
    return counter.get_total_flops(), returned


@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(causal=True, window=3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", [CPU])
def test_torchs_flop_counter_sees_the_cost_models_flops(impl, dtype, options):
    layer, x = GaussianKernelAttention(64, 4, impl=impl, **options), torch.randn(2, 10, 64, dtype=dtype)
    flops = attention_cost("gka", 64, 4, 10, batch=2, window=4 if "window" in options else None).flops
    seen, y = counted(layer.to(dtype), x.requires_grad_())
    assert seen == flops
    assert counted(y.sum().backward)[0] == 2 * flops


@pytest.mark.parametrize("impl", [CPU])
def test_torchs_flop_counter_sees_every_query_of_decoding_and_of_foreign_keys(impl):
    x, cache, log_sigma = torch.randn(2, 20, 4, 16), torch.randn(2, 30, 4, 16), torch.zeros(4)
    for queries in (1, 20):  # a kernel of its own for a few
        seen, _ = counted(lambda n: gaussian_attention(x[:, -n:], log_sigma, keys=cache, impl=impl), queries)
        assert seen == 4 * 2 * queries * 30 * 64


def test_torchs_flop_counter_sees_the_same_of_triton():
    x, log_sigma = torch.empty(2, 10, 4, 16, device="meta"), torch.empty(4, device="meta")
    seen, (y, level, norm) = counted(torch.ops.gka.attend, x, None, None, log_sigma, None, 3, 0, False, 1e-6)
    assert seen == 4 * 2 * 10 * 4 * 64
    arguments = y, x, None, None, log_sigma, None, y, level, norm, 3, 0, False
    assert counted(torch.ops.gka.attend_backward, *arguments)[0] == 2 * seen
