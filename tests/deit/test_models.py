"""The vision models: the paper's tables from formulas and from built modules, attention against float64, and what timm users expect.

Legend: B batch, N tokens, H heads, D head_dim, C = H * D.
"""

import copy
import functools
import io
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import timm.layers
import timm.optim
import torch
import torch.nn.functional as F
from timm.models._hub import save_for_hf
from timm.utils import AttentionExtract
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import explicit_sums
from deit_gka.accounting import MIB, cost_of, vit_cost
from deit_gka.model.attention import ATTENTION, with_settings
from deit_gka.model.registry import SIZES
from gka import testing
from gka.api import EPS

KINDS = list(ATTENTION)
NAMES = {"softmax": "deit_{}_patch16_224", "gka": "deit_{}_gka_patch16_224", "vlt": "deit_{}_vlt_patch16_224"}
SMALL = dict(img_size=32, depth=2, embed_dim=24, num_heads=3, num_classes=5)  # 5 tokens, head_dim 8
kinds = pytest.mark.parametrize("kind", KINDS)


def create(kind: str = "gka", **settings) -> nn.Module:
    return timm.create_model(NAMES[kind].format("tiny"), **dict(SMALL, **settings))


def small(kind: str = "gka", **settings) -> nn.Module:
    """A registered model shrunk, with weights drawn wide, so that tokens differ and mixing them matters."""
    model = create(kind, **settings)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=p[0].numel() ** -0.5 if name.endswith(".weight") else 1.0)
    return model


@pytest.fixture
def explicit():
    """timm's switch for attention that builds W; models built in the test take that path."""
    timm.layers.set_fused_attn(False)
    yield
    timm.layers.set_fused_attn(True)


@pytest.fixture
def images():
    return torch.randn(2, 3, 32, 32)


# --- The paper's tables, figures as printed ---

# Main results: parameters, attention, MLP (M), FLOPs (G), checkpoint (MB), delta parameters and delta FLOPs (%).
MAIN_RESULTS = {
    ("softmax", "tiny"): ("5.72", "1.78", "3.55", "2.51", "21.9", None, None),
    ("gka", "tiny"): ("4.38", "0.44", "3.55", "1.98", "16.8", "-23.4", "-21.1"),
    ("softmax", "small"): ("22.05", "7.10", "14.18", "9.20", "84.2", None, None),
    ("gka", "small"): ("16.73", "1.77", "14.18", "7.11", "63.9", "-24.1", "-22.7"),
    ("softmax", "base"): ("86.57", "28.35", "56.67", "35.13", "330.3", None, None),
    ("gka", "base"): ("65.31", "7.09", "56.67", "26.76", "249.2", "-24.6", "-23.8"),
}
# Parameter and compute efficiency: parameters, attention, MLP (M), sigma, FLOPs (G), checkpoint (MB), what the checkpoint figure is the size of,
# and the reductions of parameters, attention and FLOPs (%). Its 9.22 for DeiT-S is twice timm's published 4.61 GMACs, which count LayerNorm too;
# all eleven other FLOP figures count matrix products alone, and so does the main table's 9.20, which we follow.
EFFICIENCY = {
    ("softmax", "tiny"): ("5.72", "1.78", "3.55", "0", "2.51", "21.9", "file", None),
    ("gka", "tiny"): ("4.38", "0.44", "3.55", "36", "1.98", "16.7", "weights", ("-23", "-75", "-21")),
    ("softmax", "small"): ("22.05", "7.10", "14.18", "0", "9.20", "84.2", "file", None),  # printed: 9.22
    ("gka", "small"): ("16.73", "1.77", "14.18", "72", "7.11", "63.9", "file", ("-24", "-75", "-23")),
    ("softmax", "base"): ("86.57", "28.35", "56.67", "0", "35.13", "330.2", "weights", None),
    ("gka", "base"): ("65.31", "7.09", "56.67", "144", "26.76", "249.1", "weights", ("-25", "-75", "-24")),
}
# Ablation of projection matrices: parameters (M), FLOPs (G). VLT's 5.28 needs the bias of the lost W_V (without: 5.27).
ABLATION = {("softmax", "tiny"): ("5.72", "2.51"), ("vlt", "tiny"): ("5.28", "2.33"), ("gka", "tiny"): ("4.38", "1.98")}
# Relative to the twin from exact counts, where the paper divided its own rounded figures (4.38 / 5.72, 1.98 / 2.51).
EXACT_DELTAS = {("tiny", "parameters"): "-23.3", ("tiny", "flops"): "-20.9"}


def cost(kind: str, size: str, **settings):
    return vit_cost(kind, SIZES[size]["embed_dim"], SIZES[size]["depth"], SIZES[size]["num_heads"], **settings)


def millions(count: int) -> str:
    return f"{count / 1e6:.2f}"


def reduction(new: float, old: float, digits: int) -> str:
    return f"{100 * (new / old - 1):.{digits}f}"


