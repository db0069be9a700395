"""What timm's users do with a model: features, compilation, export, precision."""

import copy
import pickle

import pytest
import timm
import torch
from torchvision.models.feature_extraction import create_feature_extractor

from gka import GaussianKernelAttention, testing
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_vit import create, kinds, small


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
    model, others = small(kind).eval(), torch.randn(3, 3, 32, 32)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(others), model(others))
    torch.testing.assert_close(torch.jit.trace(model, images)(others), model(others))


@kinds
@pytest.mark.filterwarnings("ignore:The nodes obtained")
@pytest.mark.parametrize("settings", [dict(attn_drop_rate=0.1), dict(spatial_offsets="LU")], ids=str)
def test_symbolic_trace_of_any_batch_and_mask(kind, fused, settings):
    """As timm's own model: masks are inputs of the graph. torchvision's extractor traces so."""
    model = small(kind, **settings).eval()
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(model)))
    traced.load_state_dict({name: p.detach() for name, p in model.named_parameters()}, assign=True)
    for batch, mask in ((1, None), (3, None), (3, torch.ones(5, 5, dtype=torch.bool).tril())):
        others = torch.randn(batch, 3, 32, 32)
        assert torch.equal(traced(others, mask), model(others, mask))
    found, wanted = create_feature_extractor(model, {"blocks.1.attn.proj": "mixed"})(others), []
    model.blocks[1].attn.proj.register_forward_hook(lambda layer, inputs, y: wanted.append(y))
    model(others)
    assert torch.equal(found["mixed"], wanted[0])


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


def test_the_operators_own_layer_assigned_by_hand():
    """timm's blocks hand it their masks."""
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    for block in model.blocks:
        block.attn = GaussianKernelAttention(192, 3)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(block.attn.log_sigma.grad.any() for block in model.blocks)
    block, x, mask = model.blocks[0], torch.randn(2, 5, 192), torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(block(x, attn_mask=mask), block(x, is_causal=True), rtol=1e-4, atol=1e-5)
