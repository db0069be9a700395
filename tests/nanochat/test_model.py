"""The models: a layer of every form against its equations, whole models of every form, their shapes."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from gka import GaussianKernelAttention
from nanochat_gka.model.accounting import meta_model
from nanochat_gka.model.attention import build_attention
from nanochat_gka.model.blocks import Rotary
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context
from nanochat_gka.model.gpt import build
from nanochat_gka.training.optim import OptimConfig, parameter_groups
from sharding import check_trains_as_in_bfloat16, process_group
from tiny_gpt import PRESET, SHAPE, VARIANTS, awake

every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)

# A layer

FORMS = [dict(attention="gka", gka_values=values) for values in ("rotated", "unrotated")]
FORMS += [dict(attention=kind, offset_layers="all") for kind in ("softmax", "vlt")]
ADDITIONS = dict(channel_bandwidths=True, head_gates=True, value_embeds="every-second")
# Of the four heads, by how many tokens keys and values are late.
DELAYS = {"": [(0, 0)] * 4, "NPS": [(0, 0), (0, 1), (1, 0), (0, 0)], "PNSSP": [(0, 1), (0, 0), (1, 0), (1, 0)]}


def by_definition(layer, rotary, x, value_embedding):
    """The output of four heads of 16 channels for 16 tokens, x (2, 16, 64), from the equations in float64."""

    def heads(t):
        return t.reshape(2, 16, 4, 16)

    def normed(t):
        return t / (t.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt()

    def rotated(t):
        cos, sin = (table[:, :16].reshape(1, 16, 1, 8) for table in (rotary.cos, rotary.sin))
        one, two = t[..., :8], t[..., 8:]
        return torch.cat([one * cos + two * sin, two * cos - one * sin], dim=-1)

    def late(t, tokens):
        return t[:, [max(0, j - tokens) for j in range(16)]]

    scales = 1 if layer.channel_log_scales is None else layer.channel_log_scales.exp()
    if layer.kind.name == "gka":  # K = exp(-|x_i - x_j|^2 / 2 sigma^2), section 5.1
        queries = keys = normed(rotated(heads(normed(heads(x)).flatten(2) * scales)))
        values = normed(rotated(heads(x))) if layer.config.gka_values == "rotated" else normed(heads(x))
    else:
        queries, keys = (normed(rotated(heads((x * scales) @ w.weight.T))) for w in (layer.c_q, layer.c_k))
        values = heads(x) if layer.kind.name == "vlt" else heads(x @ layer.c_v.weight.T)
    if value_embedding is not None:
        values = values + 2 * torch.sigmoid(x[..., :32] @ layer.ve_gate.weight.T)[..., None] * heads(value_embedding)
    mixed = []
    for head, delays in enumerate(DELAYS[layer.config.head_offsets]):
        k, v = (late(t[:, :, head], delay) for t, delay in zip((keys, values), delays))
        if layer.kind.name == "gka":
            distances = (queries[:, :, None, head] - k[:, None]).square().sum(-1)
            logits = -distances / (2 * (2 * layer.log_sigma[head]).exp())
        else:
            logits = queries[:, :, head] @ k.mT / 16**0.5
        mixed.append(logits.masked_fill(~torch.ones(16, 16).bool().tril(), float("-inf")).softmax(-1) @ v)
    gates = 1 if layer.head_gate is None else 2 / (1 + (-0.1 * x @ layer.head_gate.weight.T).exp())[..., None]
    return (torch.stack(mixed, 2) * gates).flatten(2) @ layer.c_proj.weight.T


@pytest.mark.parametrize("form, offsets, additions", itertools.product(FORMS, DELAYS, ({}, ADDITIONS)), ids=str)
def test_a_layer_is_its_equations(form, offsets, additions):
    layer = build_attention(dataclasses.replace(SHAPE, **form, head_offsets=offsets, **additions), layer=3).double()
    rotary = Rotary(16, 16).double()
    rotary.init_weights()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    x, embedding = torch.randn(2, 2, 16, 64, dtype=torch.float64)
    embedding, context = embedding if "value_embeds" in additions else None, Context()
    context.begin(16)
    expected = by_definition(layer, rotary, x, embedding)
    torch.testing.assert_close(layer(x, embedding, rotary, context), expected, rtol=1e-5, atol=1e-5)


# Whole models


@every_variant
def test_later_tokens_change_nothing_and_every_parameter_learns(variant):
    """Each parameter is of one group of the optimiser."""
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (2, 17))
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 70
    assert torch.equal(model(ids)[:, :9], model(changed)[:, :9])
    assert not torch.allclose(model(ids)[:, 9:], model(changed)[:, 9:])
    model(ids[:, :-1], ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    names = [name for group in parameter_groups(model, OptimConfig()) for name in group.names]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    no_rows = model(torch.zeros(0, 16, dtype=torch.long))
    assert no_rows.shape == (0, 16, 70)
    no_rows.sum().backward()


PUBLIC_NAMES = {"channel_log_scales": "log_scale", "c_proj.weight": "proj.weight"}


class PublicLayer(torch.nn.Module):
    """gka's layer in the place of a model's, with its weights."""

    def __init__(self, old, **settings):
        super().__init__()
        width, heads = old.config.n_embd, old.config.n_head
        has_embedding = old.ve_gate is not None
        masks = dict(causal=True, window=old.window)
        self.new = GaussianKernelAttention(width, heads, value_embeddings=has_embedding, **masks, **settings)
        self.new.load_state_dict({PUBLIC_NAMES.get(name, name): t for name, t in old.state_dict().items()})

    def forward(self, x, value_embedding, rotary, context):
        return self.new(x, value_embedding=value_embedding)


@pytest.mark.parametrize("value_embeds", ["none", "every-second"])
def test_the_layers_preset_is_the_models(value_embeds):
    """Logits and all gradients of a model in which gka's layer, with the model's tables, stands for its own."""
    model = awake(dataclasses.replace(SHAPE, **{**PRESET, "value_embeds": value_embeds}))
    for name, p in model.named_parameters():
        if name.endswith("ve_gate.weight"):
            torch.nn.init.normal_(p)
    twin, ids = copy.deepcopy(model), torch.randint(70, (2, 16))
    for block in twin.transformer.h:
        block.attn = PublicLayer(block.attn, preset="text", rotary=model.rotary.tables)
    logits = [one(ids) for one in (model, twin)]
    torch.testing.assert_close(*logits)
    for result in logits:
        result.square().sum().backward()
    theirs = {name.replace("attn.new.", "attn."): p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        for old, new in PUBLIC_NAMES.items():
            name = name.replace(f"attn.{old}", f"attn.{new}")
        torch.testing.assert_close(theirs.pop(name), p.grad, rtol=1e-5, atol=1e-6 * p.grad.abs().max().item())
    assert not theirs


BOS, LENGTH = 69, 23
FIRSTS = [[0, 1, 9, 10, 22], [5], []]  # places of BOS in three rows; the second begins with the end of a document


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"])
@every_variant
def test_documents_of_a_row_are_as_each_alone(variant, dtype, error):
    """Logits, loss and all gradients."""
    packed = awake(dataclasses.replace(SHAPE, **variant, document_start=BOS)).to(dtype)
    alone = awake(dataclasses.replace(SHAPE, **variant)).to(dtype)
    rows = torch.randint(BOS, (len(FIRSTS), LENGTH + 1))
    for row, firsts in zip(rows, FIRSTS):
        row[firsts] = BOS
    packed(rows[:, :-1], rows[:, 1:], reduction="sum").backward()
    logits = packed(rows[:, :-1])
    for row, firsts, got in zip(rows, FIRSTS, logits):
        for first, end in itertools.pairwise(sorted({0, *firsts, LENGTH})):
            alone(row[None, first:end], row[None, first + 1 : end + 1], reduction="sum").backward()
            torch.testing.assert_close(got[None, first:end], alone(row[None, first:end]), rtol=0, atol=10 * error)
    for (name, one), (_, other) in zip(packed.named_parameters(), alone.named_parameters(), strict=True):
        assert other.grad.norm() > 0 and (one.grad - other.grad).norm() <= error * other.grad.norm(), name


@pytest.mark.parametrize("attention", ["GA", "softmax"])
def test_another_number_of_documents_compiles_nothing_again(attention):
    model, programs = awake(dataclasses.replace(SHAPE, attention=attention, document_start=BOS)), CompileCounter()
    compiled = torch.compile(model, backend=programs, dynamic=False)
    for places in ([0], [3, 4, 5, 14], list(range(16))):
        ids = torch.randint(BOS, (2, 16))
        ids[1, places] = BOS
        torch.testing.assert_close(compiled(ids), model(ids), rtol=0, atol=1e-5)
    assert programs.frame_count == 1


@every_variant
def test_a_model_that_is_cast_to_bfloat16_computes_decodes_and_learns(variant):
    """As other people's tools treat models: within the rounding that bfloat16 costs, with float32 logits."""
    exact = awake(dataclasses.replace(SHAPE, **variant))
    model, ids = copy.deepcopy(exact).to(torch.bfloat16), torch.randint(70, (2, 16))
    cache = model.new_cache(2, 16)
    parts = torch.cat([model(ids[:, :8], context=cache), model(ids[:, 8:], context=cache)], dim=1)
    for logits in (model(ids), parts):
        assert logits.dtype == torch.float32
        assert (logits - exact(ids)).norm() < 0.03 * logits.norm()
    model(ids, ids).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("variant", [dict(attention="gka"), dict(attention="GA", value_embeds="every-second")], ids=str)