def empty_model(kind: str, size: str) -> nn.Module:
    """A paper model with zeros for weights: nothing is spent on drawing 300M random numbers."""
    model = timm.create_model(NAMES[kind].format(size), device="meta").to_empty(device="cpu").eval()
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


@functools.cache
def file_mib(kind: str, size: str) -> float:
    """Size of the file torch.save writes for the float32 state dict, in MiB (the paper's "MB")."""
    file = io.BytesIO()
    torch.save(empty_model(kind, size).state_dict(), file)
    return file.tell() / MIB


@pytest.mark.parametrize("kind,size", MAIN_RESULTS)
def test_main_results_of_the_paper(kind, size):
    parameters, attention, mlp, gflops, megabytes, delta_parameters, delta_flops = MAIN_RESULTS[kind, size]
    ours, twin = cost(kind, size), cost("softmax", size)
    assert (millions(ours.parameters), millions(ours.attention), millions(ours.mlp)) == (parameters, attention, mlp)
    assert (f"{ours.flops / 1e9:.2f}", f"{file_mib(kind, size):.1f}") == (gflops, megabytes)
    if kind == "gka":
        assert reduction(ours.parameters, twin.parameters, 1) == EXACT_DELTAS.get(
            (size, "parameters"), delta_parameters
        )
        assert reduction(ours.flops, twin.flops, 1) == EXACT_DELTAS.get((size, "flops"), delta_flops)
        rounded, rounded_twin = MAIN_RESULTS[kind, size], MAIN_RESULTS["softmax", size]
        assert reduction(float(rounded[0]), float(rounded_twin[0]), 1) == delta_parameters
        assert reduction(float(rounded[3]), float(rounded_twin[3]), 1) == delta_flops


@pytest.mark.parametrize("kind,size", EFFICIENCY)
def test_parameter_and_compute_efficiency_of_the_paper(kind, size):
    parameters, attention, mlp, sigmas, gflops, megabytes, of, reductions = EFFICIENCY[kind, size]
    ours, twin = cost(kind, size), cost("softmax", size)
    assert (millions(ours.parameters), millions(ours.attention), millions(ours.mlp)) == (parameters, attention, mlp)
    assert (str(ours.bandwidths), f"{ours.flops / 1e9:.2f}") == (sigmas, gflops)
    assert f"{file_mib(kind, size) if of == 'file' else ours.raw_mib:.1f}" == megabytes
    if reductions:
        assert (
            tuple(
                reduction(getattr(ours, name), getattr(twin, name), 0) for name in ("parameters", "attention", "flops")
            )
            == reductions
        )


@pytest.mark.parametrize("kind,size", ABLATION)
def test_ablation_of_projections_of_the_paper(kind, size):
    ours = cost(kind, size)
    assert (millions(ours.parameters), f"{ours.flops / 1e9:.2f}") == ABLATION[kind, size]


def counted(model: nn.Module) -> tuple[int, int, int, int]:
    def numel(part):
        return sum(p.numel() for name, p in model.named_parameters() if part in name)

    return numel(""), numel(".attn."), numel(".mlp."), numel("log_sigma")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", NAMES)
def test_the_built_model_has_the_parameters_and_flops_of_the_formulas(kind, size):
    """FlopCounterMode counts 2 x multiply-accumulates of matrix products and convolutions, exactly the paper's convention. It knows no fused
    attention kernel of the CPU, hence SDPA's "math" backend. Our fused path carries |x_j|^2 / (2 sigma^2) in one more channel per head, in the
    Gram matrix and in the mixing: 4 N^2 per head and block that the paper (0.3 % of GKA-Ti) does not count."""
    model, ours = empty_model(kind, size), cost(kind, size)
    assert counted(model) == (ours.parameters, ours.attention, ours.mlp, ours.bandwidths)
    assert cost_of(model) == ours
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 224, 224))
    extra_channels = 8 * 197**2 * ours.bandwidths
    assert counter.get_total_flops() - extra_channels == ours.flops


@pytest.mark.parametrize(
    "settings",
    [
        dict(value_bias=False),
        dict(value_bias=False, qkv_bias=True, depth=1),
        dict(img_size=48, num_classes=0, in_chans=1),
        dict(mlp_ratio=3, patch_size=8),
    ],
    ids=str,
)
def test_cost_of_other_shapes(settings):
    model = small("vlt", **settings)
    ours = cost_of(model)
    assert counted(model) == (ours.parameters, ours.attention, ours.mlp, ours.bandwidths)


def test_vlt_without_the_value_bias():
    model = timm.create_model(NAMES["vlt"].format("tiny"), value_bias=False, device="meta")
    assert (
        counted(model)[0] == cost_of(model).parameters == cost("vlt", "tiny", value_bias=False).parameters == 5_272_744
    )


