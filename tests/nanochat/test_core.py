"""CORE: the fast scorer answers as the naive one; prompts and spans are upstream's; the formula gives the published figures."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import tiny_core
from nanochat_gka.core_metric import published, report, scoring
from nanochat_gka.core_metric.bundle import CORE_SIZES, CORE_TASKS, PAPER_TASKS, Task, read_tasks
from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.core_metric.questions import Question, common_prefix, question, shuffled
from nanochat_gka.core_metric.report import (
    Score,
    aggregate,
    centered,
    error_of_mean,
    paper_score,
    show,
    standard_error,
    write_csv,
)
from nanochat_gka.core_metric.scoring import Verdict, answer, batches, judge
from nanochat_gka.data.tokenizer import Tokenizer
from runs.bench.core_naive import naive_task
from tiny_gpt import SHAPE, VARIANTS, awake
from trainkit.cli import UserError

ALL = 10**6  # tokens: no cropping, no limit on a batch


@pytest.fixture(scope="module")
def tokenizer(packed):
    return Tokenizer.load(packed / "tokenizer")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_core.write_bundle(tmp_path_factory.mktemp("core") / "bundle")


def answers(model, tokenizer, task, max_per_task=-1, max_seq_len=ALL, batch_tokens=600, prefix_reuse=True):
    examples = shuffled(task.examples(), max_per_task)
    asked = [question(task, examples, index, tokenizer, max_seq_len) for index in range(len(examples))]
    found = [None] * len(asked)
    for batch in batches(asked, batch_tokens):
        for place, verdicts in zip(batch, judge(model, [asked[i] for i in batch], prefix_reuse)):
            found[place] = answer(asked[place], verdicts)
    return found, [one == each.gold for one, each in zip(found, asked)]


# The oracle


LIMITS = [dict(), dict(max_seq_len=20), dict(max_per_task=11, max_seq_len=64)]


@pytest.mark.parametrize(
    "variant,limit",
    [
        *((VARIANTS[i], LIMITS[0]) for i in (0, 2, 3, 4, 6, 8)),
        *((VARIANTS[i], limit) for i in (0, 3) for limit in LIMITS[1:]),
    ],
    ids=str,
)
def test_the_answers_are_the_naive_scorers(variant, limit, bundle, tokenizer, monkeypatch):
    """Every type of task, with shots, prompts beyond the context, cropped ones, any batch, shared beginnings computed once or not."""
    monkeypatch.setitem(scoring.LOGITS_AT_ONCE, "cpu", 7 * tokenizer.vocab_size)
    model = awake(dataclasses.replace(SHAPE, sequence_len=64, vocab_size=tokenizer.vocab_size, **variant))
    for task in read_tasks(bundle):
        want = naive_task(model, tokenizer, bundle, task.label, **limit)
        for batch_tokens, prefix_reuse in ((600, True), (ALL, True), (600, False)):
            got = answers(model, tokenizer, task, **limit, batch_tokens=batch_tokens, prefix_reuse=prefix_reuse)
            assert got == (want.predictions, want.correct), (task.label, batch_tokens, prefix_reuse)


def test_a_model_that_knows_the_answer_is_right_and_one_that_knows_less_is_not(bundle, tokenizer):
    """Language modelling is judged token by token: a model made to predict each next token of one text."""
    task = next(task for task in read_tasks(bundle) if task.label == "lambada_openai")
    asked = question(task, task.examples(), 0, tokenizer, ALL)
    [prompt], [start] = asked.prompts, asked.starts

    class Knows(torch.nn.Module):
        """Embeds a token as its position's successor."""

        device = torch.device("cpu")
        config = SHAPE

        def __init__(self, ids):
            super().__init__()
            self.ids = ids

        def hidden(self, ids, tree):
            following = self.ids[tree.positions[0, tree.predictors] + 1]
            return 9 * torch.nn.functional.one_hot(following, tokenizer.vocab_size).float()[None]

        def logits(self, hidden):
            return hidden

    ids = torch.tensor([*prompt, 0])
    assert answer(asked, judge(Knows(ids), [asked])[0]) == 1
    for place in range(start, len(prompt)):
        wrong = ids.clone()
        wrong[place] += 1
        assert answer(asked, judge(Knows(wrong), [asked])[0]) == 0
    outside = ids.clone()
    outside[:start] += 1
    outside[-1] += 1
    assert answer(asked, judge(Knows(outside), [asked])[0]) == 1


