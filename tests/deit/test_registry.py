"""Registered models: names, patterns by layer, settings, refusals, and weights from timm's and DeiT's files."""

import copy
import pickle

import pytest
import timm
import timm.layers
import torch
from timm.models import save_for_hf
from torch import nn

from deit_gka.figures.maps import attention_maps
from deit_gka.model.accounting import cost_of
from deit_gka.model.attention import ATTENTION, attention_layers, kind_of, operators_of
from deit_gka.model.checkpoints import build, parse_kwargs
from deit_gka.model.plain import plain
from deit_gka.model.registry import OUR_KINDS, model_name
from deit_gka.training.engine import bandwidths, wrong_bandwidths
from gka import KINDS
from tiny_vit import SMALL, create, kinds, small
from trainkit_gka.cli import UserError

ALL = "".join(KINDS[kind].letter for kind in ATTENTION)  # every kind once
GKA, SOFTMAX = "deit_tiny_gka_patch16_224", "deit_tiny_patch16_224"
CHANNELS, BARE_NORM = parse_kwargs(("channel_bandwidths=True",)), parse_kwargs(("norm_weight=False",))


def kinds_of(model) -> str:
    return "".join(KINDS[kind_of(block.attn)].letter for block in model.blocks)


def test_timm_lists_every_size_and_kind():
    for kind in OUR_KINDS:
        names = [model_name(size, kind) for size in ("base", "small", "tiny")]
        assert timm.list_models(f"*{kind}_patch*") == names
        assert timm.list_models(f"*{kind}_dist*") == [name.replace("_patch", "_distilled_patch") for name in names]


# Patterns by layer


@pytest.mark.parametrize("pattern,kinds", [("GGGA", "GGGAG"), ("agv", "AGVAG"), ("softmax", "AAAAA")])
@pytest.mark.parametrize("name", ["deit_tiny_vlt_distilled_patch16_224", "vit_tiny_r_s16_p8_224", SOFTMAX])
def test_pattern_is_tiled_over_the_layers_of_ours_and_timms(name, pattern, kinds):
    assert kinds_of(timm.create_model(name, attn_layer=pattern, depth=5, device="meta")) == kinds


def test_layers_are_those_of_their_kinds(images):
    """Block by block the hybrid computes what the models of one kind compute; timm's own ViT is the same model."""
    hybrid, x = small(attention=ALL, depth=3).eval(), torch.randn(2, 5, 24)
    for block, kind in zip(hybrid.blocks, ATTENTION):
        twin = create(kind).blocks[0].eval()
        twin.load_state_dict(block.state_dict())
        assert torch.equal(block(x), twin(x))
    own = build("vit_tiny_patch16_224", 5, 32, attention=ALL, embed_dim=24, num_heads=3, depth=3).eval()
    own.load_state_dict(hybrid.state_dict())
    assert kinds_of(own) == ALL and torch.equal(own(images), hybrid(images))


def test_offsets_start_again_in_every_layer(images):
    model = small(spatial_offsets="ln", depth=3).eval()
    assert [block.attn.offsets.pattern for block in model.blocks] == ["LN"] * 3
    twin = small(spatial_offsets="LNL", depth=3).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(images), model(images))


def test_every_layer_of_two_side_by_side_is_ours_and_reports_its_bandwidths():
    model = build("vit_small_patch16_18x2_224", depth=2, embed_dim=24, num_heads=3, attention="gka")
    assert [type(layer) for layer in attention_layers(model)] == [ATTENTION["gka"]] * 4
    assert [(layer, len(sigma)) for layer, sigma in bandwidths(model)] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    with torch.no_grad():
        attention_layers(model)[2].log_sigma[1] = -20
    assert list(wrong_bandwidths(model)) == ["sigma of layer_2, head 1"]


