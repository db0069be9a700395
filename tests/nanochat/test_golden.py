"""Against upstream nanochat: numbers that it printed for model, optimiser and schedules, and its checkpoints."""

import dataclasses
import functools
import io
import json
import pickle

import pytest
import torch

import tiny
from golden import CONFIG, GOLDEN, batch, fill
from nanochat_gka.model.checkpoints import load_upstream
from nanochat_gka.model.gpt import build
from nanochat_gka.training.muon import muon_update
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from nanochat_gka.training.schedule import lr_multiplier, muon_momentum
from tiny_gpt import SHAPE, awake
from trainkit_gka.distributed import Runtime


def test_state_dict_names_and_shapes():
    names = [[name, list(tensor.shape)] for name, tensor in build(CONFIG, "cpu").state_dict().items()]
    assert names == GOLDEN["model"]["state_dict"]


@pytest.mark.parametrize("section,how", [("model", "sine"), ("model_randn", "randn")])
def test_logits_and_losses(section, how):
    want, model = GOLDEN[section], fill(build(CONFIG, "cpu"), how)
    ids, targets = batch()
    logits = model(ids)
    for key, (b, t) in {"logits_0_0_8": (0, 0), "logits_0_31_8": (0, 31), "logits_1_17_8": (1, 17)}.items():
        torch.testing.assert_close(logits[b, t, :8], torch.tensor(want[key]), rtol=1e-5, atol=1e-5)
    assert model(ids, targets).item() == pytest.approx(want["loss_mean"], rel=1e-6)
    losses = model(ids, targets, reduction="none").view(2, 32)[0]
    torch.testing.assert_close(losses, torch.tensor(want["loss_row0"]), rtol=1e-5, atol=1e-5)


def test_initialisation_draws_the_same_numbers():
    torch.manual_seed(42)
    parameters = dict(build(CONFIG, "cpu").named_parameters())
    assert parameters.keys() == GOLDEN["init"]["params"].keys()
    for name, (total, absolute, *first) in GOLDEN["init"]["params"].items():
        values = parameters[name].detach().flatten()
        assert values[:3].tolist() == pytest.approx(first, rel=1e-7), name
        assert values.double().abs().sum().item() == pytest.approx(absolute, rel=1e-6), name
        assert values.double().sum().item() == pytest.approx(total, rel=1e-4, abs=1e-4), name


def optimise(section, dtype, **tolerance):
    """Three steps of our optimiser on the golden batch, whose losses are upstream's. Returns the model."""
    want = GOLDEN[section]
    model = fill(build(CONFIG, "cpu"), "randn")
    optimizer = MuonAdamW(parameter_groups(model, OptimConfig()), Runtime(0, 1, torch.device("cpu")))
    optimizer._muon = functools.partial(muon_update, dtype=dtype)
    losses = []
    for step in range(3):
        loss = model(*batch())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(1.0, muon_momentum(step), 1 - step / 10)
    losses.append(model(*batch()).item())
    assert losses == pytest.approx([*want["losses_before_step"], want["loss_after_3"]], **tolerance)
    return model


def test_three_steps_of_muon_and_adamw_in_float32(one_thread):
    """Upstream's Muon with its bfloat16 casts taken out: the sharp test of the algorithm."""
    for name, parameter in optimise("optim_randn_fp32muon", torch.float32, rel=2e-6).named_parameters():
        total, absolute, *first = GOLDEN["optim_randn_fp32muon"]["params"][name]
        values = parameter.detach().double().flatten()
        assert values[:3].tolist() == pytest.approx(first, abs=5e-5), name
        assert values.abs().sum().item() == pytest.approx(absolute, abs=1e-2), name
        assert values.sum().item() == pytest.approx(total, abs=1e-2), name


def test_three_steps_with_bfloat16_muon(one_thread):
    """As upstream runs it; another SDPA kernel alone moves upstream's losses by up to 1.5e-4."""
    optimise("optim_randn", torch.bfloat16, abs=6e-4)


def test_gradients_of_the_first_step():
    want = GOLDEN["optim_randn"]["grads_step0"]
    model = fill(build(CONFIG, "cpu"), "randn")
    model(*batch()).backward()
    for name, parameter in model.named_parameters():
        _, absolute, *first = want[name]
        gradient = parameter.grad.double().flatten()
        assert gradient.abs().sum().item() == pytest.approx(absolute, rel=1e-5), name
        assert gradient[:3].tolist() == pytest.approx(first, abs=1e-5 * absolute), name


