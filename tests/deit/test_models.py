"""The registered models in timm's hands: names, patterns by layer, settings, files, compilation, export, precision."""

import copy
import pickle
import subprocess
import sys

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
from deit_gka.model.registry import MODELS, attention_by_layer, model_name
from gka import KINDS, GaussianKernelAttention, testing
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_vit import SMALL, assert_as_exact, create, kinds, small
from trainkit_gka.cli import UserError

ALL = "".join(KINDS[kind].letter for kind in ATTENTION)  # every kind once
GKA, SOFTMAX = "deit_tiny_gka_patch16_224", "deit_tiny_patch16_224"
CHANNELS, BARE_NORM = dict(channel_bandwidths=True), dict(norm_weight=False)

FUNCTIONS_OF_TIMM = """
import sys, timm, timm.data, timm.models
modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "timm"}
before = {(place, name): v for place, module in modules.items() for name, v in vars(module).items() if callable(v)}
import deit_gka
changed = [place for place, v in before.items() if getattr(modules[place[0]], place[1]) is not v]
vit = timm.create_model("vit_tiny_patch16_224", attn_layer="gka", depth=2)
print(len(before) > 1000, changed, type(vit.blocks[1].attn) is deit_gka.registry.ATTENTION["gka"])
"""


def test_importing_the_package_replaces_no_function_of_timm():
    """In a process of its own: timm's table of attention layers gains rows, and nothing else changes."""
    done = subprocess.run([sys.executable, "-c", FUNCTIONS_OF_TIMM], capture_output=True, text=True, check=True)
    assert done.stdout == "True [] True\n"
    assert timm.model_entrypoint(SOFTMAX).__module__ == "timm.models.deit"


def kinds_of(model) -> str:
    return "".join(KINDS[kind_of(block.attn)].letter for block in model.blocks)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model_name(*model))
def test_every_registered_model_has_its_kind_and_heads(model, images):
    _, kind, distilled = model
    vit = timm.create_model(model_name(*model), **{**SMALL, "num_heads": 3}).eval()
    assert kinds_of(vit) == 2 * KINDS[kind].letter
    assert vit.num_prefix_tokens == 1 + distilled and vit(images).shape == (2, 5)
    features = timm.create_model(model_name(*model), features_only=True, **{**SMALL, "depth": 3})
    assert [maps.shape for maps in features(images)] == 3 * [(2, 24, 2, 2)]
    assert timm.get_pretrained_cfg(model_name(*model)).crop_pct == 0.875


# Patterns by layer


@pytest.mark.parametrize("pattern,expected", [("GGGA", "GGGAG"), ("agv", "AGVAG"), ("softmax", "AAAAA")])
@pytest.mark.parametrize("name", ["deit_tiny_vlt_distilled_patch16_224", "vit_tiny_r_s16_p8_224", SOFTMAX])
def test_pattern_is_tiled_over_the_layers_of_ours_and_timms(name, pattern, expected):
    assert kinds_of(timm.create_model(name, attn_layer=attention_by_layer(pattern), depth=5, device="meta")) == expected


def test_settings_belong_to_their_kind_and_to_one_model():
    settings = dict(sigma_squared=3.0, value_bias=False, impl="reference")
    for chosen, squared, impl in ((settings, 3.0, "reference"), ({}, 8**0.5, "auto")):
        gka, vlt, _ = (block.attn for block in create(attention="GVA", depth=3, **chosen).blocks)
        torch.testing.assert_close(gka.log_sigma.exp().square(), torch.full((3,), squared))
        assert gka.impl == impl and (vlt.value_bias is None) == bool(chosen)


def test_channel_bandwidths_and_bare_norms_change_these_tensors_alone(images):
    """Both are off by default, and a model with them starts as the usual one."""
    usual = create().eval()
    bare = {f"blocks.{layer}.norm1.{part}" for layer in range(2) for part in ("weight", "bias")}
    scales = {f"blocks.{layer}.attn.log_scale" for layer in range(2)}
    for settings, added, taken in ((CHANNELS, scales, set()), (BARE_NORM, set(), bare)):
        model = create(**settings).eval()
        assert model.state_dict().keys() == usual.state_dict().keys() - taken | added
        model.load_state_dict({name: t for name, t in usual.state_dict().items() if name not in taken}, strict=False)
        assert_as_exact(usual, model(images), images)


