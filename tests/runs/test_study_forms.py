"""The study's forms of attention: each against its definition, as every model must behave, counted, refused, run."""

import copy
import dataclasses
import json

import pytest
import torch

import gpt_checks
import gpt_runs
import tiny
import tiny_gpt
from gka import gaussian_attention
from nanochat_gka import evaluate, export, generate, train
from nanochat_gka.figures.maps import extract
from nanochat_gka.figures.subjects import form as in_words
from nanochat_gka.model.accounting import flops_per_token, meta_model, parameter_counts
from nanochat_gka.model.attention import build_attention
from nanochat_gka.model.blocks import Rotary, norm
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.config import FORMS as REGISTERED
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context
from nanochat_gka.model.forms import extended
from nanochat_gka.model.gpt import build
from nanochat_gka.train import TrainConfig
from nanochat_gka.training.optim import OptimConfig, parameter_groups
from runs.study import forms
from runs.study.forms.config import KERNELS, StudyShape
from study_forms import FORMS, GKA, SHAPE, awake
from trainkit_gka.cli import UserError, parse

BEFORE = torch.tensor([0, *range(15)])  # of token j: j - 1, or 0
every = pytest.mark.parametrize("form", FORMS, ids=str)


def one_layer(kind="gka", number=1, **fields):
    """A layer, its rotary embedding, a block input (2, 16, 64), and the context of whole sequences."""
    torch.manual_seed(3)
    fields = {"window_pattern": "L", "offset_layers": "all", **fields}
    config = dataclasses.replace(SHAPE, attention=kind, **fields)
    layer, table = build_attention(config, number), Rotary(16, 16, config.rotated_frequencies)
    layer.init_weights()
    table.init_weights()
    context = Context()
    context.begin(16)
    return layer, table, torch.randn(2, 16, 64), context


# Against definitions


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
    offsets, *_ = one_layer(kind, head_offsets="NPS")
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


@pytest.mark.parametrize("kind", ["gka", "vlt"])
@pytest.mark.parametrize("head_offsets", ["", "PNS"])
def test_value_share_adds_the_value_before_to_every_channel(kind, head_offsets):
    layer, rotary, x, context = one_layer(kind, mixing="value-share", head_offsets=head_offsets)
    plain, *_ = one_layer(kind, head_offsets=head_offsets, sigma_squared=4.0 if kind == "gka" else 0.0)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("pairing")})
    assert torch.equal(layer.mix(x, None, rotary, context), plain.mix(x, None, rotary, context))  # at the start
    torch.nn.init.normal_(layer.pairing.values)
    queries, keys, _ = plain.slots(x, None, rotary)
    mixed = layer.slots(x, None, rotary)
    own = plain.project(x, None, rotary, slice(0, 16))[1][0 if kind == "gka" else 1]
    shared = own + layer.pairing.values * own[:, BEFORE]
    late = torch.tensor([head_offsets[head % 3] == "P" if head_offsets else False for head in range(4)])
    assert torch.equal(mixed[0], queries) and torch.equal(mixed[1], keys)
    torch.testing.assert_close(mixed[2], torch.where(late[:, None], shared[:, BEFORE], shared))


@pytest.mark.parametrize("kind", ["gka", "softmax"])
@pytest.mark.parametrize("mixing", ["token-shift", "canon"])
def test_blends_act_on_the_layers_input(kind, mixing):
    layer, rotary, x, context = one_layer(kind, mixing=mixing)
    plain, *_ = one_layer(kind, sigma_squared=4.0 if kind == "gka" else 0.0)
    plain.load_state_dict({n: p for n, p in layer.state_dict().items() if not n.startswith("blend")})
    past = torch.cat([torch.zeros(2, 3, 64), x], dim=1)
    if mixing == "canon":
        assert torch.equal(layer.blend(x), x)  # at the start
        torch.nn.init.normal_(layer.blend.weight)
        taps = layer.blend.weight.detach()
        blended = x + sum(taps[back] * past[:, 3 - back : 19 - back] for back in range(4))
    else:
        own = layer.blend.own.detach()
        torch.testing.assert_close(own, (torch.arange(64) / 64) ** 0.75)  # the second of four layers
        blended = own * x + (1 - own) * past[:, 2:18]
    got, want = layer.mix(x, None, rotary, context), plain.mix(blended, None, rotary, context)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def mixed_by(kernel, x, window=8, **fields):
    """What a layer that sees `window` tokens back mixes of a block input, its values, and its rotated heads."""
    fields = {**GKA, "window_pattern": "SL", "offset_layers": "gka", **fields}
    layer, rotary, _, context = one_layer(number=0, kind=fields.pop("attention"), kernel=kernel, **fields)
    assert layer.window == window
    return layer.mix(x, None, rotary, context), norm(x.view(2, 16, 4, 16)), rotary(x.view(2, 16, 4, 16), slice(0, 16))


