"""Ways to meet the token before, against their definitions; what they cost; what is refused; a run of each."""

import dataclasses

import pytest
import torch

import gpt_runs
import tiny
from gka import gaussian_attention
from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.figures.maps import extract
from nanochat_gka.model.accounting import flops_per_token, meta_model, parameter_counts
from nanochat_gka.model.attention import Attention
from nanochat_gka.model.blocks import Rotary, norm
from nanochat_gka.model.checkpoints import export, load
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context
from nanochat_gka.training.optim import OptimConfig, parameter_groups
from tiny_gpt import MIXED, SHAPE, awake
from trainkit_gka.cli import UserError

BEFORE = torch.tensor([0, *range(15)])  # of token j: j - 1, or 0


def one_layer(kind="gka", rotary="full", **fields):
    """A layer, its rotary embedding, a block input (2, 16, 64), and the context of whole sequences."""
    torch.manual_seed(3)
    fields |= dict(attention=kind, window_pattern="L", rotary=rotary, offset_layers="all")
    config = dataclasses.replace(SHAPE, **fields)
    layer, table = Attention.CLASSES[kind](config, 1), Rotary(16, 16, half=rotary == "half")
    layer.init_weights()
    table.init_weights()
    context = Context()
    context.begin(16)
    return layer, table, torch.randn(2, 16, 64), context


def test_kv_shift_shares_out_each_heads_keys_and_values():
    layer, rotary, x, context = one_layer(mixing="kv-shift", gka_values="normalised")
    features, values = norm(rotary(x.view(2, 16, 4, 16), slice(0, 16))), norm(x.view(2, 16, 4, 16))
    (a, a1), (b, b1) = layer.pairing.keys[:, :, None], layer.pairing.values[:, :, None]
    assert torch.equal(a + a1, torch.ones(4, 1)) and torch.equal(b + b1, torch.ones(4, 1)) and 0 < a.min() < a.max() < 1
    keys = norm(a * features + a1 * features[:, BEFORE])
    mixed = b * values + b1 * values[:, BEFORE]
    want = gaussian_attention(features, layer.log_sigma, keys=keys, values=mixed, causal=True, impl="reference")
    torch.testing.assert_close(layer.mix(x, None, rotary, context), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gka", "softmax", "vlt"])
def test_head_offsets_are_kv_shifts_with_shares_of_0_and_1(kind):
    shift, rotary, x, context = one_layer(kind, mixing="kv-shift")
    offsets, *_ = one_layer(kind, head_offsets="NPS", sigma_squared=0.0)
    shares = {"N": (1.0, 0.0), "P": (1.0, 0.0), "S": (0.0, 1.0)}, {"N": (1.0, 0.0), "P": (0.0, 1.0), "S": (1.0, 0.0)}
    with torch.no_grad():
        for own, of_letter in zip((shift.pairing.keys, shift.pairing.values), shares):
            own.copy_(torch.tensor([of_letter[letter] for letter in "NPSN"]).T)
    offsets.load_state_dict({n: p for n, p in shift.state_dict().items() if not n.startswith("pairing")})
    got, want = (layer.mix(x, None, rotary, context) for layer in (shift, offsets))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_partial_offset_moves_the_channels_that_do_not_turn():
    layer, rotary, x, context = one_layer(mixing="partial", rotary="half", gka_values="raw")
    heads = x.view(2, 16, 4, 16)
    turned = rotary(heads, slice(0, 16))
    still = [4, 5, 6, 7, 12, 13, 14, 15]
    assert torch.equal(turned[..., still], heads[..., still])
    assert not (turned[:, 1:, :, [0, 1, 2, 3, 8, 9, 10, 11]] == heads[:, 1:, :, [0, 1, 2, 3, 8, 9, 10, 11]]).any()
    features = norm(turned)
    keys = features.clone()
    keys[..., still] = features[:, BEFORE][..., still]
    want = gaussian_attention(features, layer.log_sigma, keys=norm(keys), values=heads, causal=True, impl="reference")
    torch.testing.assert_close(layer.mix(x, None, rotary, context), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gka", "softmax"])
@pytest.mark.parametrize("mixing", ["token-shift", "canon"])
def test_blends_act_on_the_layers_input(kind, mixing):
    layer, rotary, x, context = one_layer(kind, mixing=mixing)
    plain, *_ = one_layer(kind, sigma_squared=4.0 if kind == "gka" else 0.0)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("blend")})
    past = torch.cat([torch.zeros(2, 3, 64), x], dim=1)
    if mixing == "canon":
        assert torch.equal(layer.blended(x, context), x)  # at the start
        torch.nn.init.normal_(layer.blend.weight)
        taps = layer.blend.weight.detach()
        blended = x + sum(taps[back] * past[:, 3 - back : 19 - back] for back in range(4))
    else:
        own = layer.blend.own.detach()
        torch.testing.assert_close(own, (torch.arange(64) / 64) ** 0.75)  # the second of four layers
        blended = own * x + (1 - own) * past[:, 2:18]
    torch.testing.assert_close(layer.blended(x, context), blended)
    got, want = layer.mix(x, None, rotary, context), plain.mix(blended, None, rotary, context)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("variant", MIXED, ids=str)
