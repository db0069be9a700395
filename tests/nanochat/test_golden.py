"""The softmax model, its optimiser and schedules against numbers that upstream nanochat printed.

golden/nanochat_b07604e.json: upstream at commit b07604ebaa6dffa9e21e0d2d7d0a5980301c6364 run on CPU in float32, eager,
one thread.
"""

import functools

import pytest
import torch

from golden import CONFIG, GOLDEN, batch, fill
from nanochat_gka.model.gpt import build
from nanochat_gka.training.muon import muon_update
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from nanochat_gka.training.schedule import lr_multiplier, muon_momentum
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
