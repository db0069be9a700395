"""The registered models in timm's hands: names, patterns by layer, settings, files, compilation, export, precision."""

import copy
import pickle

import pytest
import timm
import timm.layers
import torch
from timm.models import save_for_hf
from torch import nn
from torchvision.models.feature_extraction import create_feature_extractor

from deit_gka.figures.maps import attention_maps
from deit_gka.model.attention import ATTENTION, kind_of
from deit_gka.model.checkpoints import build
from deit_gka.model.plain import plain
from deit_gka.model.registry import MODELS, model_name
from gka import KINDS, GaussianKernelAttention, testing
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_vit import SMALL, create, kinds, small
from trainkit_gka.cli import UserError

ALL = "".join(KINDS[kind].letter for kind in ATTENTION)  # every kind once
GKA, SOFTMAX = "deit_tiny_gka_patch16_224", "deit_tiny_patch16_224"
CHANNELS, BARE_NORM = dict(channel_bandwidths=True), dict(norm_weight=False)


def kinds_of(model) -> str:
    return "".join(KINDS[kind_of(block.attn)].letter for block in model.blocks)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model_name(*model))
def test_every_registered_model_has_its_kind_and_heads(model):
    size, kind, distilled = model
    vit = timm.create_model(model_name(*model), **{**SMALL, "num_heads": 3}).eval()
    assert kinds_of(vit) == 2 * KINDS[kind].letter and timm.is_model(model_name(size, kind, distilled))
    assert vit.num_prefix_tokens == 1 + distilled and vit(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    features = timm.create_model(model_name(*model), features_only=True, **{**SMALL, "depth": 3})
    assert [maps.shape for maps in features(torch.randn(2, 3, 32, 32))] == 3 * [(2, 24, 2, 2)]
    assert timm.get_pretrained_cfg(model_name(*model)).crop_pct == 0.875


# Patterns by layer


@pytest.mark.parametrize("pattern,expected", [("GGGA", "GGGAG"), ("agv", "AGVAG"), ("softmax", "AAAAA")])
@pytest.mark.parametrize("name", ["deit_tiny_vlt_distilled_patch16_224", "vit_tiny_r_s16_p8_224", SOFTMAX])
def test_pattern_is_tiled_over_the_layers_of_ours_and_timms(name, pattern, expected):
    assert kinds_of(timm.create_model(name, attn_layer=pattern, depth=5, device="meta")) == expected


def test_layers_are_those_of_their_kinds(images):
    """Block by block the hybrid computes what the models of one kind compute; timm's own ViT is the same model."""
    hybrid, x = small(attention=ALL, depth=3).eval(), torch.randn(2, 5, 24)
    for block, kind in zip(hybrid.blocks, ATTENTION):
        twin = create(kind).blocks[0].eval()
        twin.load_state_dict(block.state_dict())
        assert torch.equal(block(x), twin(x))
    timms = build("vit_tiny_patch16_224", 5, 32, attention=ALL, embed_dim=24, num_heads=3, depth=3).eval()
    timms.load_state_dict(hybrid.state_dict())
    assert kinds_of(timms) == ALL and torch.equal(timms(images), hybrid(images))


# Settings


def test_settings_belong_to_their_kind_and_to_one_model():
    model = small(attention="GVA", depth=3, sigma_squared=3.0, value_bias=False, impl="reference")
    default = small(attention="GVA", depth=3)
    for one, squared, impl in ((model, 3.0, "reference"), (default, 8**0.5, "auto")):
        torch.testing.assert_close(one.blocks[0].attn.log_sigma.exp().square(), torch.full((3,), squared))
        assert one.blocks[0].attn.impl == impl
    assert model.blocks[1].attn.value_bias is None and default.blocks[1].attn.value_bias.shape == (24,)


def test_channel_bandwidths_and_bare_norms_change_these_tensors_alone(images):
    """Both are off by default, and a model with them starts as the usual one."""
    usual = create().eval()
    bare = {f"blocks.{layer}.norm1.{part}" for layer in range(2) for part in ("weight", "bias")}
    scales = {f"blocks.{layer}.attn.log_scale" for layer in range(2)}
    for settings, added, taken in ((CHANNELS, scales, set()), (BARE_NORM, set(), bare)):
        model = create(**settings).eval()
        assert model.state_dict().keys() == usual.state_dict().keys() - taken | added
        model.load_state_dict({name: t for name, t in usual.state_dict().items() if name not in taken}, strict=False)
        torch.testing.assert_close(model(images), usual(images))


REFUSED = {
    "pretrained": (dict(pretrained=True), "pretrained"),
    "norms of queries and keys": (dict(qk_norm=True), "qk_norm"),
    "a width that heads do not divide": (dict(attention="vlt", embed_dim=25), "num_heads"),
    "an unknown letter": (dict(attention="GGX"), "'GGX'"),
    "a setting of no layer": (dict(attention="GA", value_bias=False), "value_bias"),
    "an unknown neighbour": (dict(spatial_offsets="LX"), "spatial_offsets"),
    "more letters than heads": (dict(spatial_offsets="LURB"), "4 letters"),
    "a misspelt setting": (dict(sigma_sqared=3.0), "sigma_sqared"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_refused(case):
    """As timm's users see it and, in one line, as those of our commands do."""
    settings, message = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        create(**settings)
    with pytest.raises(UserError, match=message) as caught:
        build(GKA, **{**SMALL, **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, setting", [
    ("vit_pwee_patch16_reg1_gap_256", "attention"), ("vit_pwee_patch16_reg1_gap_256", "attn_layer"),
    (SOFTMAX, "spatial_offsets"),
])  # fmt: skip
def test_models_that_would_ignore_a_setting_are_refused(name, setting):
    with pytest.raises(UserError, match=setting if setting == "spatial_offsets" else "GA"):
        build(name, depth=2, embed_dim=48, num_heads=2, **{setting: "LU" if setting == "spatial_offsets" else "GA"})


# Copies and files

SAVED = {
    "gka": (GKA, dict(sigma_squared=3.0, impl="reference")),
    "vlt": (GKA, dict(attention="V", value_bias=False)),
    "hybrid": (GKA, dict(attention=ALL, depth=3)),
    "no biases": (GKA, dict(attention=ALL, depth=3, qkv_bias=False)),
    "distilled": ("deit_tiny_gka_distilled_patch16_224", {}),
    "timm's own": ("vit_tiny_patch16_224", dict(attention=ALL, depth=3)),
    "offsets": (GKA, dict(attention=ALL, depth=3, spatial_offsets="LUD", img_size=[32, 48])),
    "channels": (GKA, CHANNELS | BARE_NORM | dict(attention="GA")),
}


@pytest.mark.parametrize("case", SAVED)
def test_models_are_pickled_copied_saved_exported_and_written_plainly(case, tmp_path):
    """Settings of ours travel in config.json, from which timm builds the model again."""
    name, settings = SAVED[case]
    model = build(name, **{**SMALL, **settings}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(2, 3, *settings.get("img_size", (32, 32)))
    want = model(images)
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), again):
        assert kinds_of(other) == kinds_of(model) and torch.equal(other(images), want)
    assert getattr(again.blocks[0].attn, "impl", None) == getattr(model.blocks[0].attn, "impl", None)
    torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), want)
    torch.testing.assert_close(plain(model)(images), want, rtol=1e-4, atol=1e-4)
    assert all(layer.error < 1e-5 for layer in attention_maps(model, images))


