"""What stands in the place of the Gaussian kernel: definitions, decoding, costs, what is refused, a run."""

import dataclasses

import pytest
import torch

import gpt_runs
import tiny
from nanochat_gka.figures.maps import extract
from nanochat_gka.model.accounting import flops_per_token, meta_model, parameter_counts
from nanochat_gka.model.baselines import KERNELS, attention_class
from nanochat_gka.model.blocks import Rotary, norm
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.config import KERNELS as KNOWN
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.context import Context
from nanochat_gka.training import memory
from tiny_gpt import SHAPE, awake
from trainkit_gka.cli import UserError

GKA = dict(attention="gka", gka_values="normalised")
FORMS = [dict(GKA, kernel=kernel) for kernel in KERNELS]
FORMS += [dict(attention="gka", kernel="tied-softmax", head_offsets="PS"), dict(GKA, kernel="mean", head_offsets="PS")]
FORMS += [dict(GKA, kernel="mean", head_offsets="P3S", gka_window=3), dict(GKA, kernel="tied-softmax", gka_window=1)]
FORMS += [dict(attention="GA", kernel="previous", mixing="canon", value_embeds="every-layer")]


def mixed_by(kernel, x, window=8, **fields):
    """What a layer that sees `window` tokens back mixes of a block input (2, 16, 64)."""
    config = dataclasses.replace(SHAPE, **GKA, kernel=kernel, **fields)
    layer, rotary, context = attention_class(config, 0)(config, 0), Rotary(16, 16), Context()
    layer.init_weights()
    rotary.init_weights()
    context.begin(16)
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
    assert set(KNOWN) == {"gaussian", *KERNELS}


@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.inference_mode()
def test_decoding_computes_what_a_full_pass_does(form):
    model = awake(dataclasses.replace(SHAPE, **form))
    ids = torch.randint(70, (3, 40))
    cache = model.new_cache(3, 40)
    got = torch.cat([model(part, context=cache) for part in ids.split([5, 1, 1, 7, 1, 20, 5], dim=1)], dim=1)
    torch.testing.assert_close(got, model(ids), rtol=0, atol=1e-5)
    last = model.new_cache(3, 40, last_only=True)
    torch.testing.assert_close(model(ids, context=last), model(ids)[:, -1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_parameter_learns_and_is_counted(form):
    config = dataclasses.replace(SHAPE, **form)
    model = awake(config)
    ids = torch.randint(70, (2, 17))
    model(ids[:, :-1], ids[:, 1:]).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert sum(memory.parameters(config)) == parameter_counts(model)["total"]


def test_costs():
    shape = dict(attention="gka", window_pattern="L", sequence_len=128)
    models = {kernel: meta_model(GPTConfig.from_depth(4, kernel=kernel, **shape)) for kernel in KNOWN}
    counts = {kernel: parameter_counts(model)["total"] for kernel, model in models.items()}
    flops = {kernel: flops_per_token(model) for kernel, model in models.items()}
    assert counts["tied-softmax"] == counts["gaussian"] and flops["tied-softmax"] == flops["gaussian"]
    assert counts["mean"] == counts["previous"] == counts["gaussian"] - 4 * 2
    assert flops["mean"] == flops["previous"] == flops["gaussian"] - 6 * 4 * 2 - 4 * 12 * 256 * 128
    assert counts["none"] == counts["mean"] - 4 * 256**2 and flops["none"] == flops["mean"] - 6 * 4 * 256**2


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(kernel="mean"), "kernel is for gka layers, and attention=softmax has none"),
        (dict(GKA, kernel="x"), "kernel must be one of gaussian, mean"),
        (dict(GKA, kernel="mean", sigma_squared=2.0), "kernel=mean has none"),
        (dict(GKA, kernel="none", head_offsets="PS"), "kernel=none mixes nothing"),
        (dict(GKA, kernel="none", value_embeds="all"), "kernel=none mixes nothing"),
        (dict(GKA, kernel="previous", gka_window=2), "gka_window means nothing with kernel=previous"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHAPE, **fields)


def test_figures_draw_weights_that_are_known():
    ids = torch.arange(12)
    mean, previous = (extract(awake(dataclasses.replace(SHAPE, **GKA, kernel=k)), ids)[0] for k in ("mean", "previous"))
    torch.testing.assert_close(mean.weights[0, 11, 3:], torch.full((9,), 1 / 9))
    assert torch.equal(previous.weights[1, 1:, :-1], torch.eye(11)) and previous.sigma is None
    with pytest.raises(UserError, match="kernel=none are not known"):
        extract(awake(dataclasses.replace(SHAPE, **GKA, kernel="none")), ids)


def test_a_run_without_attention_trains_and_loads(packed, tmp_path):
    flags = gpt_runs.flags(packed, tmp_path, "--attention", "gka", "--kernel", "none", "--stop-after", 6)
    tiny.call(gpt_runs.MODULE, *flags)
    loaded = load(tmp_path / "run")
    assert loaded.model.config.kernel == "none" and loaded.model.bandwidths() == {}