@dataclasses.dataclass
class CausalSum:
    """The attention of a layer in which every token is given the sum of all tokens up to itself."""

    is_last: bool

    def attend(self, rotary, queries, stored):
        assert torch.equal(queries, stored[0][:, stored[0].shape[1] - queries.shape[1] :])
        return stored[0].cumsum(dim=1)[:, -queries.shape[1] :]


@given(
    prompts=st.lists(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    share=st.booleans(),
    draw=st.randoms(),
)
def test_the_tree_holds_every_prompt_and_no_beginning_twice(prompts, share, draw):
    """Rows of tokens with the operator replaced by "every token sees all before it": each prompt comes back, each token once."""
    rows = [prompt for group in prompts for prompt in group]
    starts = [draw.randint(1, len(row)) for row in rows]  # the last of these judges nothing
    tree = PromptTree(rows, starts, [len(group) for group in prompts], torch.device("cpu"), share)
    for row, node in zip(rows, tree.nodes):
        assert tree.ids[0, node].tolist() == row
        assert tree.positions[0, node].tolist() == list(range(len(row)))
    beginnings = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    assert tree.ids.shape[1] == (len(beginnings) if share else sum(map(len, rows)))
    common = [common_prefix(group) if len(group) > 1 else 0 for group in prompts]
    assert tree.shared == (min([*common, tree.longest - 1]) if share else 0)
    values = torch.arange(tree.ids.shape[1], dtype=torch.float64)[None, :, None, None] + 1
    joined = [tree.attend(CausalSum(is_last), None, values, (values,))[0, :, 0, 0] for is_last in (False, True)]
    for node in tree.nodes:
        assert joined[0][node].tolist() == (torch.from_numpy(node) + 1).double().cumsum(0).tolist()
    assert joined[1].tolist() == joined[0][tree.predictors].tolist()
    assert tree.predictors.tolist() == [
        place for node, start in zip(tree.nodes, starts) for place in node[start - 1 : -1]
    ]


def test_batches_hold_every_question_once_and_keep_to_their_size(bundle, tokenizer):
    task = next(task for task in read_tasks(bundle) if task.label == "arc_easy")
    examples = shuffled(task.examples())
    asked = [question(task, examples, index, tokenizer, ALL) for index in range(len(examples))]
    for size in (1, 300, 2000, ALL):
        found = list(batches(asked, size))
        assert sorted(place for batch in found for place in batch) == list(range(len(asked)))
        for batch in found:
            padded = sum(len(asked[place].prompts) for place in batch) * max(asked[place].longest for place in batch)
            assert len(batch) == 1 or padded <= size


def test_ties_go_to_the_first_and_an_empty_span_wins_only_as_the_first():
    asked = Question(prompts=[[1], [1], [1]], starts=[1, 1, 1], gold=0, greedy=False)

    def verdicts(*means):
        return [Verdict(0.0, 0, False) if math.isnan(mean) else Verdict(2 * mean, 2, False) for mean in means]

    assert answer(asked, verdicts(2.0, 1.0, 1.0)) == 1
    assert answer(asked, verdicts(2.0, math.nan, 1.0)) == 2
    assert answer(asked, verdicts(math.nan, 1.0, 2.0)) == 0


# Prompts


class Letters:
    """A tokenizer of single characters."""

    bos_id = 0

    def encode(self, text):
        return [ord(letter) for letter in text]


def text(ids):
    return "".join(map(chr, ids[1:]))


def make_task(kind, shots=0, delimiter=" "):
    return Task("task", None, kind, shots, delimiter, 0.0, "core.yaml:1")


def test_prompts_and_spans_of_each_type():
    choices = [{"query": f"q{i}", "choices": ["xa", "xb"], "gold": i % 2} for i in range(3)]
    asked = question(make_task("multiple_choice", 2, "\nAnswer: "), choices, 1, Letters(), ALL)
    assert text(asked.prompts[1]).endswith("\n\nq1\nAnswer: xb")
    assert {text(asked.prompts[0]).split("\n\n")[i] for i in (0, 1)} == {"q0\nAnswer: xa", "q2\nAnswer: xa"}
    assert [text(asked.prompts[0])[start - 1 :] for start in asked.starts] == [
        "a",
        "a",
    ]  # what both begin with, x included, is not judged
    assert asked.gold == 1 and asked.prompts[0][0] == Letters.bos_id

    schema = [{"context_options": ["the cat", "the dogs"], "continuation": "ran.", "gold": 1}] * 2
    asked = question(make_task("schema", 1), schema, 0, Letters(), ALL)
    assert [text(prompt) for prompt in asked.prompts] == [
        "the dogs ran.\n\nthe cat ran.",
        "the dogs ran.\n\nthe dogs ran.",
    ]
    assert [text(prompt)[start - 1 :] for prompt, start in zip(asked.prompts, asked.starts)] == [" ran.", " ran."]

    language = [{"context": "  a b \n", "continuation": "c"}, {"context": "\td ", "continuation": "e "}]
    asked = question(make_task("language_modeling", 1, "\nAnswer: "), language, 0, Letters(), ALL)
    assert [text(prompt) for prompt in asked.prompts] == ["d\nAnswer: e \n\na b\nAnswer: c"]
    assert (
        text(asked.prompts[0])[asked.starts[0] - 1 :] == " c"
    )  # the delimiter's last space goes with the continuation


def test_cropping_keeps_the_end_and_what_of_a_span_has_a_predecessor():
    examples = [{"query": "0123456789", "choices": ["abcdef", "b"], "gold": 0}]
    asked = question(make_task("multiple_choice"), examples, 0, Letters(), 9)
    assert ["".join(map(chr, prompt)) for prompt in asked.prompts] == ["89 abcdef", "3456789 b"]
    assert asked.starts == [3, 8]
    short = question(make_task("multiple_choice"), examples, 0, Letters(), 4)
    assert ["".join(map(chr, prompt)) for prompt in short.prompts] == ["cdef", "89 b"]
    assert short.starts == [1, 3]  # d, e and f are judged: nothing is left that predicts c


def test_a_tokenizer_that_merges_the_continuation_into_its_context_is_an_error():
    class Merges(Letters):
        def encode(self, text):
            return [999] if text.endswith("c") else super().encode(text)

    task = dataclasses.replace(make_task("language_modeling"), file="lambada.jsonl")
    with pytest.raises(
        UserError, match=r"lambada\.jsonl: task cannot be asked with this tokenizer: it merges 'c' into its context"
    ):
        question(task, [{"context": "a b", "continuation": "c"}], 0, Merges(), ALL)


def test_examples_are_shuffled_and_shots_drawn_with_upstreams_seeds():
    assert shuffled([*range(10)]) == [0, 3, 7, 2, 1, 6, 4, 5, 8, 9]
    assert shuffled([*range(10)], 3) == [0, 3, 7]
    examples = [{"context": str(number), "continuation": "x"} for number in range(10)]
    asked = question(make_task("language_modeling", 3), examples, 4, Letters(), ALL)
    assert text(asked.prompts[0]) == "\n\n".join(["0 x", "8 x", "1 x", "4 x"])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5))
