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
from deit_gka.model.accounting import cost_of
from deit_gka.model.attention import ATTENTION, attention_layers, kind_of, operators_of
from deit_gka.model.checkpoints import build
from deit_gka.model.plain import plain
from deit_gka.model.registry import MODELS, model_name
from deit_gka.training.engine import bandwidths, wrong_bandwidths
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


def test_models_that_would_ignore_our_attention_say_so():
    for name in ("attention", "attn_layer"):
        with pytest.raises(UserError, match="GA"):
            build("vit_pwee_patch16_reg1_gap_256", depth=2, embed_dim=48, num_heads=2, **{name: "GA"})
    with pytest.raises(UserError, match="spatial_offsets"):
        build(SOFTMAX, spatial_offsets="LU")
    with pytest.raises(ValueError, match=f"attn_layer of {GKA} .* Attention"):
        timm.create_model(GKA, attn_layer=timm.layers.Attention)


# Copies and files

SAVED = {
    "gka": (GKA, dict(sigma_squared=3.0, impl="reference")),
    "vlt": (GKA, dict(attention="V", value_bias=False)),
    "hybrid": (GKA, dict(attention=ALL, depth=3)),
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
def test_intermediate_features(kind, images):
    model = small(kind, depth=3).eval()
    final, maps = model.forward_intermediates(images, indices=[0, 2])
    torch.testing.assert_close(final, model.forward_features(images))
    extractor = create(kind, depth=3, features_only=True).eval()
    assert extractor.feature_info.channels() == [24] * 3 and extractor.feature_info.reduction() == [16] * 3
    trunk = {name: t for name, t in model.state_dict().items() if not name.startswith(("norm.", "head."))}
    extractor.model.load_state_dict(trunk, strict=False)
    features = extractor(images)
    torch.testing.assert_close([features[0], features[2]], maps)


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


@kinds
@pytest.mark.filterwarnings("ignore")
def test_export_and_trace_with_a_free_batch_size(kind, images):
    model, more = small(kind).eval(), torch.randn(3, 3, 32, 32)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(more), model(more))
    torch.testing.assert_close(torch.jit.trace(model, images)(more), model(more))


@kinds
@pytest.mark.filterwarnings("ignore:The nodes obtained")
@pytest.mark.parametrize("settings", [dict(attn_drop_rate=0.1), dict(spatial_offsets="LU")], ids=str)
def test_symbolic_trace_of_any_batch_and_mask(kind, fused, settings):
    """As timm's own model: masks are inputs of the graph. torchvision's extractor traces so."""
    model = small(kind, **settings).eval()
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(model)))
    traced.load_state_dict({name: p.detach() for name, p in model.named_parameters()}, assign=True)
    for batch, mask in ((1, None), (3, None), (3, torch.ones(5, 5, dtype=torch.bool).tril())):
        more = torch.randn(batch, 3, 32, 32)
        assert torch.equal(traced(more, mask), model(more, mask))
    extracted, wanted = create_feature_extractor(model, {"blocks.1.attn.proj": "mixed"})(more), []
    model.blocks[1].attn.proj.register_forward_hook(lambda layer, inputs, y: wanted.append(y))
    model(more)
    assert torch.equal(extracted["mixed"], wanted[0])


# Precision


def rounding_of_the_twin(images, run) -> float:
    """The relative error bfloat16 costs timm's own model of the same shape, plus one rounding."""
    twin = small("softmax").eval()
    return testing.error(run(copy.deepcopy(twin), images), twin(images)) + torch.finfo(torch.bfloat16).eps


@kinds
def test_bfloat16_keeps_float32_bandwidths(kind, images):
    model = small(kind, dtype=torch.bfloat16).eval()
    want = copy.deepcopy(model).float()(images)
    for name, p in model.named_parameters():
        assert p.dtype == (torch.float32 if "log_sigma" in name else torch.bfloat16)
    y = model(images.bfloat16())
    assert y.dtype == torch.bfloat16
    assert testing.error(y, want) <= 2 * rounding_of_the_twin(images, lambda twin, x: twin.bfloat16()(x.bfloat16()))


@kinds
def test_autocast_error_is_no_larger_than_softmax(kind, fused, images):
    model = small(kind).eval()

    def under_autocast(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    y = under_autocast(model, images)
    assert y.dtype == torch.bfloat16
    assert testing.error(y, model(images)) <= 2 * rounding_of_the_twin(images, under_autocast)


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
