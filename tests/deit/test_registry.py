"""Registered models: names, settings, and weights from timm's and DeiT's files."""

import copy
import pickle

import pytest
import timm
import timm.layers
import timm.optim
import torch
import torch.nn.functional as F
from timm.models import save_for_hf
from timm.models.vision_transformer import ResPostBlock
from torch import nn

from deit_gka.model.accounting import cost_of, vit_cost
from deit_gka.model.attention import ATTENTION, attention_layers, operators_of
from deit_gka.model.checkpoints import build
from deit_gka.model.registry import OUR_KINDS, SIZES, model_name
from deit_gka.training.engine import bandwidths, wrong_bandwidths
from tiny_vit import SMALL, create, kinds, small
from trainkit_gka.cli import UserError


def test_timm_lists_every_size_and_kind():
    for kind in OUR_KINDS:
        plain = [model_name(size, kind) for size in ("base", "small", "tiny")]
        assert timm.list_models(f"*{kind}_patch*") == plain
        assert timm.list_models(f"*{kind}_dist*") == [name.replace("_patch", "_distilled_patch") for name in plain]
        assert all(timm.get_pretrained_cfg(name).input_size == (3, 224, 224) for name in timm.list_models(f"*{kind}*"))


def test_the_papers_models_say_what_they_cost():
    for size, kind in (*((size, "gka") for size in SIZES), ("tiny", "vlt")):
        shape = SIZES[size]
        cost = vit_cost(kind, shape["embed_dim"], shape["depth"], shape["num_heads"])
        said = timm.model_entrypoint(model_name(size, kind)).__doc__
        assert f" {cost.parameters / 1e6:.2f}M parameters, {cost.flops / 1e9:.2f} GFLOPs at 224 pixels" in said


@kinds
def test_pretrained_is_refused(kind):
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        create(kind, pretrained=True)


@pytest.mark.parametrize(
    "name,block",
    [
        ("vit_base_patch16_xp_224", "ParallelScalingBlock"),
        ("vit_huge_patch14_xp_224", "ParallelScalingBlock"),
        ("vit_large_patch14_xp_224", "ParallelScalingBlock"),
        ("vit_pwee_patch16_reg1_gap_256", "ParallelScalingBlock"),
        ("vit_dpwee_patch16_reg1_gap_256", "DiffParallelScalingBlock"),
    ],
)
def test_blocks_that_would_ignore_our_attention_say_so(name, block):
    small = dict(depth=2, embed_dim=48, num_heads=2, device="meta")
    for attention in ("gka", "GA", ATTENTION["vlt"]):
        with pytest.raises(ValueError, match=f"^{block} has an attention of its own, attn_layer='.*' changes nothing"):
            timm.create_model(name, attn_layer=attention, **small)
    with pytest.raises(UserError, match=f"^timm cannot build {name}: {block} has an attention of its own"):
        build(name, attention="gka", **small)
    assert timm.create_model(name, **small) and timm.create_model(name, attn_layer="attn", **small)


def test_every_layer_of_two_side_by_side_is_ours_and_reports_its_bandwidths():
    model = build("vit_small_patch16_18x2_224", depth=2, embed_dim=24, num_heads=3, attention="gka")
    assert [type(layer) for layer in attention_layers(model)] == [ATTENTION["gka"]] * 4
    assert [(layer, len(sigma)) for layer, sigma in bandwidths(model)] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    with torch.no_grad():
        attention_layers(model)[2].log_sigma[1] = -20
    assert list(wrong_bandwidths(model)) == ["sigma of layer_2, head 1"]


# The smallest that timm has of families whose blocks have no attention, or one under another name.
OTHERS = [
    *("mobilenetv3_small_050", "efficientnet_b0", "convnext_atto", "crossvit_9_240", "tnt_s_patch16_224"),
    *("twins_svt_small", "pvt_v2_b0", "mixer_s32_224", "resmlp_12_224", "cait_xxs24_224", "xcit_nano_12_p16_224"),
    *("swin_tiny_patch4_window7_224", "vit_base_mci_224", "vit_small_patch16_18x2_224"),
    "vit_pwee_patch16_reg1_gap_256",
]