def test_common_prefix(sequences):
    length = common_prefix(sequences)
    assert all(sequence[:length] == sequences[0][:length] for sequence in sequences)
    longer = {tuple(sequence[: length + 1]) for sequence in sequences}
    assert len(longer) > 1 or any(len(sequence) == length for sequence in sequences)


# Scores

BASELINES = dict(zip(CORE_TASKS, (25, 0, 0, 25, 25, 50, 20, 50, 25, 0, 25, 50, 50, 0, 20, 0, 0, 0, 0, 0, 62, 9.1)))


def scores_of(accuracies, most=10**6):
    return [
        Score(label, accuracy, BASELINES[label], 0, min(most, CORE_SIZES[label]))
        for label, accuracy in accuracies.items()
    ]


@pytest.mark.parametrize("number", range(4), ids=published.GPT2_MODELS)
def test_published_gpt2_accuracies_give_the_published_core(number):
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


def test_the_csv_is_nanochats(tmp_path):
    write_csv(
        tmp_path / "x.csv", scores_of({label: accuracy[0] for label, accuracy in published.GPT2_ACCURACY.items()})
    )
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[0] == "Task                               , Accuracy  , Centered  "
    assert lines[4] == "arc_easy                           , 0.412458  , 0.216611  "
    assert lines[-1] == "CORE                               ,           , 0.113891  "


