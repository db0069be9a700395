"""Language models as other people's tools treat them: cast to bfloat16 as a whole, sharded, given no rows."""

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanochat_gka.model.gpt import build
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_gpt import MIXED, SHAPE, VARIANTS, awake

KERNELS = [dict(attention="gka", kernel=kernel) for kernel in ("mean", "previous", "tied-softmax", "none")]
every = pytest.mark.parametrize("variant", VARIANTS + MIXED + KERNELS, ids=str)


@every
def test_a_model_cast_to_bfloat16_computes_decodes_and_learns(variant):
    """Within the rounding that bfloat16 costs, bandwidths included; float32 logits as ever."""
    exact = awake(dataclasses.replace(SHAPE, **variant))
    model, ids = copy.deepcopy(exact).to(torch.bfloat16), torch.randint(70, (2, 16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    whole, cache = model(ids), model.new_cache(2, 16)
    parts = torch.cat([model(ids[:, :8], context=cache), model(ids[:, 8:], context=cache)], dim=1)
    for logits in (whole, parts):
        assert logits.dtype == torch.float32
        assert (logits - exact(ids)).norm() < 0.03 * logits.norm()
    model(ids, ids).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def test_its_weights_load_again(tmp_path):
    config, ids = dataclasses.replace(SHAPE, attention="GGGA"), torch.randint(70, (2, 16))
    model = awake(config).to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "weights")
    other = build(config, "cpu").to(torch.bfloat16)
    other.load_state_dict(load_file(tmp_path / "weights"))
    assert torch.equal(other(ids), model(ids))
    wide = build(config, "cpu")
    wide.load_state_dict(load_file(tmp_path / "weights"))
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.transformer.h[0].attn.log_sigma.bfloat16(), model.transformer.h[0].attn.log_sigma)


@pytest.mark.parametrize("variant", [dict(attention="gka"), dict(attention="GA", value_embeds="all")], ids=str)
def test_fsdp_in_bfloat16(variant, tmp_path):
    ids = torch.randint(70, (2, 17))
    with process_group(tmp_path):
        model = awake(dataclasses.replace(SHAPE, **variant))
        check_trains_as_in_bfloat16(model, lambda m: m.transformer.h, lambda m: m(ids[:, :-1], ids[:, 1:]))


@every
def test_no_rows_give_no_logits_and_gradients_that_are_0(variant):
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.zeros(0, 16, dtype=torch.long)
    logits = model(ids)
    assert logits.shape == (0, 16, 70)
    logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    cache = model.new_cache(0, 16)
    assert model(ids[:, :3], context=cache).shape == (0, 3, 70) and model(ids[:, :1], context=cache).shape == (0, 1, 70)