def test_fsdp_in_bfloat16(variant, tmp_path):
    ids = torch.randint(70, (2, 17))
    with process_group(tmp_path):
        model = awake(dataclasses.replace(SHAPE, **variant))
        check_trains_as_in_bfloat16(model, lambda m: m.transformer.h, lambda m: m(ids[:, :-1], ids[:, 1:]))


# Shapes


@pytest.mark.parametrize("attention, values", [("gka", "unrotated"), ("softmax", "rotated")])
def test_a_saved_shape_keeps_its_form(attention, values):
    """By today's names. Softmax models, of which values say nothing, were saved with a value of it."""
    saved = dataclasses.asdict(dataclasses.replace(SHAPE, attention=attention)) | {
        "gka_values": "normalised",
        "value_embeds": "all",
    }
    config = GPTConfig.from_saved(saved)
    assert (config.attention, config.gka_values, config.value_embeds) == (attention, values, "every-second")
    assert GPTConfig.from_saved(dataclasses.asdict(config)) == config


def test_starting_bandwidths_and_the_layers_of_offsets():
    for fields, sigma_squared in ((dict(), 16.0), (dict(head_offsets="PS"), 4.0), (dict(sigma_squared=3.0), 3.0)):
        model = build(dataclasses.replace(SHAPE, attention="gka", **fields), "cpu")
        for sigma in model.bandwidths().values():
            torch.testing.assert_close(sigma.square(), torch.full((4,), sigma_squared))
    hybrid = meta_model(dataclasses.replace(SHAPE, attention="GA", head_offsets="PS"))
    assert [layer.pairing is not None for layer in hybrid.attentions] == [True, False, True, False]


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(n_head=5, n_kv_head=5), "n_embd / n_head must be"),
        (dict(n_kv_head=2), "n_kv_head"),
        (dict(n_layer=0), "n_layer must be at least 1, got 0"),
        (dict(attention="lin"), "attention must be one of .*GGGA"),
        (dict(window_pattern=""), "window_pattern .* S, L"),
        (dict(head_offsets="PQ"), "head_offsets .* N, P, S, got 'PQ'"),
        (dict(head_offsets="PS"), "head_offsets .* attention=softmax .* offset_layers=all"),
        (dict(gka_values="raw"), "gka_values .* rotated, unrotated, got 'raw'"),
        (dict(attention="gka", sigma_squared=-1.0), "sigma_squared .* got -1.0"),
        (dict(document_start=70), "document_start .* below 70.* got 70"),
    ],
    ids=str,
)
def test_bad_shapes(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **fields)