UNKNOWN = {
    "two special tokens": ("deit_tiny_distilled_patch16_224", {}),
    "no qkv bias": ("vit_tiny_patch16_224", dict(qkv_bias=False)),
    "register tokens": ("vit_tiny_patch16_224", dict(reg_tokens=4)),
    "layer scale": ("deit3_small_patch16_224", {}),
    "four stages": ("swin_tiny_patch4_window7_224", {}),
    "not square": ("deit_tiny_gka_patch16_224", dict(img_size=(64, 32))),
}


@pytest.mark.parametrize("label", UNKNOWN)
def test_cost_of_a_shape_it_does_not_know_is_none_or_right(label):
    name, settings = UNKNOWN[label]
    model = timm.create_model(name, device="meta", **settings)
    ours = cost_of(model)
    assert ours is None or ours.parameters == sum(p.numel() for p in model.parameters())


# --- Numerics: the layers against the paper's equations in float64 ---

SHAPES = [(2, 7, 2, 3), (1, 31, 3, 8), (3, 1, 2, 5), (1, 50, 1, 64)]  # B, N, H, D
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def gaussian_weights(x, sigma, visible=1.0):
    """Paper eq. 3, 4 and 7 by their definitions; x: (B, N, H, D), sigma: (H,), visible: factors on the affinities -> (B, H, N, N)."""
    heads = x.transpose(1, 2)
    distance2 = (heads[:, :, :, None] - heads[:, :, None]).square().sum(-1)
    affinity = torch.exp(-distance2 / (2 * sigma.square()[:, None, None])) * visible
    return affinity / affinity.sum(-1, keepdim=True)


def gaussian_by_definition(layer, x, visible=1.0):
    heads = x.unflatten(-1, (layer.num_heads, -1))
    mixed = gaussian_weights(heads, layer.log_sigma.to(x.dtype).exp(), visible) @ heads.transpose(1, 2)
    return mixed.transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


def value_less_by_definition(layer, x, logit_bias=0.0):
    """softmax(Q K^T / sqrt(D)) applied to x itself (paper section 4.4), heads joined, W_O."""
    w_q, w_k = layer.qk.weight.chunk(2)
    b_q, b_k = layer.qk.bias.chunk(2)
    queries, keys, values = (
        t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for t in (x @ w_q.T + b_q, x @ w_k.T + b_k, x + layer.value_bias)
    )
    logits = queries @ keys.transpose(-1, -2) / math.sqrt(values.shape[-1]) + logit_bias
    exp = (logits - logits.amax(-1, keepdim=True)).exp()
    return (exp / exp.sum(-1, keepdim=True) @ values).transpose(1, 2).flatten(2) @ layer.proj.weight.T + layer.proj.bias


def test_layers_with_settings_are_pickled_and_copied_whole():
    for kind, settings in (("gka", dict(sigma_squared_start=1.0)), ("vlt", dict(keep_value_bias=False))):
        layer = with_settings(kind, **settings)(12, 3, qkv_bias=True)
        x = torch.randn(1, 5, 12)
        for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            assert type(other) is type(layer) and torch.equal(other(x), layer(x))


def make_layer(kind, shape, **settings):
    """A layer with unequal bandwidths, sigma^2 not a power of two, and biases that are not zero."""
    batch, tokens, heads, dim = shape
    layer = with_settings(kind)(heads * dim, heads, qkv_bias=True, **settings)
    for name, p in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)
    if kind == "gka":
        layer.log_sigma.data.copy_(0.5 * torch.log(torch.linspace(1.3 * dim**0.5, 1.3 * dim, heads)))
    return layer, torch.randn(batch, tokens, heads * dim)


def with_gradients(function, layer, x, grad_y, dtype) -> SimpleNamespace:
    """y and its gradients by x and by every parameter, of function(layer, x) in dtype."""
    layer, x = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
    y = function(layer, x)
    y.backward(grad_y.to(dtype))
    return SimpleNamespace(y=y.detach(), dx=x.grad, **{name: p.grad for name, p in layer.named_parameters()})


def check(kind, layer, x, definition, call, eps=0.0):
    """Twice the error of the definition in float32, plus what rounding of the exponents is worth (gka/testing.py) and eps."""
    grad_y = torch.randn_like(x)
    want, plain = (with_gradients(definition, layer, x, grad_y, dtype) for dtype in (torch.float64, torch.float32))
    got = with_gradients(call, layer, x, grad_y, torch.float32)
    split = (layer.num_heads, -1)
    if kind == "gka":
        heads, upstream = x.unflatten(-1, split), (grad_y @ layer.proj.weight.detach()).unflatten(-1, split)
        floor = testing.exponent_ulp(heads, layer.log_sigma.detach())
        conditions = {
            "log_sigma": testing.log_sigma_condition(heads, layer.log_sigma.detach(), None, upstream),
            "dx": 3.0,
        }
    else:
        largest = (
            layer.qk(x).detach().unflatten(-1, (2, *split)).norm(dim=-1).amax((0, 1, 3)).prod()
            / (x.shape[-1] / layer.num_heads) ** 0.5
        )
        floor = torch.finfo(torch.float32).eps * (1 + largest.item())
        # W_Q's and W_K's gradients are sums over tokens of terms of either sign.
        conditions = dict.fromkeys(("qk.weight", "qk.bias"), x.shape[:2].numel() ** 0.5) | {"dx": 3.0}
    for name in vars(want):
        reference, value = getattr(want, name), getattr(got, name)
        assert value.dtype == torch.float32
        if (
            reference.norm() <= 1e-12 * x.shape[0] * grad_y.norm()
        ):  # one token: nothing to learn about sigma; b_K, which the softmax ignores
            assert value.norm() <= floor * grad_y.norm()
            continue
        limit = testing.budget(plain, want, name, (floor + eps) * conditions.get(name, 1.0))
        assert testing.error(value, reference) <= limit, (
            f"{name}: error {testing.error(value, reference):.1e}, budget {limit:.1e}"
        )