def test_optimiser_groups_rates_and_betas():
    groups = parameter_groups(build(CONFIG, "cpu"), OptimConfig())
    want_groups = GOLDEN["optim"]["groups"]
    assert [group.kind for group in groups] == [want["kind"] for want in want_groups]
    for group, want in zip(groups, want_groups):
        assert group.names == want["params"]
        assert group.initial_lr == pytest.approx(want["lr"], rel=1e-6)
        assert group.weight_decay == want["wd"]
        assert list(group.betas) == (want["betas"] if group.kind == "adamw" else [0.0, want["beta2"]])


def test_schedules():
    n20 = GOLDEN["schedule"]["n20"]
    assert [lr_multiplier(step, 20, 0.1, 0.5, 0.1) for step in range(20)] == pytest.approx(n20["lrm"])
    for step, want in GOLDEN["schedule"]["n4357"]["lrm"].items():
        assert lr_multiplier(int(step), 4357) == pytest.approx(want)
    for step, want in GOLDEN["schedule"]["muon_momentum"].items():
        assert muon_momentum(int(step)) == pytest.approx(want)


# Checkpoints

UPSTREAM_FIELDS = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern")
UPSTREAM = {name: getattr(SHAPE, name) for name in UPSTREAM_FIELDS}
WEIGHTS = awake(SHAPE).state_dict()


def write(folder, weights, meta=None, step=1):
    """A checkpoint of weights, or of the bytes of a file."""
    meta = {"model_config": UPSTREAM} if meta is None else meta
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, **meta}))
    if isinstance(weights, bytes):
        (folder / f"model_{step:06d}.pt").write_bytes(weights)
    else:
        torch.save(weights, folder / f"model_{step:06d}.pt")


def saved(weights):
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


def test_upstream_checkpoint_folder_loads(tmp_path):
    """Upstream's files: bf16 embeddings, the compiled-module prefix, a config with its seven fields."""
    model = awake(SHAPE)
    model.embeddings_to(torch.bfloat16)
    write(tmp_path, {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}, step=123)
    model.embeddings_to(torch.float32)
    ids = torch.randint(70, (1, 16))
    assert torch.equal(load_upstream(tmp_path)(ids), model(ids))
    assert load_upstream(tmp_path).config.attention == "softmax"
    with tiny.one_line_error("of step 7 in"):
        load_upstream(tmp_path, step=7)


@pytest.mark.parametrize(
    "stated, values",
    [({}, "unrotated"), ({"gka_values": "normalised"}, "unrotated"), ({"gka_values": "rotated"}, "rotated")],
    ids=str,
)
def test_patched_nanochat_checkpoint_keeps_its_form(tmp_path, stated, values):
    """The first patches mixed normalised values and did not write so."""
    model = awake(dataclasses.replace(SHAPE, attention="gka", gka_values=values))
    write(tmp_path, model.state_dict(), {"model_config": {**UPSTREAM, "attention": "gka", **stated}})
    ids = torch.randint(70, (1, 16))
    assert torch.equal(load_upstream(tmp_path)(ids), model(ids))


LATER = {"smear_gate.weight": torch.zeros(1, 24), "backout_lambda": torch.zeros(1)}  # settings are those of the pin
REFUSED = {
    "later": ({**WEIGHTS, **LATER}, {}, "from after 2026-03-09, by its backout_lambda, smear_gate.weight"),
    "cut": (saved(WEIGHTS)[: 10**5], {}, "is damaged, cut short"),
    "numbers": ({**WEIGHTS, "x": 3}, {}, "does not hold weights by name"),
    "module": (awake(SHAPE), {}, "is refused: it holds more than weights"),
    "more": ({**WEIGHTS, "a": WEIGHTS["x0_lambdas"]}, {}, 'Unexpected key.* "a"'),
    "fewer": ({n: w for n, w in WEIGHTS.items() if "wte" not in n}, {}, "Missing key.* .transformer.wte.weight"),
    "shape": (WEIGHTS, {"model_config": {**UPSTREAM, "vocab_size": 200}}, "size mismatch for value_embeds.3.weight"),
    "no shape": (WEIGHTS, {"model_config": None}, "meta_000001.json has no model_config"),
    "text": (WEIGHTS, {"model_config": {**UPSTREAM, "n_layer": "4"}}, "n_layer must be a whole number, got '4'"),
    "unknown": (WEIGHTS, {"model_config": {**UPSTREAM, "smear": True}}, "not known here: smear"),
}


@pytest.mark.parametrize("weights, meta, message", REFUSED.values(), ids=REFUSED)
def test_other_files_are_one_line(weights, meta, message, tmp_path):
    write(tmp_path, weights, meta or None)
    with tiny.one_line_error(message):
        load_upstream(tmp_path)


def test_upstream_pickles_are_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'pwned')!r}, 'w')",))

    write(tmp_path, pickle.dumps(Evil(), protocol=2))
    with tiny.one_line_error("model_000001.pt is refused"):
        load_upstream(tmp_path)
    assert not (tmp_path / "pwned").exists()