def test_kernels_are_what_they_say():
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64)
    mean, values, _ = mixed_by("mean", x)
    want = torch.stack([values[:, max(0, i - 8) : i + 1].mean(1) for i in range(16)], dim=1)
    torch.testing.assert_close(mean, want, rtol=1e-5, atol=1e-5)
    few, values, _ = mixed_by("mean", x, window=3, gka_window=3, head_offsets="NP2")
    want = torch.stack([values[:, max(0, i - 3) : i + 1].mean(1) for i in range(16)], dim=1)
    late = values[:, [max(0, j - 2) for j in range(16)]]
    want[:, :, 1::2] = torch.stack([late[:, max(0, i - 3) : i + 1, 1::2].mean(1) for i in range(16)], dim=1)
    torch.testing.assert_close(few, want, rtol=1e-5, atol=1e-5)
    previous, values, _ = mixed_by("previous", x)
    assert torch.equal(previous[:, 1:], values[:, :-1]) and torch.equal(previous[:, 0], values[:, 0])
    tied, values, turned = mixed_by("tied-softmax", x, sigma_squared=3.0)
    scores = torch.einsum("bihd,bjhd->bhij", turned, turned) / 3.0
    i, j = torch.arange(16)[:, None], torch.arange(16)
    scores = scores.masked_fill((j > i) | (j < i - 8), float("-inf"))
    want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
    torch.testing.assert_close(tied, want, rtol=1e-4, atol=1e-4)
    others, values, turned = mixed_by("others", x, sigma_squared=3.0)
    features = norm(turned).transpose(1, 2)
    scores = -(torch.cdist(features, features) ** 2) / (2 * 3.0)
    weights = scores.masked_fill((j >= i) | (j < i - 8), float("-inf")).softmax(-1).nan_to_num()
    want = torch.einsum("bhij,bjhd->bihd", weights, values)
    torch.testing.assert_close(others, want, rtol=1e-4, atol=1e-4)
    assert not others[:, 0].any()


# Of the four heads of the second layer, by how many tokens keys and values are late.
BY_HAND = {
    "P3NS2": [(0, 3), (0, 0), (2, 0), (0, 3)],
    "S20": [(20, 0)] * 4,
    "P,NPS": [(0, 0), (0, 1), (1, 0), (0, 0)],
}


@pytest.mark.parametrize("pattern", BY_HAND)
@pytest.mark.parametrize("values", ["rotated", "raw"])
def test_offsets_of_several_tokens_and_by_layer(values, pattern):
    """Head by head, keys and values shifted by hand."""
    layer, rotary, x, context = one_layer(head_offsets=pattern, gka_values=values, sequence_len=32)
    heads = x.view(2, 16, 4, 16)
    features = norm(rotary(heads, slice(0, 16)))
    mixed, got = features if values == "rotated" else heads, layer.mix(x, None, rotary, context)
    for head, (late_keys, late_values) in enumerate(BY_HAND[pattern]):
        one = slice(head, head + 1)
        keys = features[:, [max(0, j - late_keys) for j in range(16)], one]
        own = mixed[:, [max(0, j - late_values) for j in range(16)], one]
        want = gaussian_attention(
            features[:, :, one], layer.log_sigma[one], keys=keys, values=own, causal=True, impl="reference"
        )
        torch.testing.assert_close(got[:, :, one], want, rtol=1e-4, atol=1e-5)


def test_windows_are_of_gka_layers_the_last_one_too():
    config = dataclasses.replace(SHAPE, attention="GAAG", window_pattern="L", gka_window=3)
    assert [config.window(layer) for layer in range(4)] == [3, 16, 16, 3]
    saved = flops_per_token(meta_model(dataclasses.replace(config, gka_window=0))) - flops_per_token(meta_model(config))
    assert saved == 2 * 12 * 64 * (16 - 3)


# As every model


@every
def test_it_learns_and_sees_no_later_token(form):
    model = awake(**form)
    gpt_checks.later_tokens_change_nothing(model)
    gpt_checks.every_parameter_learns(model)
    gpt_checks.no_rows_give_no_logits_and_gradients_that_are_0(model)


@every
def test_decoding_computes_what_training_does(form):
    model = awake(**form)
    gpt_checks.chunks_give_the_full_pass(model)
    gpt_checks.last_only_gives_the_last_tokens_logits(model)
    gpt_checks.rows_of_different_lengths_are_independent(model)
    gpt_checks.prompts_that_begin_alike_give_what_each_gives_alone(model)


@every
def test_it_computes_in_bfloat16(form):
    exact = awake(**form)
    gpt_checks.in_bfloat16_it_computes_decodes_and_learns(exact, copy.deepcopy(exact).to(torch.bfloat16))