def tokens_seen(mask: str, shape):
    """A mask as users pass it, and the same as factors on the paper's affinities (eq. 7)."""
    batch, tokens, heads, _ = shape
    itself = torch.eye(tokens, dtype=torch.bool)
    if mask == "pairs":
        mask = (torch.rand(tokens, tokens) < 0.5) | itself
    elif mask == "padding":  # keys that are padding, per image; the last tokens are
        mask = (torch.arange(tokens) < torch.tensor([tokens - 2, tokens, tokens - 1])[:batch, None].clamp(min=1))[
            :, None, None
        ]
    elif mask == "heads":
        mask = (torch.rand(batch, heads, tokens, tokens) < 0.5) | itself
    else:  # added to the logits; -inf hides
        mask = torch.randn(tokens, tokens).masked_fill((torch.rand(tokens, tokens) < 0.3) & ~itself, float("-inf"))
        return mask, mask.double().exp()
    return mask, mask.double()


@shapes
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gka_is_the_papers_equations(shape, fused, is_causal, request):
    if not fused:
        request.getfixturevalue("explicit")
    layer, x = make_layer("gka", shape)
    assert layer.fused_attn is fused
    visible = torch.ones(shape[1], shape[1]).tril() if is_causal else 1.0
    # The explicit path adds the paper's epsilon to row sums of at least 1.
    check(
        "gka",
        layer,
        x,
        lambda f, x: gaussian_by_definition(f, x, visible),
        lambda f, x: f(x, is_causal=is_causal),
        eps=0 if fused else EPS,
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_the_explicit_path_has_second_derivatives_between_equal_tokens(is_causal, explicit):
    layer = ATTENTION["gka"](6, num_heads=2, proj_bias=False).double()
    nn.init.eye_(layer.proj.weight)
    x, grad_y, direction = (
        torch.randn(1, 5, 6, dtype=torch.float64)[:, index] for index in ([0, 1, 0, 2, 2], slice(None), slice(None))
    )
    x.requires_grad_()
    (gradient,) = torch.autograd.grad((layer(x, is_causal=is_causal) * grad_y).sum(), x, create_graph=True)
    (got,) = torch.autograd.grad((gradient * direction).sum(), x)

    heads, grad_heads, along = (t.detach().view(1, 5, 2, 3).numpy() for t in (x, grad_y, direction))
    tensors, directions = [heads] * 3 + [layer.log_sigma.detach().numpy()], [along] * 3 + [np.zeros(2)]
    *want, _ = explicit_sums.curvature(tensors, directions, is_causal, 0.0, grad_heads)
    torch.testing.assert_close(got, torch.from_numpy(sum(want)).view(1, 5, 6), rtol=1e-11, atol=1e-13)


@shapes
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_vlt_is_a_softmax_over_the_features(shape, fused, is_causal, request):
    if not fused:
        request.getfixturevalue("explicit")
    layer, x = make_layer("vlt", shape)
    bias = torch.full((shape[1], shape[1]), float("-inf")).triu(1) if is_causal else 0.0
    check("vlt", layer, x, lambda f, x: value_less_by_definition(f, x, bias), lambda f, x: f(x, is_causal=is_causal))


@pytest.mark.parametrize("mask", ["pairs", "padding", "heads", "added"])
@kinds
def test_a_mask_renormalises_the_rows_that_remain(kind, mask):
    shape = (3, 11, 2, 8)
    layer, x = make_layer(kind, shape)
    attn_mask, visible = tokens_seen(mask, shape)
    definitions = {
        "gka": lambda f, x: gaussian_by_definition(f, x, visible.to(x.dtype)),
        "vlt": lambda f, x: value_less_by_definition(f, x, visible.log().to(x.dtype)),
    }
    check(kind, layer, x, definitions[kind], lambda f, x: f(x, attn_mask=attn_mask), eps=EPS)


@pytest.mark.parametrize("shift", [100.0, -100.0])
@kinds
def test_a_constant_added_to_all_logits_changes_nothing(kind, shift):
    layer, x = make_layer(kind, (1, 9, 2, 8))
    torch.testing.assert_close(layer(x, attn_mask=torch.full((9, 9), shift)), layer(x), rtol=1e-4, atol=1e-5)


@kinds
def test_a_token_that_may_not_see_itself_among_distant_ones(kind):
    """All remaining affinities underflow in float32; the rows are still finite averages of what they may see, and so are gradients."""
    layer, x = make_layer(kind, (1, 4, 1, 8))
    x = (30 * x).requires_grad_()
    y = layer(x, attn_mask=~torch.eye(4, dtype=torch.bool))
    y.sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(x.grad).all()


@kinds
def test_the_explicit_path_equals_the_fused_one_in_a_whole_model(kind, images, explicit):
    model = small(kind).double().eval()
    timm.layers.set_fused_attn(True)
    fused = small(kind).double().eval()
    fused.load_state_dict(model.state_dict())
    assert [model.blocks[0].attn.fused_attn, fused.blocks[0].attn.fused_attn] == [False, True]
    torch.testing.assert_close(model(images.double()), fused(images.double()), rtol=10 * EPS, atol=10 * EPS)


def test_the_value_bias_is_a_bias_of_the_output():
    """Rows of W sum to 1, so W (x + b) W_O = W x W_O + b W_O."""
    with_bias = make_layer("vlt", (2, 9, 3, 5))[0].double()
    without = with_settings("vlt", keep_value_bias=False)(15, 3, qkv_bias=True).double()
    state = with_bias.state_dict()
    state["proj.bias"] = state["proj.bias"] + state["proj.weight"] @ state.pop("value_bias")
    without.load_state_dict(state)
    x = torch.randn(2, 9, 15, dtype=torch.float64)
    torch.testing.assert_close(with_bias(x), without(x), rtol=1e-12, atol=1e-12)


@kinds
def test_attention_dropout_drops_weights_in_training_only(kind):
    layer, x = make_layer(kind, (2, 9, 2, 8), attn_drop=0.4)
    weights = []
    layer.attn_drop.register_forward_hook(
        lambda module, inputs, output: weights.append((inputs[0].detach(), output.detach()))
    )
    y = layer(x)
    (before, after) = weights[0]
    kept = after != 0
    assert 0.4 < kept.float().mean() < 0.8
    torch.testing.assert_close(after[kept], before[kept] / 0.6)
    values = x.unflatten(-1, (2, 8)) + (layer.value_bias.unflatten(-1, (2, 8)) if kind == "vlt" else 0)
    torch.testing.assert_close(y, layer.proj((after @ values.transpose(1, 2)).transpose(1, 2).flatten(2)))
    definition = {"gka": gaussian_by_definition, "vlt": value_less_by_definition}[kind]
    torch.testing.assert_close(layer.eval()(x), definition(layer, x), rtol=1e-4, atol=1e-5)


@kinds
def test_projection_dropout(kind):
    layer, x = make_layer(kind, (2, 9, 2, 8), proj_drop=0.5)
    y, want = layer(x), layer.eval()(x)
    kept = y != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(y[kept], 2 * want[kept])


# --- What timm users expect ---


def test_every_size_is_listed():
    for kind in KINDS:
        plain = [NAMES[kind].format(size) for size in ("base", "small", "tiny")]
        assert timm.list_models(f"*{kind}_patch*") == plain
        assert timm.list_models(f"*{kind}_dist*") == [name.replace("_patch", "_distilled_patch") for name in plain]
        assert all(timm.get_pretrained_cfg(name).input_size == (3, 224, 224) for name in timm.list_models(f"*{kind}*"))


@kinds
def test_pretrained_is_a_clear_error(kind):
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        create(kind, pretrained=True)


@kinds
@pytest.mark.parametrize("setting", ["qk_norm", "scale_attn_norm"])
def test_norms_of_what_does_not_exist_are_a_clear_error(kind, setting):
    with pytest.raises(ValueError, match=f"{kind.upper()} has no qk_norm or scale_norm"):
        small(kind, **{setting: True})


@kinds
def test_heads_that_do_not_divide_the_width_are_a_clear_error(kind):
    with pytest.raises(ValueError, match="num_heads must divide dim"):
        small(kind, embed_dim=25)


@kinds
def test_forward_is_features_then_head(kind, images):
    model = small(kind).eval()
    features = model.forward_features(images)
    assert features.shape == (2, 5, 24)
    torch.testing.assert_close(model(images), model.head(model.forward_head(features, pre_logits=True)))
    headless = small(kind, num_classes=0).eval()
    headless.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("head")})
    torch.testing.assert_close(headless(images), model.forward_head(features, pre_logits=True))


