"""The study: a cell with a real training, keys and costs of the recorded rows, intervals worked out by hand."""

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import tyro
from scipy import stats

from deit_gka.train import TrainConfig as ImageTrainer
from nanochat_gka.train import TrainConfig as TextTrainer
from runs.study import analyse
from runs.study.analyse import CONTROL, FLOPS, TIME, Study, intervals
from runs.study.train import FORMS, Runner, TrainConfig, image_training, text_training, text_trainings
from trainkit_gka.cli import UserError
from trainkit_gka.progress import read_lines

RESULTS = Path(__file__).parents[2] / "runs/results/study"
STEPS = 20


def runner(packed, folder):
    """Of one cell with one layer."""
    config = dict(data=packed / "packed", results=folder, runs=folder / "runs", forms=["GKA"], depths=[1], seeds=[0])
    config |= dict(tokens=[2048 * STEPS], device_type="cpu", at_once=1)
    config = TrainConfig(**config)
    return Runner(config, *text_trainings(config))


def test_a_finished_cell_is_one_row_beside_rows_of_the_same_data(packed, tmp_path, capsys):
    one = runner(packed, tmp_path)
    one.run()
    [training], [row] = one.jobs, read_lines(one.results)
    assert row["key"] == training.key and row["form"] == "GKA" and row["chosen"] and row["kind"] == "study"
    assert {"commit", "hardware", "date", "torch", "data"} <= row.keys() and row["trial"]["rate"] == 1.0
    metrics = row["metrics"]
    assert metrics["train_flops"] == training.cost and metrics["curve"][-1][0] == 2048 * STEPS
    assert metrics["evaluations"][-1][2] == metrics["val_bpb"] < metrics["evaluations"][0][2]
    assert len(metrics["sigma"]["layer_0"]) == 1
    assert not one.remaining()
    one.run()
    assert len(read_lines(one.results)) == 1
    analyse.main(analyse.AnalyseConfig(results=tmp_path))
    assert "\ncorpus:\n" in capsys.readouterr().out
    one.results.write_text(one.results.read_text().replace('"sequence_len": 32', '"sequence_len": 16'))
    with pytest.raises(UserError, match="--results"):
        runner(packed, tmp_path)


def test_recorded_cells_keep_their_keys_and_flops_and_the_trainers_read_their_flags():
    """Else they would be trained again, and tables would miss them."""
    forms = {line["key"]: line["form"] for line in map(json.loads, (RESULTS / "chosen.jsonl").read_text().splitlines())}
    checked, flags = 0, {}
    for row in read_lines(RESULTS / "text_large.jsonl"):
        form, trial = forms.get(row["key"]), row["trial"]
        if row["kind"] == "study" and form in FORMS:
            place = form, trial["depth"], trial["tokens"], trial["seed"]
            again = text_training(TrainConfig(), "x", {**row["data"], "vocab_size": 4096}, *place)
            assert (again.key, again.cost) == (row["key"], row["metrics"]["train_flops"]), place
            checked, flags[TextTrainer, form] = checked + 1, again.flags
    for row in read_lines(RESULTS / "vision_cifar10.jsonl"):
        if form := forms.get(row["key"]):
            again = image_training(TrainConfig(images="x"), Path("x"), row["data"], form, row["trial"]["seed"])
            assert again.key == row["key"] and again.row["trial"] == row["trial"]
            checked, flags[ImageTrainer, form] = checked + 1, again.flags
    assert checked > 350 and len(flags) > len(FORMS)
    for (trainer, _), words in flags.items():
        tyro.cli(trainer, args=[str(word) for word in words])


# Tables


def row(form, place, seed, loss, cost=1.0, **changed):
    depth, tokens = place
    trial = {"depth": depth, "tokens": tokens, "seed": seed, "rate": 1.0}
    metrics = {"val_bpb": loss, "parameters": 10, "flops_per_token": 1, "train_flops": cost, "sigma": {}}
    about = {"kind": "study", "date": "2026-11-22 12:00", "commit": "abc1234", "hardware": "a CPU", "torch": "2.14"}
    key = f"{form} {place} {seed}"
    return {**about, "key": key, "trial": trial, "metrics": metrics, "data": 1, "form": form, "chosen": True, **changed}


def test_intervals_are_pooled_over_places():
    """Three seeds at each of two places: variances 1 and 4 on four degrees of freedom."""
    computed = intervals({"a": pd.Series([1.0, 2.0, 3.0]), "b": pd.Series([0.0, 2.0, 4.0]), "one": pd.Series([7.0])})
    half = stats.t.ppf(0.975, 4) * math.sqrt((1 + 4) / 2)
    for place, mean, seeds in (("a", 2.0, 3), ("b", 2.0, 3), ("one", 7.0, 1)):
        one = computed[place]
        assert (one.value, one.seeds) == (mean, seeds) and one.high == pytest.approx(mean + half / math.sqrt(seeds))
    alone = intervals({"a": pd.Series([1.0, 2.0, 3.0])})["a"]
    assert math.isnan(alone.low) and alone.text("+.1f") == "+2.0"


def test_at_equal_flops_the_baselines_best_is_read_from_a_parabola():
    """Losses of the baseline with two layers are quadratic in the logarithm of FLOPs; four layers are better there."""
    budgets = [(2, tokens, math.log(cost), cost) for tokens, cost in ((2**20, 1.0), (2**21, 2.0), (2**22, 8.0))]
    curve = [row(CONTROL, (2, t), seed, 3 - x + 0.1 * x * x, c) for _, t, x, c in budgets for seed in (0, 1)]
    better = [row(CONTROL, (4, 2**20), seed, 1.0 + seed / 10, 5.0) for seed in (0, 1)]
    ours = [row("GKA", (2, 2**21), seed, 2.0 + seed / 10, 4.0) for seed in (0, 1)]
    x = math.log(4.0)
    read = Study([*curve, *ours], {}).difference("GKA", CONTROL, (2, 2**21), FLOPS)
    assert list(read) == pytest.approx([2.0 - (3 - x + 0.1 * x * x) + seed / 10 for seed in (0, 1)])
    cheap = [{**one, "metrics": {**one["metrics"], "train_flops": 3.0}} for one in better]
    study = Study([*curve, *ours, *cheap], {2: {"GKA": 1.0, CONTROL: 2.0}})
    assert list(study.difference("GKA", CONTROL, (2, 2**21), FLOPS)) == pytest.approx([1.0, 1.0])
    dearer = Study([*curve, *ours, *better], {}).difference("GKA", CONTROL, (2, 2**21), FLOPS)
    assert list(dearer) == pytest.approx(list(read))
    two_budgets = [one for one in curve if one["trial"]["tokens"] != 2**21]
    assert Study([*two_budgets, *ours], {}).difference("GKA", CONTROL, (2, 2**21), FLOPS).empty
    far = [row("GKA", (2, 2**21), seed, 2.0, 100.0) for seed in (0, 1)]
    assert Study([*curve, *far], {}).difference("GKA", CONTROL, (2, 2**21), FLOPS).empty
    assert study.cost("GKA", (2, 2**21), TIME) == 2**21 and math.isnan(study.cost("softmax", (2, 2**21), TIME))
