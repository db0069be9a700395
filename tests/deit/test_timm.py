"""What timm's users do with a model: features, sizes, compilation, export, precision, optimisers."""

import copy
import pickle

import pytest
import timm
import timm.layers
import timm.optim
import torch
import torch.nn.functional as F
from timm.utils import AttentionExtract
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.feature_extraction import create_feature_extractor

from deit_gka.model.accounting import cost_of
from deit_gka.model.registry import OUR_KINDS
from gka import testing
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_vit import SMALL, create, kinds, small


@kinds
def test_forward_is_features_then_head(kind, images):
    model = small(kind).eval()
    features = model.forward_features(images)
    assert features.shape == (2, 5, 24)
    torch.testing.assert_close(model(images), model.head(model.forward_head(features, pre_logits=True)))
    headless = small(kind, num_classes=0).eval()
    headless.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("head")})
    torch.testing.assert_close(headless(images), model.forward_head(features, pre_logits=True))


@pytest.mark.parametrize("kind", ["softmax", *OUR_KINDS])
@pytest.mark.parametrize("settings", [dict(), dict(spatial_offsets="LU"), dict(attn_drop_rate=0.1)], ids=str)
def test_no_images_give_no_logits_and_gradients_that_are_0(kind, settings):
    """As timm's own model, which is a softmax case."""
    model = small(kind) if kind == "softmax" else small(kind, **settings)
    y = model(torch.randn(0, 3, 32, 32))
    assert y.shape == (0, 5)
    y.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@kinds
def test_every_patch_reaches_the_logits(kind, images):
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
def test_other_input_shapes(kind, settings, tokens):
    model = small(kind, **settings)
    height, width = model.patch_embed.img_size
    x = torch.randn(2, model.patch_embed.proj.in_channels, height, width)
    assert model.forward_features(x).shape == (2, tokens, 24)
    assert model(x).shape == (2, 5)


@kinds
def test_set_input_size_resamples_positions_as_timm(kind):
    """Positions are resampled as for timm's own model; attention has nothing that depends on the size."""
    model, twin = small(kind).eval(), timm.create_model("deit_tiny_patch16_224", **SMALL)
    twin.load_state_dict(model.state_dict(), strict=False)
    for either in (model, twin):
        either.set_input_size((64, 48))
    assert torch.equal(model.pos_embed, twin.pos_embed)
    assert model(torch.randn(1, 3, 64, 48)).shape == (1, 5)


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
def test_compile_is_one_graph_and_changes_nothing(kind, fused, images, request):
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
@pytest.mark.parametrize("settings", [dict(), dict(attn_drop_rate=0.1), dict(spatial_offsets="LU")], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
def test_symbolic_trace_of_any_batch_and_mask(kind, fused, settings, request):
    """As timm's own model: masks are inputs of the graph."""
    if not fused:
        request.getfixturevalue("explicit")
    model = small(kind, **settings).eval()
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(model)))
    shared = {name: p.detach() for name, p in model.named_parameters()}
    traced.load_state_dict(shared, assign=True)
    for batch, mask in ((1, None), (3, None), (3, torch.ones(5, 5, dtype=torch.bool).tril())):
        others = torch.randn(batch, 3, 32, 32)
        assert torch.equal(traced(others, mask), model(others, mask))


@kinds
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
def test_torchvisions_feature_extractor(kind, fused, images, request):
    if not fused:
        request.getfixturevalue("explicit")
    model = small(kind, depth=3).eval()
    extractor = create_feature_extractor(model, {"blocks.1": "tokens", "blocks.1.attn.proj": "mixed"})
    found, wanted = extractor(images), {}
    model.blocks[1].attn.proj.register_forward_hook(lambda layer, inputs, y: wanted.update(mixed=y))
    model.blocks[1].register_forward_hook(lambda layer, inputs, y: wanted.update(tokens=y))
    model(images)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in found)


def test_timms_attention_maps_of_the_graph_equal_those_of_hooks(images, explicit):
    for kind in OUR_KINDS:
        model = small(kind).eval()
        graph, hooks = (AttentionExtract(model, method=method)(images) for method in ("fx", "hook"))
        assert [name.split(".")[:2] for name in graph] == [["blocks", "0"], ["blocks", "1"]]
        assert all(torch.equal(one, other) for one, other in zip(graph.values(), hooks.values(), strict=True))


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
def test_forward_on_the_meta_device(kind):
    """Shapes and FLOPs of a large model without its memory."""
    model = create(kind, device="meta")
    with FlopCounterMode(display=False) as counter:
        assert model(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 5)
    assert counter.get_total_flops() >= 2 * cost_of(model).flops


@kinds
def test_bfloat16_keeps_float32_bandwidths(kind, images):
    model = small(kind, dtype=torch.bfloat16).eval()
    want = copy.deepcopy(model).float()(images)
    assert {p.dtype for name, p in model.named_parameters() if "log_sigma" in name} <= {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if "log_sigma" not in name} == {torch.bfloat16}
    y = model(images.bfloat16())
    assert y.dtype == torch.bfloat16
    assert testing.error(y, want) <= 2 * rounding_of_the_twin(images, lambda twin, x: twin.bfloat16()(x.bfloat16()))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
def test_fsdp_in_bfloat16(fused, images, tmp_path, request):
    if not fused:
        request.getfixturevalue("explicit")
    with process_group(tmp_path):
        model = small("gka")
        check_trains_as_in_bfloat16(model, lambda m: m.blocks, lambda m: m(images.bfloat16()).float().square().sum())


@kinds
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "explicit"])
def test_autocast_error_is_no_larger_than_softmax(kind, fused, images, request):
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


def test_weight_decay_spares_the_value_bias():
    optimizer = timm.optim.create_optimizer_v2(model := small("vlt"), "adamw", lr=1e-3, weight_decay=0.05)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not any(id(block.attn.value_bias) in decayed for block in model.blocks)


def test_training_moves_bandwidths(images):
    model = small()
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    before = [block.attn.log_sigma.detach().clone() for block in model.blocks]
    F.cross_entropy(model(images), torch.tensor([1, 3])).backward()
    optimizer.step()
    assert all((block.attn.log_sigma != old).all() for block, old in zip(model.blocks, before))