REFUSED = {  # settings, and the word that the error must have
    "pretrained": (GKA, dict(pretrained=True)),
    "qk_norm": (GKA, dict(qk_norm=True)),
    "num_heads": (GKA, dict(attention="vlt", embed_dim=25)),
    "'GGX'": (GKA, dict(attention="GGX")),
    "value_bias": (GKA, dict(attention="GA", value_bias=False)),  # a setting of no layer
    "got 'LX'": (GKA, dict(spatial_offsets="LX")),
    "4 letters": (GKA, dict(spatial_offsets="LURB")),  # more than heads
    "sigma_sqared": (GKA, dict(sigma_sqared=3.0)),
    # Models that would ignore the setting, and timm does not say so
    "GA": ("vit_pwee_patch16_reg1_gap_256", dict(attention="GA")),
    "VA": ("vit_pwee_patch16_reg1_gap_256", dict(attn_layer="VA")),
    "spatial_offsets": (SOFTMAX, dict(spatial_offsets="LU")),
}


@pytest.mark.parametrize("word", REFUSED)
def test_wrong_settings_are_refused(word):
    """In one line by our commands and, where the model is ours, by timm.create_model."""
    name, settings = REFUSED[word]
    if name == GKA:
        with pytest.raises((ValueError, RuntimeError, TypeError), match=word):
            create(**settings)
    with pytest.raises(UserError, match=word) as caught:
        build(name, **{**SMALL, **settings})
    assert "\n" not in str(caught.value)


# Copies and files

SAVED = {
    "gka": (GKA, dict(sigma_squared=3.0, impl="reference")),
    "vlt": (GKA, dict(attention="V", value_bias=False)),
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
    letters = (settings.get("attention", "G") * 2)[: len(model.blocks)]
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), again):
        assert kinds_of(other) == letters and torch.equal(other(images), want)
    assert getattr(again.blocks[0].attn, "impl", None) == getattr(model.blocks[0].attn, "impl", None)
    assert_as_exact(model, torch.export.export(model, (images,)).module()(images), images)
    assert_as_exact(model, plain(model)(images), images)
    maps = attention_maps(model, images)
    assert all(layer.error < 1e-5 for layer in maps) and "".join(KINDS[layer.kind].letter for layer in maps) == letters


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"], ids=str)
def test_the_error_is_at_most_twice_that_of_timms_softmax(kind, dtype, fused, images):
    """Against float64; bandwidths stay float32."""
    autocast, dtype = (True, torch.float32) if dtype == "autocast" else (False, dtype)
    model, twin = small(kind, dtype=dtype).eval(), small("softmax").eval()
    assert all(p.dtype == (torch.float32 if "log_sigma" in name else dtype) for name, p in model.named_parameters())
    rounded = torch.bfloat16 if autocast else dtype

    def error(model):
        exact = copy.deepcopy(model).double()(images.to(dtype).double())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(images.to(dtype))
        assert y.dtype == rounded
        return testing.error(y, exact)

    assert error(model) <= 2 * (error(twin.to(dtype)) + torch.finfo(rounded).eps)


def test_fsdp_in_bfloat16(fused, images, tmp_path):
    with process_group(tmp_path):
        model = small("gka")
        check_trains_as_in_bfloat16(model, lambda m: m.blocks, lambda m: m(images.bfloat16()).float().square().sum())


@pytest.mark.parametrize("settings", [dict(), dict(img_size=(32, 48), reg_tokens=2, channel_bandwidths=True)], ids=str)
def test_the_layers_preset_is_the_models(settings):
    """Outputs and all gradients of a model in which gka's layer, told the grid, stands for its own."""
    model = small("gka", num_heads=4, spatial_offsets="LRUB", **settings).double()
    twin, images = copy.deepcopy(model), torch.randn(2, 3, *model.patch_embed.img_size, dtype=torch.float64)
    place = dict(grid=model.patch_embed.grid_size, prefix=model.num_prefix_tokens)
    for block in twin.blocks:
        has_scales = block.attn.log_scale is not None
        layer = GaussianKernelAttention(24, 4, preset="image", channel_bandwidths=has_scales).double()
        layer.load_state_dict(block.attn.state_dict())
        layer.register_forward_pre_hook(lambda layer, x, call: (x, {**call, **place}), with_kwargs=True)
        block.attn = layer
    outputs = [one(images) for one in (model, twin)]
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    for result in outputs:
        result.square().sum().backward()
    theirs = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(theirs.pop(name).grad, p.grad, rtol=1e-9, atol=1e-9)
    assert not theirs