@torch.inference_mode()
def test_prompts_that_begin_alike_give_what_each_gives_alone(variant, share):
    model = awake(dataclasses.replace(SHAPE, **variant))
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 8, 7, 6], [1, 2, 3, 4, 5, 11, 12, 13], [1, 2, 3]]
    tree = PromptTree(prompts, [2, 2, 3, 2], [4], torch.device("cpu"), share=share)
    got = model.logits(model.hidden(tree.ids, tree))[0]
    alone = [model(torch.tensor([prompt]))[0, start - 1 : -1] for prompt, start in zip(prompts, [2, 2, 3, 2])]
    torch.testing.assert_close(got, torch.cat(alone), rtol=0, atol=1e-5)


def costs(**fields):
    model = meta_model(GPTConfig.from_depth(4, window_pattern="L", value_embeds="none", **fields))
    return parameter_counts(model)["total"], flops_per_token(model)


@pytest.mark.parametrize("kind", ["gka", "softmax"])
@pytest.mark.parametrize("mixing,parameters,products", [
    ("kv-shift", 4 * 2, 4 * 256), ("partial", 0, 0), ("token-shift", 256, 256), ("canon", 4 * 256, 4 * 256)
])  # fmt: skip
def test_costs_are_counted(kind, mixing, parameters, products):
    """Per layer of width 256 with two heads; a product costs 6 FLOPs, forward and backward."""
    rotary = "half" if mixing == "partial" else "full"
    plain, mixed = costs(attention=kind), costs(attention=kind, mixing=mixing, rotary=rotary, offset_layers="all")
    assert (mixed[0] - plain[0], mixed[1] - plain[1]) == (4 * parameters, 4 * 6 * products)


def test_what_mixing_learns_has_an_adamw_group_without_decay():
    model = awake(dataclasses.replace(SHAPE, attention="GA", mixing="canon", offset_layers="all"))
    [group] = [g for g in parameter_groups(model, OptimConfig(), lr_scale=2.0) if ".blend." in g.names[0]]
    assert (group.kind, len(group.names), group.weight_decay, group.initial_lr) == ("adamw", 4, 0.0, 0.01)


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(mixing="canon"), "mixing is for gka layers, and attention=softmax has none in 4 layers; offset_layers"),
        (dict(attention="gka", mixing="canon", head_offsets="PS"), "head_offsets and mixing=canon do the same"),
        (dict(attention="gka", mixing="partial"), "it needs rotary=half"),
        (dict(rotary="half", n_embd=72), "rotary=half needs a head_dim that is a multiple of 4, got 18"),
        (dict(mixing="x"), "mixing must be one of none, kv-shift"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **fields)


def test_figures_know_blends_and_refuse_slots_of_two_tokens():
    ids = torch.arange(12)
    for mixing in ("canon", "token-shift"):
        layers = extract(awake(dataclasses.replace(SHAPE, attention="GA", mixing=mixing, offset_layers="all")), ids)
        assert all(layer.error < 1e-5 for layer in layers)
    with pytest.raises(UserError, match="not those of mixing=kv-shift"):
        extract(awake(dataclasses.replace(SHAPE, attention="gka", mixing="kv-shift")), ids)


def test_a_run_trains_continues_exports_and_loads(packed, tmp_path):
    flags = gpt_runs.flags(packed, tmp_path, "--model-tag=", "--mixing", "canon", "--offset-layers", "all")
    tiny.call(gpt_runs.MODULE, *flags, "--stop-after", 8)
    assert "resuming at step 8" in tiny.call(gpt_runs.MODULE, *flags, "--stop-after", 16).stdout
    [folder] = [path for path in tmp_path.iterdir() if (path / "checkpoints").exists()]
    loaded = load(folder)
    assert loaded.model.config.mixing == "canon" and "canon" in folder.name
    assert all(attention.blend.weight.abs().min() > 0 for attention in loaded.model.attentions)
    export(loaded, tmp_path / "exported")
    ids = torch.randint(70, (1, 16))
    with torch.inference_mode():
        assert torch.equal(load(tmp_path / "exported").model(ids), loaded.model(ids))
