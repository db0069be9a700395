"""Language models as other people's tools treat them: cast to bfloat16 as a whole, sharded, given no rows."""

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

import gpt_checks
from nanochat_gka.model.gpt import build
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_gpt import SHAPE, VARIANTS, awake

every = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@every
def test_a_model_cast_to_bfloat16_computes_decodes_and_learns(variant):
    exact = awake(dataclasses.replace(SHAPE, **variant))
    gpt_checks.in_bfloat16_it_computes_decodes_and_learns(exact, copy.deepcopy(exact).to(torch.bfloat16))


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
    gpt_checks.no_rows_give_no_logits_and_gradients_that_are_0(awake(dataclasses.replace(SHAPE, **variant)))