def test_our_models_take_timms_other_blocks(images):
    model = small(block_fn=ResPostBlock, attention="GV").eval()
    assert [type(block) for block in model.blocks] == [ResPostBlock] * 2
    assert [type(layer) for layer in attention_layers(model)] == [ATTENTION["gka"], ATTENTION["vlt"]]
    assert model(images).shape == (2, 5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_run_reports_of_a_model_works_for_any_of_timms(name):
    model = timm.create_model(name, device="meta", num_classes=5)
    assert list(bandwidths(model)) == [] and operators_of(model) == [] and cost_of(model) is None


@kinds
@pytest.mark.parametrize("setting", ["qk_norm", "scale_attn_norm"])
def test_query_and_key_norms_are_refused(kind, setting):
    with pytest.raises(ValueError, match=f"{kind.upper()} has no qk_norm or scale_norm"):
        small(kind, **{setting: True})


@kinds
def test_heads_must_divide_the_width(kind):
    with pytest.raises(ValueError, match="num_heads must divide dim"):
        small(kind, embed_dim=25)


@pytest.mark.parametrize(
    "settings,named", [(dict(impl="cuda"), "impl"), (dict(sigma_squared=-1.0), "sigma_squared")], ids=str
)
def test_wrong_settings_name_the_setting(settings, named):
    with pytest.raises(ValueError, match=named):
        small(**settings)


def test_settings_belong_to_one_model():
    small(sigma_squared=0.7, impl="reference")
    default = small().blocks[0].attn
    torch.testing.assert_close(default.log_sigma.exp().square(), torch.full((3,), 8**0.5))
    assert default.impl == "auto"
    assert small("vlt", value_bias=False).blocks[0].attn.value_bias is None
    assert small("vlt").blocks[0].attn.value_bias.shape == (24,)


def test_layers_with_settings_are_pickled_and_copied():
    for kind, settings in (("gka", dict(sigma_squared=1.0)), ("vlt", dict(value_bias=False))):
        layer = ATTENTION[kind](12, 3, qkv_bias=True, **settings)
        x = torch.randn(1, 5, 12)
        for other in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            assert type(other) is type(layer) and torch.equal(other(x), layer(x))


@pytest.mark.parametrize("mode", ["", "jax", "jax_nlhb", "moco", "skip", "reset"])
def test_every_weight_init_keeps_the_starting_bandwidth(mode):
    model = create(weight_init=mode, sigma_squared=3.0)
    for block in model.blocks:
        torch.testing.assert_close(block.attn.log_sigma.exp().square(), torch.full((3,), 3.0))
    model.init_weights()
    torch.testing.assert_close(model.blocks[1].attn.log_sigma.exp().square(), torch.full((3,), 3.0))


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


@kinds
def test_any_timm_vit_takes_attention_by_name(kind, images):
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=kind, **SMALL).eval()
    ours = small(kind).eval()
    model.load_state_dict(ours.state_dict())
    assert torch.equal(model(images), ours(images))


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
def test_checkpoint_of_the_same_size(kind, tmp_path, images):
    saved = small(kind).eval()
    torch.save({"state_dict": saved.state_dict()}, tmp_path / "model.pth")
    model = create(kind, checkpoint_path=str(tmp_path / "model.pth")).eval()
    assert torch.equal(model(images), saved(images))


@kinds
def test_checkpoint_of_another_size(kind, tmp_path):
    """Of 224 pixels and other classes: timm resamples positions, the head stays fresh, the rest is bit for bit the
    file's."""
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


def facebook_checkpoint(path, depth=12, dim=192, classes=1000, tokens=197):
    """A file filled at random, with the names and shapes of the weights that facebookresearch/deit published."""

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


def test_softmax_model_is_timms_own(tmp_path):
    """Importing deit_gka replaces neither timm's models nor its attention; Facebook's files load into them bit for
    bit."""
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


def test_softmax_weights_in_gka_name_what_is_missing(tmp_path):
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


def test_our_models_refuse_attention_of_others_by_name():
    with pytest.raises(ValueError, match="attn_layer of deit_tiny_gka_patch16_224 is one of ours, got Attention"):
        timm.create_model("deit_tiny_gka_patch16_224", attn_layer=timm.layers.Attention)