@kinds
def test_the_classifier_is_replaced(kind, images):
    model = small(kind).eval()
    assert model.get_classifier().out_features == model.num_classes == 5
    model.reset_classifier(7)
    assert model(images).shape == (2, 7)
    model.reset_classifier(0)
    assert model(images).shape == (2, 24)


@kinds
def test_tokens_of_every_place_reach_the_logits(kind, images):
    """Attention mixes: the CLS token, on which the head sits, sees every patch."""
    model = small(kind).eval()
    images.requires_grad_()
    model(images).sum().backward()
    patches = F.avg_pool2d(images.grad.abs(), 16)
    assert (patches > 0).all()


@kinds
@pytest.mark.parametrize(
    "settings,tokens",
    [(dict(img_size=(48, 32)), 7), (dict(img_size=64, patch_size=32), 5), (dict(in_chans=1), 5)],
    ids=str,
)
def test_other_inputs_at_build(kind, settings, tokens):
    model = small(kind, **settings)
    height, width = model.patch_embed.img_size
    x = torch.randn(2, model.patch_embed.proj.in_channels, height, width)
    assert model.forward_features(x).shape == (2, tokens, 24)
    assert model(x).shape == (2, 5)


@kinds
def test_set_input_size_is_the_twins(kind):
    """Positions are resampled as for timm's own model; attention has nothing that depends on the size."""
    model, twin = small(kind).eval(), timm.create_model("deit_tiny_patch16_224", **SMALL)
    twin.load_state_dict(model.state_dict(), strict=False)
    for either in (model, twin):
        either.set_input_size((64, 48))
    assert torch.equal(model.pos_embed, twin.pos_embed)
    assert model(torch.randn(1, 3, 64, 48)).shape == (1, 5)


