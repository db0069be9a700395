"""Spatial head offsets against their definition, token by token, and what saves, starts and draws such models.

Legend: B batch, N tokens, H heads, D head_dim, C = H * D.
"""

import copy
import math
import pickle

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import tiny_vision
from deit_gka.figures.maps import attention_maps
from deit_gka.model.accounting import cost_of
from deit_gka.model.attention import ATTENTION, operators_of
from deit_gka.model.checkpoints import build, find_checkpoint, load_run
from deit_gka.model.plain import plain
from deit_gka.model.warm_start import warm_start
from operator_cases import CPU
from tiny_vision import SIZE
from tiny_vit import create, small
from trainkit_gka.cli import UserError

SEEN = {"N": (0, 0), "L": (0, -1), "R": (0, 1), "U": (-1, 0), "B": (1, 0), "D": (-1, -1)}  # row, column
FORMS = {
    "class token": dict(),
    "none": dict(class_token=False, global_pool="avg"),
    "registers": dict(reg_tokens=3),
    "not square": dict(img_size=(48, 80)),
    "one row": dict(img_size=(16, 96)),
}


def token_of(letter, token, grid, others):
    """The token whose value `token` holds on a head with that letter."""
    row, column = divmod(token - others, grid[1])
    down, right = SEEN[letter]
    inside = 0 <= row + down < grid[0] and 0 <= column + right < grid[1]
    return others + (row + down) * grid[1] + column + right if token >= others and inside else token


def weights_of(layer, x):
    """W, (B, H, N, N), by the equations of each kind."""
    heads = x.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
    if hasattr(layer, "log_sigma"):
        distance2 = (heads[:, :, :, None] - heads[:, :, None]).square().sum(-1)
        affinity = torch.exp(-distance2 / (2 * layer.log_sigma.exp().square()[:, None, None]))
        return affinity / affinity.sum(-1, keepdim=True)
    matrix, width = layer.qk if hasattr(layer, "qk") else layer.qkv, x.shape[-1]
    queries, keys = (
        (x @ matrix.weight[own].T + matrix.bias[own]).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for own in (slice(0, width), slice(width, 2 * width))
    )
    return (queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[-1])).softmax(-1)


def by_definition(layer, x, pattern, grid, others):
    """The layer's output, value by value."""
    width, tokens = x.shape[-1], x.shape[1]
    values = x
    if hasattr(layer, "qkv"):
        values = x @ layer.qkv.weight[2 * width :].T + layer.qkv.bias[2 * width :]
    elif getattr(layer, "value_bias", None) is not None:
        values = x + layer.value_bias
    values, weights = values.unflatten(-1, (layer.num_heads, -1)), weights_of(layer, x)
    held = torch.stack(
        [
            values[:, [token_of(pattern[head % len(pattern)], j, grid, others) for j in range(tokens)], head]
            for head in range(layer.num_heads)
        ],
        dim=2,
    )
    mixed = torch.einsum("bhij,bjhd->bihd", weights, held).flatten(2)
    return mixed @ layer.proj.weight.T + layer.proj.bias


def with_gradients(function, layer, x, grad_y, dtype):
    layer, x = copy.deepcopy(layer).to(dtype), x.to(dtype).requires_grad_()
    y = function(layer, x)
    y.backward(grad_y.to(dtype))
    return {"y": y.detach(), "dx": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def check(model, pattern, call=lambda layer, x: layer(x)):
    """The first layer, with inputs of its own: at most twice the error of the definition in float32, and roundings."""
    layer, grid, others = model.blocks[0].attn, model.patch_embed.grid_size, model.num_prefix_tokens
    for name, p in layer.named_parameters():
        if name.endswith("bias") or name == "log_sigma":
            nn.init.normal_(p, mean=0.4, std=0.5)
    x = torch.randn(2, others + math.prod(grid), model.embed_dim)
    grad_y = torch.randn_like(x)

    def definition(layer, x):
        return by_definition(layer, x, pattern, grid, others)

    want, reference = (with_gradients(definition, layer, x, grad_y, t) for t in (torch.float64, torch.float32))
    for name, value in with_gradients(call, layer, x, grad_y, torch.float32).items():
        allowed = 2 * (reference[name] - want[name]).norm() + 64 * torch.finfo(torch.float32).eps * want[name].norm()
        # A bias of the keys changes nothing; roundings are all its gradient.
        allowed += 64 * torch.finfo(torch.float32).eps * grad_y.norm() * x.norm() if name.endswith("bias") else 0
        assert (value.double() - want[name]).norm() <= allowed, name


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", ATTENTION)
def test_heads_hold_the_values_of_their_neighbours(kind, form):
    pattern = {"class token": "LUD", "none": "RBN", "registers": "UR", "not square": "DLB", "one row": "LUR"}[form]
    check(small(attention=kind, spatial_offsets=pattern, **FORMS[form]), pattern)


@pytest.mark.parametrize("kind", ATTENTION)
def test_the_path_that_builds_w_computes_the_same(kind, explicit):
    check(small(attention=kind, spatial_offsets="LUD", img_size=48), "LUD")


@pytest.mark.parametrize("impl", ["reference", "sdpa", CPU])
def test_every_implementation_of_the_operator_serves_them(impl):
    model = small(spatial_offsets="LUD", img_size=(48, 64), impl=impl)
    assert operators_of(model) == [impl]
    check(model, "LUD")


def test_pattern_starts_again_in_every_layer_and_its_case_does_not_matter(images):
    model = small(spatial_offsets="ln", depth=3).eval()
    assert [block.attn.offsets.pattern for block in model.blocks] == ["LN"] * 3
    twin = small(spatial_offsets="LNL", depth=3).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(images), model(images))


