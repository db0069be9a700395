"""`deit_gka.attention_maps` on timm's own vision transformers: their unfused W, and a model that stays as it was."""

import pytest
import timm
import torch
from timm.utils import AttentionExtract
from torch import nn

import deit_gka
from gka import KINDS
from trainkit_gka.cli import UserError

SIZE, PATCH = 32, 8
TINY = dict(img_size=SIZE, patch_size=PATCH, depth=2, embed_dim=48, num_heads=3, num_classes=5)
FAMILIES = {
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_dinov2": dict(init_values=0.5),
    "vit_small_patch14_reg4_dinov2": {},
    "vit_base_patch16_siglip_224": {},  # no class token, and a pooling attention after the blocks
    "vit_medium_patch16_gap_256": dict(qk_norm=True),
    "vit_tiny_patch16_224": dict(attn_layer="GA", no_embed_class=True),
    "eva02_tiny_patch14_224": dict(qkv_fused=False),  # rotary positions
    "eva_giant_patch14_224": dict(qkv_bias=True),
    "vit_small_patch16_dinov3": {},  # rotary positions, registers, class token
    "beit_base_patch16_224": {},  # relative positions
    "deit_tiny_gka_patch16_224": {},
    "deit_tiny_vlt_patch16_224": {},
}


def build(name: str, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, **{**TINY, **settings})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and relative positions begin as zeros
    return model


@pytest.fixture
def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, SIZE, SIZE)


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_timms_unfused_weights(name, images):
    model = build(name, **FAMILIES[name])
    before, outputs = {key: value.clone() for key, value in model.state_dict().items()}, model.eval()(images)
    maps = deit_gka.attention_maps(model.train(), images)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(model.eval()(images), outputs, rtol=0, atol=0)
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():
        unfused = AttentionExtract(model, names=["blocks.*.attn.attn_drop"], method="hook")(images)
    assert len(maps) == len(unfused) == 2
    for layer, want in zip(maps, unfused.values()):
        torch.testing.assert_close(layer.weights, want, rtol=1e-4, atol=1e-5)
        assert layer.error < 1e-5 and (layer.sigma is not None) == KINDS[layer.kind].has_bandwidth
        assert layer.sigma is None or layer.sigma.shape == (3,)
    assert (maps[0].weights - maps[0].weights.mean(-1, keepdim=True)).abs().max() > 0.01  # not uniform


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_of_models_in_half_precision(dtype, images):
    model = build("deit_tiny_patch16_224").to(dtype)
    want = [layer.weights for layer in deit_gka.attention_maps(model.float(), images.to(dtype).float())]
    maps = deit_gka.attention_maps(model.to(dtype), images.to(dtype))
    assert all((layer.weights - weights).abs().max() < 0.05 for layer, weights in zip(maps, want))
    with torch.autocast("cpu", dtype):
        maps = deit_gka.attention_maps(model.float(), images)
    assert all(layer.weights.dtype == torch.float32 for layer in maps)


def test_maps_work_with_and_without_gradients(images):
    model = build("deit_tiny_gka_patch16_224")
    want = deit_gka.attention_maps(model, images)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            maps = deit_gka.attention_maps(model, images)
        assert all(torch.equal(one.weights, other.weights) for one, other in zip(maps, want))
    assert not any(layer.weights.requires_grad or layer.weights.is_inference() for layer in want)
    model(images).sum().backward()  # as before


REFUSED = {
    "swin_tiny_patch4_window7_224": (dict(img_size=SIZE, window_size=4), "attention of SwinTransformer is not known"),
    "samvit_base_patch16": (dict(TINY, patch_size=16, global_attn_indexes=(0, 1)), r"layer 1 \(Attention\) .*shape"),
    "vit_tiny_patch16_224": (dict(TINY, attn_layer="diff"), r"layer 1 \(DiffAttention\) .*\(2, 6, 17, 17\) came"),
    "xcit_nano_12_p16_224": (dict(img_size=SIZE, depth=2), r"layer 1 \(XCA\) .*shape \(2, 4, 32, 32\)"),
    "mixer_s32_224": (dict(img_size=SIZE), "layer 1 is a MixerBlock with NoneType"),
}


def test_one_image_without_a_batch_is_refused(images):
    model = timm.create_model("deit_tiny_gka_patch16_224", img_size=images.shape[-1], depth=1)
    with pytest.raises(UserError, match=r"images must be \(B, 3, height, width\), got \(3, .*image\[None\]"):
        deit_gka.attention_maps(model, images[0])


@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused_by_layer_and_hooks_go(name, images):
    settings, message = REFUSED[name]
    model = timm.create_model(name, **settings).train()
    with pytest.raises(UserError, match=message):
        deit_gka.attention_maps(model, images)
    assert not any(module._forward_hooks for module in model.modules()) and model.training