@every
def test_its_memory_is_counted(form):
    config = dataclasses.replace(SHAPE, sequence_len=64, vocab_size=500, n_embd=128, window_pattern="L", **form)
    gpt_checks.memory_is_what_the_optimiser_holds(build(config, "cpu"))
    if config.kernel == "gaussian" and not config.gka_window:
        gpt_checks.activations_are_what_autograd_keeps(build(config, "cpu"))


# Counted


def costs(**fields):
    model = meta_model(StudyShape.from_depth(4, window_pattern="L", value_embeds="none", **fields))
    return parameter_counts(model)["total"], flops_per_token(model)


@pytest.mark.parametrize("kind", ["gka", "softmax"])
@pytest.mark.parametrize("mixing,parameters,products", [
    ("kv-shift", 4 * 2, 4 * 256), ("partial", 0, 0), ("value-share", 256, 256), ("token-shift", 256, 256),
    ("canon", 4 * 256, 4 * 256),
])  # fmt: skip
def test_costs_of_mixing(kind, mixing, parameters, products):
    """Per layer of width 256 with two heads; a product costs 6 FLOPs, forward and backward."""
    rotary = "half" if mixing == "partial" else "full"
    plain, mixed = costs(attention=kind), costs(attention=kind, mixing=mixing, rotary=rotary, offset_layers="all")
    assert (mixed[0] - plain[0], mixed[1] - plain[1]) == (4 * parameters, 4 * 6 * products)


def test_costs_of_kernels():
    found = {kernel: costs(attention="gka", sequence_len=128, kernel=kernel) for kernel in KERNELS}
    counts, flops = ({kernel: cost[i] for kernel, cost in found.items()} for i in (0, 1))
    assert found["tied-softmax"] == found["others"] == found["gaussian"] and found["mean"] == found["previous"]
    assert counts["mean"] == counts["gaussian"] - 4 * 2
    assert flops["mean"] == flops["gaussian"] - 6 * 4 * 2 - 4 * 12 * 256 * 128
    assert counts["none"] == counts["mean"] - 4 * 256**2 and flops["none"] == flops["mean"] - 6 * 4 * 256**2


def test_what_mixing_learns_has_an_adamw_group_without_decay():
    model = awake(attention="GA", mixing="canon", offset_layers="all")
    [group] = [g for g in parameter_groups(model, OptimConfig(), lr_scale=2.0) if ".blend." in g.names[0]]
    assert (group.kind, len(group.names), group.weight_decay, group.initial_lr) == ("adamw", 4, 0.0, 0.01)


