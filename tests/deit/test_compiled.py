"""Blocks compiled one by one: how many programs that takes, and stochastic depth with its rate in a tensor."""

from functools import partial

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.layers.drop import drop_path
from torch._dynamo.testing import CompileCounter

import deit_gka  # noqa: F401  registers the models
from deit_gka.training.compiled import StochasticDepth, compiled_by_blocks

DEPTH = 12


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize(
    "name, settings, kinds",
    [
        ("deit_tiny_gka_patch16_224", {}, 1),
        ("deit_tiny_gka_distilled_patch16_224", dict(spatial_offsets="LRUB", num_heads=4), 1),
        ("deit_tiny_gka_patch16_224", dict(attention="GGGA"), 2),
        ("deit_tiny_patch16_224", {}, 1),
    ],
)
def test_one_program_serves_all_blocks_of_a_kind(name, settings, kinds, checkpointing, monkeypatch):
    """In training, with another rate of stochastic depth in every block. The model itself stays uncompiled."""
    programs = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=programs))
    torch._dynamo.reset()
    model = timm.create_model(name, img_size=64, embed_dim=48, depth=DEPTH, drop_path_rate=0.3, **settings)
    model.set_grad_checkpointing(checkpointing)
    network = compiled_by_blocks(model.eval())
    for _ in range(2):
        network(torch.randn(2, 3, 64, 64)).sum().backward()
    assert programs.frame_count == kinds
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert isinstance(model.blocks[1].drop_path1, DropPath) and not model.training
    assert network.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.37])
def test_stochastic_depth_is_timms(rate, dtype):
    count, layer = 40_000, StochasticDepth(rate)
    x = torch.randn(1, 3, 2).to(dtype).expand(count, 3, 2)
    got, timms = layer(x), drop_path(x, rate, training=True)
    is_kept, most = (got != 0).flatten(1), 5 * (rate * (1 - rate) / count) ** 0.5  # five standard deviations
    assert (is_kept.all(1) | ~is_kept.any(1)).all()  # whole samples
    assert abs(is_kept[:, 0].double().mean() - (1 - rate)) <= most
    assert torch.equal(got[is_kept[:, 0]][0], timms[timms[:, 0, 0] != 0][0]) and got.dtype == dtype
    assert not layer.state_dict() and torch.equal(layer.eval()(x), x)
