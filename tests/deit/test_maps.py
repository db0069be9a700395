"""`deit_gka.attention_maps`, of our models and of timm's own: their unfused W, and a model that stays as it was."""

import pytest
import timm
import torch
from timm.utils import AttentionExtract
from torch import nn

import deit_gka
import tiny_vit
from gka import KINDS, gaussian_weights
from trainkit_gka.cli import UserError

SIZE = 32
TINY = dict(img_size=SIZE, patch_size=8, depth=2, embed_dim=48, num_heads=3, num_classes=5)
FAMILIES = {
    "deit_tiny_distilled_patch16_224": {},
    "vit_small_patch14_dinov2": dict(init_values=0.5),
    "vit_small_patch14_reg4_dinov2": dict(scale_attn_norm=True),
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
    model = timm.create_model(name, **{**TINY, **settings})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and relative positions begin as zeros
    return model


def hooks_of(model):
    return [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]


@pytest.mark.parametrize("name", FAMILIES)
def test_maps_are_timms_unfused_weights(name, images):
    model = build(name, **FAMILIES[name])
    before, outputs = {key: value.clone() for key, value in model.state_dict().items()}, model.eval()(images)
    maps = deit_gka.attention_maps(model.train(), images)
    assert all(module.training for module in model.modules()) and not hooks_of(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.eval()(images), outputs)
    for block in model.blocks:
        block.attn.fused_attn = False
    with torch.no_grad():
        unfused = AttentionExtract(model, names=["blocks.*.attn.attn_drop"], method="hook")(images)
    for layer, want in zip(maps, unfused.values(), strict=True):
        torch.testing.assert_close(layer.weights, want, rtol=1e-4, atol=1e-5)
        assert layer.error < 1e-5 and (layer.sigma is not None) == KINDS[layer.kind].has_bandwidth
        assert layer.sigma is None or layer.sigma.shape == (3,)
    assert len(maps) == 2 and (maps[0].weights - maps[0].weights.mean(-1, keepdim=True)).abs().max() > 0.01
    for layer in deit_gka.attention_maps(model, images[:0]) if name.startswith("deit") else ():  # some of timm's fail
        assert layer.weights.shape == (0, *maps[0].weights.shape[1:]) and layer.error == 0


@pytest.mark.parametrize("channel_bandwidths", [False, True])
def test_the_weights_are_the_operators(channel_bandwidths, images):
    model = build("deit_tiny_gka_patch16_224", sigma_squared=2.0, channel_bandwidths=channel_bandwidths)
    for name, parameter in model.named_parameters():
        if "log_scale" in name:
            torch.nn.init.normal_(parameter)
    for layer in deit_gka.attention_maps(model, images):
        assert layer.initial_sigma == pytest.approx(2**0.5)
        torch.testing.assert_close(layer.weights, gaussian_weights(layer.features, layer.sigma.log(), eps=0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_of_models_in_half_precision(dtype, images):
    model = build("deit_tiny_patch16_224").to(dtype)
    want = [layer.weights for layer in deit_gka.attention_maps(model.float(), images.to(dtype).float())]
    maps = deit_gka.attention_maps(model.to(dtype), images.to(dtype))
    assert all((layer.weights - weights).abs().max() < 0.05 for layer, weights in zip(maps, want))
    with torch.autocast("cpu", dtype):
        maps = deit_gka.attention_maps(model.float(), images)
    assert all(layer.weights.dtype == torch.float32 for layer in maps)


REFUSED = {
    "swin_tiny_patch4_window7_224": (dict(img_size=SIZE, window_size=4), "attention of SwinTransformer"),
    "vit_tiny_patch16_224": (dict(TINY, attn_layer="diff"), r"layer 1 \(DiffAttention\)"),
    "mixer_s32_224": (dict(img_size=SIZE), "layer 1 is a MixerBlock"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused_by_layer_and_hooks_go(name, images):
    settings, message = REFUSED[name]
    model = timm.create_model(name, **settings).train()
    with pytest.raises(UserError, match=message):
        deit_gka.attention_maps(model, images)
    assert not hooks_of(model) and model.training


def test_an_output_that_the_weights_do_not_give_and_images_without_a_batch_are_refused(images):
    model = tiny_vit.create()
    with pytest.raises(UserError, match="images must be"):
        deit_gka.attention_maps(model, images[0])
    model.blocks[1].attn.register_forward_hook(lambda layer, args, output: 2 * output)
    with pytest.raises(UserError, match=r"layer 2 \(GKA\)"):
        deit_gka.attention_maps(model, images)
