"""A bandwidth for every channel, and a norm before attention without weights, which is where the paper's model has it.

Legend: B batch, N tokens, C channels, H heads, D head_dim.
"""

import pickle

import pytest
import timm
import torch
from timm.layers import set_fused_attn
from timm.models import save_for_hf

import deit_gka  # noqa: F401  timm then knows our models
from deit_gka.model.accounting import cost_of
from deit_gka.model.attention import GKA
from deit_gka.model.checkpoints import parse_kwargs
from deit_gka.model.plain import plain
from deit_gka.recipe import Recipe
from deit_gka.training.optim import make_optimizer

SHAPE = dict(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3)
WITHOUT_NORM = parse_kwargs(("norm_weight=False",))
CHANNELS = parse_kwargs(("channel_bandwidths=True",))


def create(**settings):
    torch.manual_seed(0)
    return timm.create_model("deit_tiny_gka_patch16_224", **SHAPE, **settings).eval()


def spread(model, seed: int = 1):
    """The model with other numbers in every vector that says how distances count channels."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("log_scale", "norm1.weight", "norm1.bias")):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 1)
    return model


def names(model):
    return set(model.state_dict())


def test_both_are_off_by_default_and_add_or_take_these_tensors_alone():
    usual = names(create())
    assert not any("log_scale" in name for name in usual)
    assert names(create(**CHANNELS)) - usual == {f"blocks.{layer}.attn.log_scale" for layer in range(2)}
    taken = {f"blocks.{layer}.norm1.{part}" for layer in range(2) for part in ("weight", "bias")}
    assert usual - names(create(**WITHOUT_NORM)) == taken
    with pytest.raises(ValueError, match="channel_bandwidths is not a setting of softmax"):
        create(**CHANNELS, attention="softmax")


def test_a_saved_model_without_norm_weights_is_built_again(tmp_path):
    model, images = spread(create(**WITHOUT_NORM, **CHANNELS)), torch.randn(2, 3, 16, 16)
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images), model(images))


def test_they_start_as_the_usual_model():
    images, usual = torch.randn(2, 3, 16, 16), create()
    for settings in (CHANNELS, WITHOUT_NORM, WITHOUT_NORM | CHANNELS):
        torch.testing.assert_close(create(**settings)(images), usual(images))


def test_the_kernel_compares_scaled_features_and_mixes_unscaled_values():
    torch.manual_seed(0)
    layer = GKA(8, num_heads=2, channel_bandwidths=True)
    layer.log_scale.data.normal_()
    x = torch.randn(2, 5, 8)
    scaled = (x * layer.log_scale.exp()).unflatten(-1, (2, 4)).transpose(1, 2)  # (B, H, N, D)
    distances = (scaled[:, :, :, None] - scaled[:, :, None]).square().sum(-1)
    kernel = (-distances / (2 * layer.log_sigma.exp().square()[:, None, None])).exp()
    weights = kernel / kernel.sum(-1, keepdim=True)
    mixed = weights @ x.unflatten(-1, (2, 4)).transpose(1, 2)
    torch.testing.assert_close(layer(x), layer.proj(mixed.transpose(1, 2).flatten(2)))
    assert pickle.loads(pickle.dumps(layer)).log_scale.equal(layer.log_scale)
    layer.reset_parameters()
    assert not layer.log_scale.any()


def test_the_vector_does_what_the_norms_weight_does_to_distances():
    """A norm's weight scales features and values: with it in exp(a), and in W_O for the values, nothing changes."""
    weighted, images = spread(create()), torch.randn(2, 3, 16, 16)
    for block in weighted.blocks:
        block.norm1.weight.data.abs_().clamp_(min=0.1)
        block.norm1.bias.data.zero_()
    bare = create(**WITHOUT_NORM, **CHANNELS)
    bare.load_state_dict(weighted.state_dict() | {n: t for n, t in bare.state_dict().items() if "scale" in n}, False)
    for ours, theirs in zip(bare.blocks, weighted.blocks, strict=True):
        ours.attn.log_scale.data.copy_(theirs.norm1.weight.log())
        ours.attn.proj.weight.data.mul_(theirs.norm1.weight)
    torch.testing.assert_close(bare(images), weighted(images))


@pytest.mark.parametrize("more", [{}, {"spatial_offsets": "LU"}])
def test_the_explicit_path_the_plain_form_and_the_counts_have_them(more):
    images = torch.randn(2, 3, 16, 16)
    for settings in (CHANNELS, WITHOUT_NORM, WITHOUT_NORM | CHANNELS):
        model = spread(create(**settings, **more))
        set_fused_attn(False)
        explicit = spread(create(**settings, **more))
        set_fused_attn(True)
        torch.testing.assert_close(explicit(images), model(images))
        torch.testing.assert_close(plain(model)(images), model(images))
        assert cost_of(model).parameters == sum(parameter.numel() for parameter in model.parameters())
        assert cost_of(model).flops == cost_of(create()).flops
    hybrid = create(**CHANNELS, **WITHOUT_NORM, attention="GA")
    assert cost_of(hybrid).parameters == sum(parameter.numel() for parameter in hybrid.parameters())


def test_the_vector_is_learned_and_not_decayed():
    model = create(**CHANNELS, **WITHOUT_NORM)
    optimizer = make_optimizer(model, Recipe(lr=0.1, weight_decay=0.5))
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    scales = [block.attn.log_scale for block in model.blocks]
    assert decayed and not decayed & set(map(id, scales))
    model(torch.randn(4, 3, 16, 16)).square().sum().backward()
    optimizer.step()
    assert all(scale.abs().max() > 0 for scale in scales)