def test_softmax_model_is_timms_own(tmp_path):
    """Importing deit_gka replaces neither timm's models nor its attention; files of DeiT's load bit for bit."""
    path = str(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth")
    state = timm.models.VisionTransformer(embed_dim=192, num_heads=3).state_dict()
    torch.save({"model": state}, path)
    assert timm.model_entrypoint(SOFTMAX).__module__ == "timm.models.deit"
    model = timm.create_model(SOFTMAX, weight_init="skip", attn_layer="attn", checkpoint_path=path)
    assert type(model.blocks[0].attn) is timm.layers.Attention
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


# Features, compilation, export


@kinds
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("offsets", ["", "LU"])
def test_traces_and_exports_compute_the_same_for_another_batch(kind, fused, offsets, images):
    """By torch.fx, whose graph torchvision's extractor reads, torch.jit.trace and torch.export."""
    model, more = small(kind, spatial_offsets=offsets).eval(), torch.randn(3, 3, 32, 32)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for traced in (torch.fx.symbolic_trace(model), torch.jit.trace(model, images), program.module()):
        torch.testing.assert_close(traced(more), model(more))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()  # an input of the graph
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(more, mask), model(more, mask))
    final, (first, last) = model.forward_intermediates(images, indices=[0, 1])
    torch.testing.assert_close(final, model.forward_features(images))
    extracted = create_feature_extractor(model, {"blocks.0": "first", "blocks.1": "last"})(images)
    for taken, tokens in ((first, extracted["first"]), (last, extracted["last"])):
        torch.testing.assert_close(taken, tokens[:, 1:].transpose(1, 2).unflatten(2, (2, 2)))


@kinds
def test_compile_is_one_graph_and_changes_nothing(kind, fused, images):
    model = small(kind)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    y, z = model(images), compiled(images)
    torch.testing.assert_close(z, y)
    y.square().sum().backward()
    z.square().sum().backward()
    for p, q in zip(model.parameters(), compiled.parameters()):
        torch.testing.assert_close(q.grad, p.grad)


# Precision


@kinds
@pytest.mark.parametrize("autocast, fused", [(False, True), (True, True), (True, False)], indirect=["fused"])
def test_the_error_in_bfloat16_is_that_of_timms_softmax(kind, autocast, fused, images):
    """Bandwidths stay float32."""
    dtype = torch.float32 if autocast else torch.bfloat16

    def output(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(images.to(dtype))
        assert y.dtype == torch.bfloat16
        return y

    model, twin = small(kind, dtype=dtype).eval(), small("softmax").eval()
    assert all(p.dtype == (torch.float32 if "log_sigma" in name else dtype) for name, p in model.named_parameters())
    want, twins = copy.deepcopy(model).float()(images), twin(images)
    allowed = testing.error(output(twin.to(dtype)), twins) + torch.finfo(torch.bfloat16).eps
    assert testing.error(output(model), want) <= 2 * allowed


def test_fsdp_in_bfloat16(fused, images, tmp_path):
    with process_group(tmp_path):
        model = small("gka")
        check_trains_as_in_bfloat16(model, lambda m: m.blocks, lambda m: m(images.bfloat16()).float().square().sum())


def test_the_operators_layer_assigned_by_hand():
    """timm's blocks hand it their masks."""
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    for block in model.blocks:
        block.attn = GaussianKernelAttention(192, 3)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(block.attn.log_sigma.grad.any() for block in model.blocks)
    block, x, mask = model.blocks[0], torch.randn(2, 5, 192), torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(block(x, attn_mask=mask), block(x, is_causal=True), rtol=1e-4, atol=1e-5)