@kinds
def test_any_size_with_dynamic_img_size(kind, images):
    model = small(kind).eval()
    dynamic = small(kind, dynamic_img_size=True).eval()
    dynamic.load_state_dict(model.state_dict())
    torch.testing.assert_close(dynamic(images), model(images))
    assert dynamic(torch.randn(1, 3, 64, 48)).shape == (1, 5)


@kinds
def test_a_checkpoint_of_the_same_size(kind, tmp_path, images):
    saved = small(kind).eval()
    torch.save({"state_dict": saved.state_dict()}, tmp_path / "model.pth")
    model = create(kind, checkpoint_path=str(tmp_path / "model.pth")).eval()
    assert torch.equal(model(images), saved(images))


@kinds
def test_a_224_checkpoint_in_a_model_of_another_size(kind, tmp_path):
    """With other classes too: positions are resampled as timm does for its own, the head is left fresh, the rest is bit for bit the file's."""
    saved = small(kind, img_size=224, num_classes=1000)
    torch.save(saved.state_dict(), tmp_path / "model.pth")
    file = dict(file=str(tmp_path / "model.pth"))
    model = create(kind, img_size=64, pretrained=True, pretrained_cfg_overlay=file)
    want = saved.state_dict()
    want["pos_embed"] = timm.layers.resample_abs_pos_embed(
        want["pos_embed"], new_size=(4, 4), old_size=(14, 14), num_prefix_tokens=1
    )
    for name, value in model.state_dict().items():
        if not name.startswith("head"):
            torch.testing.assert_close(value, want[name], rtol=0, atol=0, msg=name)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 5)


@kinds
def test_save_for_hf_round_trip(kind, tmp_path, images):
    """Settings of ours travel in config.json."""
    settings = {"gka": dict(sigma_squared=3.0, impl="reference"), "vlt": dict(value_bias=False)}[kind]
    saved = small(kind, **settings).eval()
    save_for_hf(saved, tmp_path)
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(model(images), saved(images))
    assert getattr(model.blocks[0].attn, "impl", None) == settings.get("impl")


@kinds
def test_gradient_checkpointing_changes_no_gradient(kind, images):
    model = small(kind, attn_drop_rate=0.2)
    other = copy.deepcopy(model)
    other.set_grad_checkpointing()
    for m in (model, other):
        torch.manual_seed(3)
        m(images).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters()):
        assert p.grad.norm() > 0 or name.endswith("qk.bias"), name
        torch.testing.assert_close(q.grad, p.grad)


@kinds
def test_drop_path_grows_over_blocks_and_leaves_evaluation_alone(kind, images):
    model = small(kind, depth=3, drop_path_rate=0.5)
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks] == pytest.approx([0, 0.25, 0.5])
    assert len({model(images[:1]).sum().item() for _ in range(8)}) > 1
    plain = small(kind, depth=3).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(images), plain(images))


@kinds
def test_intermediate_features(kind, images):
    model = small(kind, depth=3).eval()
    final, maps = model.forward_intermediates(images, indices=[0, 2])
    torch.testing.assert_close(final, model.forward_features(images))
    assert [m.shape for m in maps] == [(2, 24, 2, 2)] * 2
    extractor = create(kind, depth=3, features_only=True).eval()
    extractor.model.load_state_dict(
        {name: t for name, t in model.state_dict().items() if not name.startswith(("norm.", "head."))}, strict=False
    )
    assert extractor.feature_info.channels() == [24] * 3 and extractor.feature_info.reduction() == [16] * 3
    features = extractor(images)
    torch.testing.assert_close([features[0], features[2]], maps)


