"""CORE's numbers: the formula gives the published figures, and means and files say what they are of."""

import pytest
import torch

from nanochat_gka.core_metric import published
from nanochat_gka.core_metric.bundle import CORE_SIZES, CORE_TASKS, PAPER_TASKS
from nanochat_gka.core_metric.report import (
    Score,
    aggregate,
    centered,
    error_of_mean,
    show,
    standard_error,
    write_csv,
)

BASELINES = dict(zip(CORE_TASKS, (25, 0, 0, 25, 25, 50, 20, 50, 25, 0, 25, 50, 50, 0, 20, 0, 0, 0, 0, 0, 62, 9.1)))


def scores_of(accuracies, most=10**6):
    sizes = {label: min(most, CORE_SIZES[label]) for label in accuracies}
    return [Score(label, accuracy, BASELINES[label], 0, sizes[label]) for label, accuracy in accuracies.items()]


@pytest.mark.parametrize("number", range(4), ids=published.GPT2_MODELS)
def test_published_accuracies_give_the_published_core(number):
    scores = scores_of({label: accuracy[number] for label, accuracy in published.GPT2_ACCURACY.items()})
    name, value = aggregate(scores)
    assert name == "CORE" and value == pytest.approx(published.GPT2_CORE[number], abs=2e-6)  # six printed digits


def test_centring_and_the_papers_means():
    assert centered(0.25, 25) == 0 and centered(1.0, 62) == 1
    assert centered(0.552294, 62) == pytest.approx(-0.178175, abs=2e-6)  # boolq of GPT-2 124M, as published
    for model in range(2):
        mean = sum(row[model] for row in published.PAPER_CENTERED.values()) / 6
        assert mean == pytest.approx(published.PAPER_MEAN[model], abs=6e-5)
    assert set(published.PAPER_CENTERED) == set(PAPER_TASKS) and set(published.GPT2_ACCURACY) == set(CORE_TASKS)
    for label, (smallest, *_) in published.GPT2_ACCURACY.items():  # whole numbers of examples
        assert round(round(smallest * CORE_SIZES[label]) / CORE_SIZES[label], 6) == smallest, label


def test_the_csv_is_nanochats(tmp_path):
    accuracies = {label: accuracy[0] for label, accuracy in published.GPT2_ACCURACY.items()}
    write_csv(tmp_path / "x.csv", scores_of(accuracies))
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[0] == "Task                               , Accuracy  , Centered  "
    assert lines[4] == "arc_easy                           , 0.412458  , 0.216611  "
    assert lines[-1] == "CORE                               ,           , 0.113891  "


NAMES = [
    (CORE_TASKS, 10**6, "CORE"),
    (CORE_TASKS, 10569, "CORE estimate (max 10569 each)"),
    (CORE_TASKS[1:], 10**6, "mean of 21 tasks"),
    (PAPER_TASKS, 300, "mean of 6 tasks (max 300 each)"),
    (("copa",), 500, "mean of 1 task"),
]


@pytest.mark.parametrize("labels, most, name", NAMES)
def test_name_of_the_mean_says_what_is_missing(labels, most, name):
    assert aggregate(scores_of(dict.fromkeys(labels, 0.5), most))[0] == name


def test_standard_errors():
    generator = torch.Generator().manual_seed(0)
    means = centered((torch.rand(20_000, 200, generator=generator) < 0.43).double().mean(dim=1), 25)
    assert standard_error(0.43, 25, 200) == pytest.approx(means.std().item(), rel=0.03)  # 20,000 draws give it to 0.5 %
    assert error_of_mean([0.3, 0.4]) == pytest.approx(0.25)


def test_the_table_has_our_and_the_published_numbers(capsys):
    show(scores_of(dict.fromkeys(CORE_TASKS, 0.5)), "a model")
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    gpt2, paper = ["0.0780", "0.3360"], ["0.2650", "0.007", "0.2267", "0.047"]
    assert rows["hellaswag_zeroshot"][1:] == ["10,042", "0.5000", "0.3333", "0.007", *gpt2, *paper]
    assert rows["CORE"][-2:] == ["0.1139", "0.2565"] and rows["mean"][-4:] == ["0.2418", "0.020", "0.2286", "0.026"]