@pytest.mark.parametrize("attention", ["gka", "softmax", "GVA"])
def test_they_cost_no_parameter_and_no_flop(attention):
    with_offsets, without = (create(attention=attention, depth=3, **o) for o in (dict(spatial_offsets="LUD"), {}))
    assert cost_of(with_offsets) == cost_of(without) is not None
    done = warm_start(with_offsets, without.state_dict(), "x")
    assert done.share == 1 and not done.new and not done.unused


@pytest.mark.parametrize("attention", ["gka", "softmax", "vlt", "GVA"])
def test_models_with_them_are_copied_compiled_drawn_and_rebuilt(attention, tmp_path):
    shape = dict(embed_dim=24, num_heads=3, depth=3, img_size=[32, 48])
    model = build("deit_tiny_gka_patch16_224", 5, attention=attention, spatial_offsets="LUD", **shape).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    images = torch.randn(2, 3, 32, 48)
    want = model(images)
    without = build("deit_tiny_gka_patch16_224", 5, attention=attention, **shape).eval()
    without.load_state_dict(model.state_dict())
    assert (without(images) - want).abs().max() > 0.01  # the offsets do something
    save_for_hf(model, tmp_path)
    others = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    for other in (*others, timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()):
        assert torch.equal(other(images), want)
    torch.testing.assert_close(torch.export.export(model, (images,)).module()(images), want)
    torch.testing.assert_close(plain(model)(images), want, rtol=1e-4, atol=1e-4)
    assert [layer.error < 1e-5 for layer in attention_maps(model, images)] == [True] * 3


def test_another_grid_is_followed_or_refused(images):
    model = small(spatial_offsets="LUD")
    model.set_input_size((32, 64))
    check(model, "LUD")
    with pytest.raises(ValueError, match="need 1 tokens and 2 x 4 patches, got 5 tokens"):
        model.blocks[0].attn(torch.randn(1, 5, 24))
    for setting in (dict(dynamic_img_size=True), dict(patch_drop_rate=0.5)):
        with pytest.raises(ValueError, match="need all patches of one grid"):
            small(spatial_offsets="LUD", **setting)


@pytest.mark.parametrize("pattern, message", [("LX", "letters of N, L, R, U, B, D.* got 'LX'"), ("LURB", "4 letters")])
def test_wrong_patterns_are_one_line(pattern, message):
    with pytest.raises(UserError, match=message):
        build("deit_tiny_gka_patch16_224", 5, SIZE, attention="GA", spatial_offsets=pattern)
    with pytest.raises(UserError, match="deit_tiny_patch16_224 has no spatial_offsets; deit_"):
        build("deit_tiny_patch16_224", 5, SIZE, spatial_offsets="LU")
    with pytest.raises(ValueError, match="which know the patches' grid"):
        ATTENTION["gka"](24, 3, spatial_offsets="LU")(torch.randn(1, 5, 24))


def test_a_run_with_them_trains_evaluates_and_exports(tmp_path):
    def call(command, *argv):
        return tiny_vision.call(f"deit_gka.{command}", *argv, folder=tmp_path / "output").stdout

    places = ["--data", "digits", "--out", tmp_path, "--results", tmp_path / "results.jsonl", "--model-tag", "run"]
    kwargs = [*tiny_vision.MICRO[:-4], "spatial_offsets=LU", *tiny_vision.MICRO[-4:]]
    short = ["--epochs", 1, "--warmup-epochs", 0, "--batch-size", 64, "--repeated-aug", 1, "--num-workers", 0]
    call("train", *places, *kwargs, *short, "--attention", "GA", "--stop-after", 2)
    model = load_run(find_checkpoint(tmp_path / "run"), "model", "cpu")
    assert [block.attn.offsets.pattern for block in model.blocks] == ["LU", "LU"]
    call("export", "--run", tmp_path / "run", "--out", tmp_path / "exported", "--weights", "model")
    exported = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(exported(images), model(images))
    evaluate = ["--run", tmp_path / "run", "--results", tmp_path / "results.jsonl", "--device-type", "cpu"]
    assert "599 images" in call("evaluate", *evaluate, "--num-workers", 0)