@kinds
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
def test_compile_is_one_graph_with_the_same_outputs_and_gradients(kind, fused, images, request):
    if not fused:
        request.getfixturevalue("explicit")
    model = small(kind)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    y, z = model(images), compiled(images)
    torch.testing.assert_close(z, y)
    y.square().sum().backward()
    z.square().sum().backward()
    for p, q in zip(model.parameters(), compiled.parameters()):
        torch.testing.assert_close(q.grad, p.grad)


@kinds
def test_export_with_a_free_batch_size(kind, images):
    model = small(kind).eval()
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    others = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(program.module()(others), model(others))


@kinds
@pytest.mark.filterwarnings("ignore")
def test_trace(kind, images):
    model = small(kind).eval()
    traced = torch.jit.trace(model, images)
    others = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(traced(others), model(others))


@kinds
def test_deepcopy_is_independent(kind, images):
    model = small(kind).eval()
    before, other = model(images), copy.deepcopy(model)
    for p in model.parameters():
        nn.init.normal_(p)
    assert torch.equal(other(images), before)


@kinds
def test_built_on_the_meta_device(kind, images):
    with torch.device("meta"):
        model = create(kind)
    assert all(p.is_meta for p in model.parameters())
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))  # what to_empty leaves may be anything
    model.init_weights()
    model.norm.reset_parameters()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    attention, fresh = model.blocks[1].attn, create(kind).blocks[1].attn
    for name in ("log_sigma", "value_bias"):
        torch.testing.assert_close(getattr(attention, name, None), getattr(fresh, name, None))


@kinds
def test_forward_on_the_meta_device(kind):
    """Shapes and FLOPs of a large model without its memory."""
    model = create(kind, device="meta")
    with FlopCounterMode(display=False) as counter:
        assert model(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 5)
    assert counter.get_total_flops() >= 2 * cost_of(model).flops


@pytest.mark.parametrize("mode", ["", "jax", "jax_nlhb", "moco", "skip", "reset"])
def test_every_weight_init_starts_with_the_bandwidth_asked_for(mode):
    model = create(weight_init=mode, sigma_squared=3.0)
    for block in model.blocks:
        torch.testing.assert_close(block.attn.log_sigma.exp().square(), torch.full((3,), 3.0))
    model.init_weights()
    torch.testing.assert_close(model.blocks[1].attn.log_sigma.exp().square(), torch.full((3,), 3.0))


def test_settings_belong_to_one_model():
    small(sigma_squared=0.7, impl="reference")
    default = small().blocks[0].attn
    torch.testing.assert_close(default.log_sigma.exp().square(), torch.full((3,), 8**0.5))
    assert default.impl == "auto"
    assert small("vlt", value_bias=False).blocks[0].attn.value_bias is None
    assert small("vlt").blocks[0].attn.value_bias.shape == (24,)


def test_impl_chooses_the_implementation(images, monkeypatch):
    reference, fused = small(impl="reference").eval(), small(impl="sdpa").eval()
    fused.load_state_dict(reference.state_dict())
    torch.testing.assert_close(fused(images), reference(images), rtol=1e-4, atol=1e-5)

    def refuse(*args, **kwargs):
        raise AssertionError("fused attention was called")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    reference(images)
    with pytest.raises(AssertionError, match="fused attention was called"):
        fused(images)


@pytest.mark.parametrize(
    "settings,named", [(dict(impl="cuda"), "impl"), (dict(sigma_squared=-1.0), "sigma_squared")], ids=str
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        small(**settings)


@kinds
def test_any_timm_vit_takes_our_attention_by_name(kind, images):
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=kind, **SMALL).eval()
    ours = small(kind).eval()
    model.load_state_dict(ours.state_dict())
    assert torch.equal(model(images), ours(images))