@pytest.mark.parametrize(
    "labels,most,name",
    [
        (CORE_TASKS, 10**6, "CORE"),
        (CORE_TASKS, 500, "CORE estimate (max 500 each)"),
        (CORE_TASKS, 10569, "CORE estimate (max 10569 each)"),
        (CORE_TASKS[1:], 10**6, "mean of 21 tasks"),
        (PAPER_TASKS, 300, "mean of 6 tasks (max 300 each)"),
        (("copa",), 500, "mean of 1 task"),
    ],
)
def test_the_last_row_is_core_when_all_examples_of_all_22_tasks_were_asked_and_says_what_is_missing(
    labels, most, name, tmp_path
):
    scores = scores_of(dict.fromkeys(labels, 0.5), most)
    assert aggregate(scores)[0] == name
    write_csv(tmp_path / "x.csv", scores)
    last = (tmp_path / "x.csv").read_text().splitlines()[-1]
    assert [cell.strip() for cell in last.split(",")] == [name, "", f"{aggregate(scores)[1]:.6f}"] and len(last) == len(
        "Task".ljust(35)
    ) + 2 * 12


def test_the_smallest_gpt2_was_scored_on_tasks_of_these_sizes():
    for label, accuracies in published.GPT2_ACCURACY.items():
        assert round(round(accuracies[0] * CORE_SIZES[label]) / CORE_SIZES[label], 6) == accuracies[0], label


def fits(printed, baseline, examples):
    """Is there a number of right answers out of `examples` whose centred score prints so?"""
    right = round((printed * (1 - baseline / 100) + baseline / 100) * examples)
    return any(
        round(centered(count / examples, baseline), 4) == printed
        for count in range(max(0, right - 1), min(examples, right + 1) + 1)
    )


def test_the_papers_gka_column_is_of_200_examples_and_its_base_of_all():
    """What the captions say of the paper's digits; rounding of a printed tie would only make more numbers fit."""

    def all_fit(model, most):
        return all(
            fits(row[model], BASELINES[label], min(most, CORE_SIZES[label]))
            for label, row in published.PAPER_CENTERED.items()
        )

    assert [most for most in range(20, 10043) if all_fit(1, most)] == [published.PAPER_EXAMPLES[1]]
    assert all_fit(0, 10**6) and not all_fit(0, 200)
    for label, row in published.PAPER_CENTERED.items():
        for model in range(2):
            score = paper_score(label, model, BASELINES[label])
            assert round(score.centered, 4) == row[model] and score.examples == min(
                200 if model else 10**6, CORE_SIZES[label]
            )


def test_standard_errors():
    generator = torch.Generator().manual_seed(0)
    means = centered((torch.rand(20_000, 200, generator=generator) < 0.43).double().mean(dim=1), 25)
    assert standard_error(0.43, 25, 200) == pytest.approx(means.std().item(), rel=0.03)  # 20,000 draws give it to 0.5 %
    assert error_of_mean([0.3, 0.4]) == pytest.approx(0.25)
    assert standard_error(84 / 200, 25, 200) == pytest.approx(0.0465, abs=5e-5)  # of the paper's HellaSwag


def test_the_table_says_how_sure_each_column_is_and_of_how_many_examples(capsys, monkeypatch):
    show(scores_of(dict.fromkeys(CORE_TASKS, 0.5)), "a model")
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.lstrip().startswith("hellaswag_zeroshot")).split()
    assert row == [
        "hellaswag_zeroshot",
        "10,042",
        "0.5000",
        "0.3333",
        "0.007",
        "0.0780",
        "0.3360",
        "0.2650",
        "0.007",
        "0.2267",
        "0.047",
    ]
    six = next(line for line in printed.splitlines() if "mean of the paper's six" in line).split()
    assert six[-4:] == ["0.2418", "0.020", "0.2286", "0.026"]
    assert "n=200" in printed and "The paper's GKA: n = 200 (copa 100)" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 124
    narrow = Console(width=80, force_terminal=True, no_color=True)
    monkeypatch.setattr(report, "console", narrow)
    show(scores_of(dict.fromkeys(CORE_TASKS, 0.5)), "a model")
    printed = capsys.readouterr().out
    assert "…" not in printed and "GPT-2" not in printed and "0.2267" in printed and "0.047" in printed
    show(scores_of({"boolq": 0.7}), "a model")
    assert "The paper's GKA: n" not in capsys.readouterr().out
