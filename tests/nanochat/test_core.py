"""CORE: the fast scorer answers as the naive one, ties are upstream's, published figures come out of the formulas."""

import dataclasses
import math

import pytest
import torch

from naive_core import naive_task
from nanochat_gka.core_metric import published, scoring
from nanochat_gka.core_metric.bundle import Question, read_tasks
from nanochat_gka.core_metric.published import CORE_SIZES, CORE_TASKS, GPT2_ACCURACY, PAPER_TASKS
from nanochat_gka.core_metric.report import Score, aggregate, centered, show, write_csv
from nanochat_gka.core_metric.scoring import batches, judge, likeliest
from tiny_gpt import SHAPE, VARIANTS, awake

# Answers

ALL = 10**6  # tokens: no cropping, no limit on a batch
CASES = [(VARIANTS[i], {}) for i in (0, 3, 6, 8, 13)]
CASES += [(VARIANTS[2], dict(max_seq_len=20)), (VARIANTS[4], dict(max_per_task=11, max_seq_len=64))]


@pytest.mark.parametrize("variant,limit", CASES, ids=str)
def test_the_answers_are_the_naive_scorers(variant, limit, bundle, tokenizer, monkeypatch):
    """Every type of task, with shots, long and cropped prompts, one question at a time or any batch."""
    monkeypatch.setitem(scoring.LOGITS_AT_ONCE, "cpu", 7 * tokenizer.vocab_size)
    model = awake(dataclasses.replace(SHAPE, sequence_len=64, vocab_size=tokenizer.vocab_size, **variant))
    for task in read_tasks(bundle):
        wanted, right = naive_task(model, tokenizer, bundle, task.label, **limit)
        examples, longest = task.examples(limit.get("max_per_task", -1)), limit.get("max_seq_len", ALL)
        questions = [task.question(examples, index, tokenizer, longest) for index in range(len(examples))]
        for batch_tokens in (1, 600, ALL):
            predictions = {}
            for batch in batches(questions, batch_tokens):
                predictions |= dict(zip(batch, judge(model, [questions[place] for place in batch])))
            assert [predictions[place] for place in range(len(questions))] == wanted, (task.label, batch_tokens)
            assert [predictions[place] == one.gold for place, one in enumerate(questions)] == right


TIES = [  # mean losses of three prompts, NaN for an empty span; the prompts; the answer
    ((2.0, 1.0, 1.0), (1, 2, 3), 1),
    ((2.0, math.nan, 1.0), (1, 2, 3), 2),
    ((math.nan, 1.0, 2.0), (1, 2, 3), 0),
    ((2.0, 1.0 + 1e-9, 1.0), (2, 1, 1), 1),  # cropped to equal prompts: not 2, by the rounding of equal losses
]


@pytest.mark.parametrize("means, tokens, wanted", TIES)
def test_ties_and_empty_spans_are_upstreams(means, tokens, wanted):
    questions = Question([[token] for token in tokens], starts=[1, 1, 1], gold=0, greedy=False)
    assert likeliest(questions, means) == wanted


# Scores

BASELINES = dict(zip(CORE_TASKS, (25, 0, 0, 25, 25, 50, 20, 50, 25, 0, 25, 50, 50, 0, 20, 0, 0, 0, 0, 0, 62, 9.1)))


def scores_of(accuracies, most=10**6):
    return [Score(label, share, BASELINES[label], min(most, CORE_SIZES[label])) for label, share in accuracies.items()]


@pytest.mark.parametrize("number", range(4), ids=published.GPT2_MODELS)
def test_published_accuracies_give_the_published_core(number, tmp_path):
    scores = scores_of({label: accuracy[number] for label, accuracy in GPT2_ACCURACY.items()})
    name, value, _ = aggregate(scores)
    assert name == "CORE" and value == pytest.approx(published.GPT2_CORE[number], abs=2e-6)  # six printed digits
    write_csv(tmp_path / "x.csv", scores)
    if number == 0:  # the file is nanochat's, and accuracies are whole numbers of examples
        lines = (tmp_path / "x.csv").read_text().splitlines()
        assert lines[0] == "Task                               , Accuracy  , Centered  "
        assert lines[4] == "arc_easy                           , 0.412458  , 0.216611  "
        assert lines[-1] == "CORE                               ,           , 0.113891  "
        assert all(round(round(s.accuracy * s.examples) / s.examples, 6) == s.accuracy for s in scores)


def test_centring_errors_and_the_papers_means():
    assert centered(0.25, 25) == 0 and centered(1.0, 62) == 1
    assert centered(0.552294, 62) == pytest.approx(-0.178175, abs=2e-6)  # boolq of GPT-2 124M, as published
    for model, mean in enumerate(published.PAPER_MEAN):
        assert sum(row[model] for row in published.PAPER_CENTERED.values()) / 6 == pytest.approx(mean, abs=6e-5)
    drawn = (torch.rand(20_000, 200, generator=torch.Generator().manual_seed(0)) < 0.43).double().mean(dim=1)
    one = Score("copa", 0.43, 25, 200)  # 20,000 draws give its error to 0.5 %
    assert one.standard_error == pytest.approx(centered(drawn, 25).std().item(), rel=0.03)
    assert aggregate([one] * 4)[2] == pytest.approx(one.standard_error / 2)


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


def test_the_table_has_our_and_the_published_numbers(capsys):
    show(scores_of(dict.fromkeys(CORE_TASKS, 0.5)), "a model")
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    gpt2, paper = ["0.0780", "0.3360"], ["0.2650", "0.007", "0.2267", "0.047"]
    assert rows["hellaswag_zeroshot"][1:] == ["10,042", "0.5000", "0.3333", "0.007", *gpt2, *paper]
    assert rows["CORE"][-2:] == ["0.1139", "0.2565"] and rows["mean"][-4:] == ["0.2418", "0.020", "0.2286", "0.026"]