@kinds
def test_attention_maps_by_timms_own_extractor(kind, images, explicit):
    model = small(kind).eval()
    inputs = []
    model.blocks[0].norm1.register_forward_hook(lambda module, args, output: inputs.append(output))
    maps = AttentionExtract(model, method="hook")(images)
    assert list(maps) == [f"blocks.{i}.attn.attn_drop" for i in range(2)]
    for weights in maps.values():
        assert weights.shape == (2, 3, 5, 5) and (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    if kind == "gka":
        want = gaussian_weights(inputs[0].unflatten(-1, (3, 8)), model.blocks[0].attn.log_sigma.exp())
        torch.testing.assert_close(maps["blocks.0.attn.attn_drop"], want, rtol=1e-5, atol=1e-5)


@kinds
def test_bfloat16_weights_keep_float32_bandwidths(kind, images):
    model = small(kind, dtype=torch.bfloat16).eval()
    want = copy.deepcopy(model).float()(images)
    assert {p.dtype for name, p in model.named_parameters() if "log_sigma" in name} <= {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if "log_sigma" not in name} == {torch.bfloat16}
    y = model(images.bfloat16())
    assert y.dtype == torch.bfloat16
    assert testing.error(y, want) <= 2 * rounding_of_the_twin(images, lambda twin, x: twin.bfloat16()(x.bfloat16()))


@kinds
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
def test_autocast_costs_no_more_than_for_softmax(kind, fused, images, request):
    if not fused:
        request.getfixturevalue("explicit")
    model = small(kind).eval()

    def under_autocast(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    y = under_autocast(model, images)
    assert y.dtype == torch.bfloat16
    assert testing.error(y, model(images)) <= 2 * rounding_of_the_twin(images, under_autocast)


def rounding_of_the_twin(images, run) -> float:
    """The relative error bfloat16 costs timm's own model of the same shape, plus one rounding."""
    twin = small("softmax").eval()
    return testing.error(run(copy.deepcopy(twin), images), twin(images)) + torch.finfo(torch.bfloat16).eps


def test_what_is_not_decayed():
    """Counted over the paper's GKA-Ti: log sigma, biases, norms, CLS token and positions are not (paper, section 4.1)."""
    model = timm.create_model(NAMES["gka"].format("tiny"), device="meta")
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group["weight_decay"]: group["params"] for group in optimizer.param_groups}
    assert {decay: (len(p), sum(t.numel() for t in p)) for decay, p in groups.items()} == {
        0.0: (102, 62_668),
        0.05: (38, 4_320_768),
    }
    undecayed = {names[id(p)] for p in groups[0.0]}
    expected = ("log_sigma", ".bias", "pos_embed", "cls_token", "norm.weight", "norm1.weight", "norm2.weight")
    assert undecayed == {name for name in names.values() if name.endswith(expected)}


def test_the_value_bias_is_not_decayed():
    optimizer = timm.optim.create_optimizer_v2(model := small("vlt"), "adamw", lr=1e-3, weight_decay=0.05)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not any(id(block.attn.value_bias) in decayed for block in model.blocks)


def test_a_training_step_moves_the_bandwidths(images):
    model = small()
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    before = [block.attn.log_sigma.detach().clone() for block in model.blocks]
    F.cross_entropy(model(images), torch.tensor([1, 3])).backward()
    optimizer.step()
    assert all((block.attn.log_sigma != old).all() for block, old in zip(model.blocks, before))


# --- The softmax twin is timm's DeiT ---


def facebook_checkpoint(path, depth=12, dim=192, classes=1000, tokens=197):
    """A file in the layout of facebookresearch/deit's published weights, filled at random: the names and shapes are that release's."""

    def linear(name, outputs, inputs):
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    def norm(name):
        return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}

    shapes = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, tokens, dim),
        "patch_embed.proj.weight": (dim, 3, 16, 16),
        "patch_embed.proj.bias": (dim,),
    }
    for i in range(depth):
        b = f"blocks.{i}"
        shapes |= norm(f"{b}.norm1") | linear(f"{b}.attn.qkv", 3 * dim, dim) | linear(f"{b}.attn.proj", dim, dim)
        shapes |= norm(f"{b}.norm2") | linear(f"{b}.mlp.fc1", 4 * dim, dim) | linear(f"{b}.mlp.fc2", dim, 4 * dim)
    shapes |= norm("norm") | linear("head", classes, dim)
    state = {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    torch.save({"model": state}, path)
    return state


def test_the_twin_is_timms_own(tmp_path):
    """Importing deit_gka neither replaces timm's models nor its attention, and Facebook's files load into them bit for bit."""
    state = facebook_checkpoint(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth")
    file = dict(file=str(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth"))
    assert timm.model_entrypoint("deit_tiny_patch16_224").__module__ == "timm.models.deit"
    for model in (
        timm.create_model("deit_tiny_patch16_224", attn_layer="attn", weight_init="skip", checkpoint_path=file["file"]),
        timm.create_model("deit_tiny_patch16_224", weight_init="skip", pretrained=True, pretrained_cfg_overlay=file),
    ):
        assert type(model.blocks[0].attn) is timm.layers.Attention
        loaded = model.state_dict()
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_softmax_weights_in_gka_say_what_is_missing(tmp_path):
    state = facebook_checkpoint(tmp_path / "deit.pth", depth=2, dim=24, classes=5, tokens=5)
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*blocks\.0\.attn\.log_sigma.*Unexpected key.*blocks\.0\.attn\.qkv\.weight"
    ):
        create(checkpoint_path=str(tmp_path / "deit.pth"))
    model = small()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == [f"blocks.{i}.attn.log_sigma" for i in range(2)]
    assert sorted(unexpected) == sorted(f"blocks.{i}.attn.qkv.{part}" for i in range(2) for part in ("weight", "bias"))
    assert torch.equal(model.blocks[1].mlp.fc2.weight, state["blocks.1.mlp.fc2.weight"])