# The smallest that timm has of families whose blocks have no attention, or one under another name.
OTHERS = ["mobilenetv3_small_050", "mixer_s32_224", "swin_tiny_patch4_window7_224", "vit_pwee_patch16_reg1_gap_256"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_run_reports_of_a_model_works_for_any_of_timms(name):
    model = timm.create_model(name, device="meta", num_classes=5)
    assert list(bandwidths(model)) == [] and operators_of(model) == [] and cost_of(model) is None


# Settings


def test_settings_belong_to_their_kind_and_to_one_model():
    model = small(attention="GVA", depth=3, sigma_squared=3.0, value_bias=False, impl="reference")
    torch.testing.assert_close(model.blocks[0].attn.log_sigma.exp().square(), torch.full((3,), 3.0))
    assert model.blocks[0].attn.impl == "reference" and model.blocks[1].attn.value_bias is None
    default = small(attention="GVA", depth=3)
    torch.testing.assert_close(default.blocks[0].attn.log_sigma.exp().square(), torch.full((3,), 8**0.5))
    assert default.blocks[0].attn.impl == "auto" and default.blocks[1].attn.value_bias.shape == (24,)


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


@pytest.mark.parametrize("mode", ["", "jax", "jax_nlhb", "moco", "skip", "reset"])
def test_every_weight_init_keeps_the_starting_bandwidth(mode):
    model = create(weight_init=mode, sigma_squared=3.0)
    model.init_weights()
    for block in model.blocks:
        torch.testing.assert_close(block.attn.log_sigma.exp().square(), torch.full((3,), 3.0))


@kinds
def test_built_on_the_meta_device(kind):
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


REFUSED = {
    "pretrained": (dict(pretrained=True), "No pretrained weights exist"),
    "norms of queries and keys": (dict(qk_norm=True), "GKA has no qk_norm or scale_norm"),
    "a width that heads do not divide": (dict(attention="vlt", embed_dim=25), "num_heads must divide dim"),
    "an unknown letter": (dict(attention="GGX"), r"softmax \(A\).* got 'GGX'"),
    "a setting of no layer": (dict(attention="GA", value_bias=False), "value_bias is not a setting of gka or softmax"),
    "an unknown neighbour": (dict(spatial_offsets="LX"), "letters of N, L, R, U, B, D.* got 'LX'"),
    "more letters than heads": (dict(spatial_offsets="LURB"), "4 letters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_refused(case):
    """As timm's users see it and, in one line, as those of our commands do."""
    settings, message = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError), match=message):
        create(**settings)
    with pytest.raises(UserError, match=message) as caught:
        build(GKA, **{**SMALL, **settings})
    assert "\n" not in str(caught.value)


def test_models_that_would_ignore_our_attention_say_so():
    name, shape = "vit_pwee_patch16_reg1_gap_256", dict(depth=2, embed_dim=48, num_heads=2, device="meta")
    for attention in ("GA", ATTENTION["vlt"]):
        with pytest.raises(ValueError, match=r"^ParallelScalingBlock has an attention of its own, attn_layer="):
            timm.create_model(name, attn_layer=attention, **shape)
    assert timm.create_model(name, **shape) and timm.create_model(name, attn_layer="attn", **shape)
    with pytest.raises(UserError, match="deit_tiny_patch16_224 has no spatial_offsets; deit_"):
        build(SOFTMAX, spatial_offsets="LU")
    with pytest.raises(ValueError, match=f"attn_layer of {GKA} is one of ours, got Attention"):
        timm.create_model(GKA, attn_layer=timm.layers.Attention)


@pytest.mark.parametrize("kind", ["gka", "vlt"])
@pytest.mark.parametrize("setting", [dict(sigma_sqared=3.0), dict(gated=True), dict(attn_head_dim=16)])
def test_a_layer_refuses_what_it_has_not(kind, setting):
    """Also what timm's own attention has."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{next(iter(setting))}'"):
        ATTENTION[kind](64, num_heads=2, **setting)


# Copies and files

SAVED = {
    "gka": (GKA, dict(sigma_squared=3.0, impl="reference")),
    "vlt": (GKA, dict(attention="V", value_bias=False)),
    "hybrid": (GKA, dict(attention=ALL, depth=3)),
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


@kinds
def test_checkpoint_of_another_size(kind, tmp_path):
    """timm resamples positions, the head stays fresh, the rest is bit for bit the file's."""
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


def test_softmax_model_is_timms_own(tmp_path):
    """Importing deit_gka replaces neither timm's models nor its attention; files of DeiT's load bit for bit."""
    path = str(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth")
    state = timm.models.VisionTransformer(embed_dim=192, num_heads=3).state_dict()
    torch.save({"model": state}, path)
    assert timm.model_entrypoint(SOFTMAX).__module__ == "timm.models.deit"
    for how in (
        dict(attn_layer="attn", checkpoint_path=path),
        dict(pretrained=True, pretrained_cfg_overlay=dict(file=path)),
    ):
        model = timm.create_model(SOFTMAX, weight_init="skip", **how)
        assert type(model.blocks[0].attn) is timm.layers.Attention
        loaded = model.state_dict()
        assert loaded.keys() == state.keys()
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