# Refused


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(mixing="canon"), "mixing is for gka layers, and attention=softmax has none in 4 layers; offset_layers"),
        (dict(attention="gka", mixing="canon", head_offsets="PS"), "head_offsets and mixing=canon do the same"),
        (dict(rotary="half", n_embd=72), "rotary=half needs a head_dim that is a multiple of 4, got 18"),
        (dict(GKA, kernel="mean", sigma_squared=2.0), "kernel=mean has none"),
        (dict(GKA, kernel="none", value_embeds="all"), "kernel=none mixes nothing"),
        (dict(attention="gka", gka_window=17), "gka_window must be 0 to sequence_len, 16, got 17"),
        (dict(head_offsets="PN2"), "head_offsets must be made of the letters N, P, S"),
        (dict(head_offsets="P0S"), "head_offsets must be of at least 1 token, got 'P0S'; N is a head without"),
        (dict(attention="gka", head_offsets="P,S16"), "head_offsets must be below sequence_len, 16, got 16 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **fields)


def test_figures_draw_weights_that_are_known():
    ids = torch.arange(12)
    for form in (dict(attention="GA", mixing="canon", offset_layers="all"), dict(GKA, head_offsets="P2NS3,S")):
        assert all(layer.error < 1e-5 for layer in extract(awake(**form), ids))
    mean, previous = (extract(awake(**GKA, kernel=kernel), ids)[0] for kernel in ("mean", "previous"))
    torch.testing.assert_close(mean.weights[0, 11, 3:], torch.full((9,), 1 / 9))
    assert torch.equal(previous.weights[1, 1:, :-1], torch.eye(11)) and previous.sigma is None
    for unknown in (dict(kernel="none"), dict(kernel="others"), dict(kernel="tied-softmax"), dict(mixing="kv-shift")):
        with pytest.raises(UserError, match="figures do not know the weights of this form"):
            extract(awake(**GKA, **unknown), ids)


# Runs


@pytest.fixture
def without_forms(monkeypatch):
    """As in a process that has not imported the module."""
    monkeypatch.setattr("nanochat_gka.model.config.FORMS", [])


@pytest.fixture(scope="module")
def run(packed, tmp_path_factory):
    """The folder of a run that was stopped once, by the command, and the words of that."""
    out = tmp_path_factory.mktemp("forms")
    words = gpt_runs.flags(packed, out, "--model-tag=", "--mixing", "canon", "--offset-layers", "all")
    words += ["--forms", "runs.study.forms"]
    tiny.call(gpt_runs.MODULE, *words, "--stop-after", 8)
    assert "resuming at step 8" in tiny.call(gpt_runs.MODULE, *words, "--stop-after", 16).stdout
    return out / "d2-GA-canon-everywhere", words


def test_a_run_is_continued_exported_and_loaded(run, tmp_path):
    loaded = load(run[0])
    assert loaded.model.config.mixing == "canon" and loaded.step == 16
    assert in_words(loaded.model.config).endswith("mixing canon")
    assert all(attention.blend.weight.abs().min() > 0 for attention in loaded.model.attentions)
    words = ["--run", run[0], "--out", tmp_path / "out", "--forms", "runs.study.forms"]
    tiny.call("nanochat_gka.export", *words)
    ids = torch.randint(70, (1, 16))
    with torch.inference_mode():
        assert torch.equal(load(tmp_path / "out").model(ids), loaded.model(ids))
    assert "--forms runs.study.forms" in (tmp_path / "out/README.md").read_text()


def test_other_commands_ask_for_the_module(run, packed, tmp_path, without_forms):
    folder, _ = run
    own = gpt_runs.flags(packed, folder.parent, "--model-tag", folder.name, "--offset-layers", "all")
    for command, config, words in (
        (evaluate, evaluate.EvaluateConfig, ["--run", folder, "--results", tmp_path / "results"]),
        (export, export.ExportConfig, ["--run", folder, "--out", tmp_path / "out"]),
        (generate, generate.GenerateConfig, ["--run", folder, "--prompt", "a"]),
        (train, train.TrainConfig, own),
    ):
        with tiny.one_line_error("mixing=canon.* of the study's forms: add --forms runs.study.forms"):
            command.main(parse(config, [str(word) for word in words]))
    assert not list(tmp_path.iterdir())


def test_models_of_the_core_load_without_the_module(without_forms):
    """Their settings as checkpoints of 2026-11-25 have them."""
    left = dict(mixing="none", rotary="full", kernel="gaussian", gka_window=0)
    saved = {**dataclasses.asdict(tiny_gpt.SHAPE), "attention": "gka", "head_offsets": "PS", **left}
    config = GPTConfig.from_saved(saved)
    assert type(config) is GPTConfig and config.head_offsets == "PS"
    train.TrainConfig().check_continues({**train.TrainConfig().identity(), **left})
    for name, value in dict(kernel="mean", gka_window=3, gka_values="raw", head_offsets="P2", rotary="half").items():
        with pytest.raises(ValueError, match=f"{name}={value} is of the study's forms: add --forms runs.study.forms"):
            GPTConfig.from_saved({**saved, name: value})


def test_models_of_the_forms_come_back_as_they_were():
    assert StudyShape in REGISTERED
    for form in FORMS:
        config = dataclasses.replace(SHAPE, **form)
        assert GPTConfig.from_saved(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--mixing partial --rotary half --offset-layers all", "d20-gka-partial-everywhere-half-rotary"),
        ("--kernel mean --gka-window 7 --value-embeds all", "d20-gka-mean-window-7-VE"),
    ],
)
def test_runs_have_the_names_of_before_so_that_the_same_command_continues(flags, name):
    argv = ["--forms", forms.NAME, *flags.split()]
    assert parse(extended(TrainConfig)(argv), argv).tag == name


@pytest.mark.parametrize("flag", ["--rotary=half", "--gka_window"])
def test_a_flag_of_the_study_without_its_module_names_it(flag):
    with pytest.raises(UserError, match=rf"{flag.partition('=')[0]} is of the study's forms: add --forms runs.study"):
        extended(TrainConfig)([flag, "x"])


def test_a_module_that_is_not_there_is_one_line():
    with pytest.raises(UserError, match=r"--forms \.forms: there is no such module"):
        extended(TrainConfig)(["--forms", ".forms"])


def test_a_hybrids_softmax_layers_mix_only_where_all_layers_do():
    shape = dataclasses.replace(SHAPE, attention="GA", mixing="kv-shift")
    assert [shape.layer_mixing(layer) for layer in (0, 1)] == ["kv-shift", "none"]
    everywhere = dataclasses.replace(shape, offset_layers="all")
    assert [everywhere.layer_mixing(layer) for layer in (0, 1)] == ["kv-shift", "kv-shift"]
    counts = [parameter_counts(build(one, "cpu"))["total"] for one in (shape, everywhere)]
    assert counts[0] < counts[1]
