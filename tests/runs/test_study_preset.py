"""make pretrain-d20-best: the form that the study favours, through the chain of the paper's runs."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import tyro

import processes
import tiny
from nanochat_gka.accounting import AccountingConfig, account
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.accounting import flops_per_token, meta_model
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.forms import extended
from nanochat_gka.train import TrainConfig
from nanochat_gka.training.optim import parameter_groups
from runs import commands
from runs.paper import gpt_d20_gka, gpt_d20_softmax
from runs.study import gpt_d20_best, gpt_small
from runs.study.families import ALL, PRESET
from runs.study.grid import DEEPER
from runs.study.trials import Trial
from runs.tables import study_next
from runs.tables.study_equal import AT_DEPTH_20

LEARNED = dict(channel_bandwidths=True, head_gates=True)
FORM = ("attention", "head_offsets", "offset_layers", "value_embeds", "gka_values", "sigma_squared", *LEARNED)
LEARNED_RATES = [("channel_bandwidths", "channel_lr", "channel_rate"), ("head_gates", "gate_lr", "gate_rate")]
BEST = dict(head_offsets="PS", gka_values="normalised", value_embeds="all", **LEARNED)


def trained_by(command):
    """What the trainer is given by a command of make, as a page prints it."""
    recipes = {"pretrain-d20": gpt_d20_gka, "pretrain-d20-base": gpt_d20_softmax, "pretrain-d20-best": gpt_d20_best}
    _, target, *settings = shlex.split(command)
    given = dict(setting.split("=", 1) for setting in settings)
    flags = commands.language(recipes[target].RECIPE, "rows", given.get("DEPTH", 20), "out", "disabled")
    return tyro.cli(TrainConfig, args=[*flags, *given.get("ARGS", "").split()])


@pytest.mark.parametrize("name", AT_DEPTH_20)
def test_a_command_of_the_front_page_trains_the_form_that_it_stands_beside(name):
    """Its shape, and the study's own rates of channels and gates, as multiples of the trainer's defaults."""
    trained, defaults, form = trained_by(AT_DEPTH_20[name].strip("`")), TrainConfig(), ALL[name]
    for field in FORM:
        assert getattr(trained, field) == form.get(field, getattr(defaults, field)), field
    for learned, rate, own in LEARNED_RATES:
        if form.get(learned):
            assert getattr(trained, rate) == getattr(defaults, rate) * form[own]


def test_the_small_run_is_the_studys_preset():
    """The same model, and every parameter at the rate that the study's trainings had."""
    trial = Trial(**{**ALL[PRESET], **DEEPER})
    flags = commands.language(gpt_small.RECIPE, "rows", 4, "out", "disabled")
    words = (list(map(str, args)) for args in (flags, ["--data", "rows", *trial.flags()]))
    trained, studied = (tyro.cli(extended(TrainConfig)(args), args=args) for args in words)
    assert trained.tag == "d4-gka-PS-normalised-channels-gates-VE"
    shapes = [config.shape(4, 512, 4096) for config in (trained, studied)]
    models = [meta_model(shape) for shape in shapes]
    assert f"{sum(p.numel() for p in models[0].parameters()):,} parameters" in gpt_small.__doc__
    horizons = [config.horizon(model, processes=1) for config, model in zip((trained, studied), models)]
    assert horizons[0] == horizons[1] and horizons[0].tokens == trial.tokens
    rates = []
    for model, config, horizon in zip(models, (trained, studied), horizons):
        groups = parameter_groups(model, config, horizon.lr_scale, horizon.weight_decay_scale)
        rates.append(
            {name: (group.initial_lr, group.betas, group.weight_decay) for group in groups for name in group.names}
        )
    assert rates[0].keys() == rates[1].keys()
    for name in rates[0]:
        assert rates[0][name][0] == pytest.approx(rates[1][name][0], rel=1e-6), name
        assert rates[0][name][1:] == rates[1][name][1:]


def test_the_preset_is_the_papers_run_in_another_form_at_the_same_flops():
    words, paper = (commands.flags(**experiment.RECIPE) for experiment in (gpt_d20_best, gpt_d20_gka))
    form = "--head-offsets PS --gka-values normalised --value-embeds all --channel-bandwidths --channel-lr 0.08"
    assert words == [*paper, *form.split(), "--head-gates", "--gate-lr", "0.005"]
    literal, counts, small = (
        account(AccountingConfig(depth=20, attention="gka", target_param_data_ratio=8.25, **form))
        for form in ({}, BEST, BEST | dict(value_embeds="none"))
    )
    assert abs(counts["train_flops"] / literal["train_flops"] - 1) < 0.002
    opening = " ".join(gpt_d20_best.__doc__.split())
    for number in (counts["parameters"], counts["train_tokens"], small["parameters"]):
        assert f"{number:,}" in opening
    assert f"{counts['train_flops']:.3e}".replace("e+", "e") in opening and "not run here yet" in opening
    page = Path("nanochat_gka/README.md").read_text()
    [row] = re.findall(r"^\| `make pretrain-d20-best` .*$", page, re.MULTILINE)
    assert f"{counts['parameters']:,}" in row and f"{counts['train_tokens']:,}" in row


def test_a_small_run_of_the_preset_trains_decodes_and_exports(packed, tmp_path):
    flags = commands.language(gpt_d20_best.RECIPE, packed / "packed", 2, tmp_path, "disabled")
    flags += [*tiny.TRAIN_FLAGS[2:], "--num-iterations", "3"]
    processes.call("nanochat_gka.train", *flags, folder=tmp_path / "output")
    run = tmp_path / "runs" / "d2-gka-PS-normalised-channels-gates-VE"
    loaded = load(run)
    assert dataclasses.asdict(loaded.model.config).items() >= BEST.items()
    engine = Engine(loaded.model, loaded.tokenizer)
    [[text]] = engine.complete(["the kernel"], Sampling(num_samples=1, max_tokens=4, temperature=0))
    assert text
    kept = [len(tensors) for tensors in engine._new_cache(rows=1, capacity=8).layers]
    assert kept == [1, 2]  # keys too where there are value embeddings
    processes.call("nanochat_gka.export", "--run", run, "--out", tmp_path / "exported", folder=tmp_path / "output")
    assert "PS" in (tmp_path / "exported" / "config.json").read_text()


def test_the_runs_that_a_gpu_should_make_are_what_the_trainer_takes_at_the_flops_that_the_page_gives():
    language = [run for run in study_next.runs() if "pretrain" in run.command]
    assert len({run.command for run in language}) == len(language) == 11
    for run in language:
        trained = trained_by(run.command.replace("--seed N", "--seed 1"))
        model = meta_model(trained.shape(trained.depth, 2048, 32768))
        flops = trained.horizon(model, processes=1).tokens * flops_per_token(model)
        assert abs(flops / run.flops - 1) < 0.01, run.command
