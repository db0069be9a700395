"""CORE: the fast scorer answers as the naive one; prompts and spans are upstream's."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from naive_core import naive_task
from nanochat_gka.core_metric import scoring
from nanochat_gka.core_metric.bundle import read_tasks
from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.core_metric.questions import Question, common_prefix, question, shuffled
from nanochat_gka.core_metric.scoring import Verdict, answer, batches, judge
from tiny_gpt import SHAPE, VARIANTS, awake

ALL = 10**6  # tokens: no cropping, no limit on a batch


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
CASES = [(VARIANTS[i], LIMITS[0]) for i in (0, 3, 6, 8, 13)]
CASES += [(VARIANTS[2], LIMITS[1]), (VARIANTS[4], LIMITS[2])]


@pytest.mark.parametrize("variant,limit", CASES, ids=str)
def test_the_answers_are_the_naive_scorers(variant, limit, bundle, tokenizer, monkeypatch):
    """Every type of task, with shots, long and cropped prompts, any batch, shared beginnings computed once or not."""
    monkeypatch.setitem(scoring.LOGITS_AT_ONCE, "cpu", 7 * tokenizer.vocab_size)
    model = awake(dataclasses.replace(SHAPE, sequence_len=64, vocab_size=tokenizer.vocab_size, **variant))
    for task in read_tasks(bundle):
        # Each prompt alone: prompts that cropping made equal then have equal losses.
        want = naive_task(model, tokenizer, bundle, task.label, **limit, together=False)
        for batch_tokens, prefix_reuse in ((600, True), (ALL, True), (600, False)):
            got = answers(model, tokenizer, task, **limit, batch_tokens=batch_tokens, prefix_reuse=prefix_reuse)
            assert got == (want.predictions, want.correct), (task.label, batch_tokens, prefix_reuse)


@dataclasses.dataclass
class CausalSum:
    """The attention of a layer in which every token is given the sum of all tokens up to itself."""

    is_last: bool

    def attend(self, rotary, queries, stored):
        assert torch.equal(queries, stored[0][:, stored[0].shape[1] - queries.shape[1] :])
        return stored[0].cumsum(dim=1)[:, -queries.shape[1] :]


PROMPT = st.lists(st.integers(0, 3), min_size=1, max_size=7)
PROMPT_GROUPS = st.lists(st.lists(PROMPT, min_size=1, max_size=3), min_size=1, max_size=4)


@given(prompts=PROMPT_GROUPS, share=st.booleans(), draw=st.randoms())
def test_tree_holds_each_beginning_once(prompts, share, draw):
    """With the operator replaced by "every token sees all before it": each prompt comes back, each token once."""
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


def test_ties_and_empty_spans_are_upstreams():
    asked = Question(prompts=[[1], [2], [3]], starts=[1, 1, 1], gold=0, greedy=False)

    def verdicts(*means):
        return [Verdict(0.0, 0, False) if math.isnan(mean) else Verdict(2 * mean, 2, False) for mean in means]

    assert answer(asked, verdicts(2.0, 1.0, 1.0)) == 1
    assert answer(asked, verdicts(2.0, math.nan, 1.0)) == 2
    assert answer(asked, verdicts(math.nan, 1.0, 2.0)) == 0
    cropped_alike = dataclasses.replace(asked, prompts=[[2], [1], [1]])
    assert answer(cropped_alike, verdicts(2.0, 1.0 + 1e-9, 1.0)) == 1  # not 2, by the rounding of equal losses


# Prompts
