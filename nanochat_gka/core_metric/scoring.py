"""Many questions at once.

Questions are sorted by length, what their prompts have in common is computed once, and logits only where something is
judged. The answers are those of one example at a time, up to rounding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F

from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.core_metric.questions import Question
from nanochat_gka.model.gpt import GPT

LENGTH_STEP = 16  # questions that differ by less are sorted by their beginnings: at most so many tokens of padding
LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # on a CPU they stay in its cache while they are worked on


def batches(questions: Sequence[Question], batch_tokens: int) -> Iterator[list[int]]:
    """Places of the questions that are run together: those of like length, and among them those that begin alike.

    The number of prompts times the longest prompt stays within batch_tokens, except for a single question.
    """
    batch: list[int] = []
    prompts = longest = 0
    order = sorted(range(len(questions)), key=lambda i: (questions[i].longest // LENGTH_STEP, questions[i].prompts[0]))
    for place in order:
        question = questions[place]
        if batch and (prompts + len(question.prompts)) * max(longest, question.longest) > batch_tokens:
            yield batch
            batch, prompts, longest = [], 0, 0
        batch.append(place)
        prompts, longest = prompts + len(question.prompts), max(longest, question.longest)
    if batch:
        yield batch


@dataclass(frozen=True)
class Verdict:
    """The judged span of one prompt: its cross-entropy in nats, its number of tokens, and whether they are greedy.

    greedy: each token is the model's first choice. Computed only in batches with a greedy question, else False.
    """

    nats: float
    tokens: int
    greedy: bool

    @property
    def mean(self) -> float:
        """Nats per token; NaN for an empty span, as upstream's."""
        return self.nats / self.tokens if self.tokens else math.nan


@torch.inference_mode()
def judge(model: GPT, questions: Sequence[Question], prefix_reuse: bool = True) -> list[list[Verdict]]:
    """A verdict on every prompt of every question of one batch."""
    prompts = [prompt for question in questions for prompt in question.prompts]
    starts = [start for question in questions for start in question.starts]
    spans = [prompt[start:] for prompt, start in zip(prompts, starts)]
    device, sizes = model.device, [len(span) for span in spans]
    tree = PromptTree(prompts, starts, [len(question.prompts) for question in questions], device, share=prefix_reuse)
    targets = torch.tensor([token for span in spans for token in span], dtype=torch.long, device=device)
    rows = torch.repeat_interleave(torch.tensor(sizes)).to(device)
    hidden = model.hidden(tree.ids, tree)[0]

    compute_greedy = any(question.greedy for question in questions)
    nats = torch.zeros(len(prompts), dtype=torch.float64, device=device)
    hits = torch.zeros(len(prompts), dtype=torch.long, device=device)
    rows_at_once = max(1, LOGITS_AT_ONCE[device.type] // model.config.vocab_size)
    for part in torch.arange(len(targets), device=device).split(rows_at_once):
        logits = model.logits(hidden[part])
        nats.index_add_(0, rows[part], F.cross_entropy(logits, targets[part], reduction="none").double())
        if compute_greedy:
            hits.index_add_(0, rows[part], (logits.argmax(dim=-1) == targets[part]).long())
    verdicts = (
        Verdict(loss, size, compute_greedy and hit == size)
        for loss, size, hit in zip(nats.tolist(), sizes, hits.tolist())
    )
    return [list(islice(verdicts, len(question.prompts))) for question in questions]


def answer(question: Question, verdicts: list[Verdict]) -> int:
    """The model's answer: the number of a prompt or, for a greedy question, 1 if the span is right else 0.

    The lowest mean loss wins, by Python's min as upstream: the first of equals, and an empty span's NaN only if it
    comes first.
    """
    if question.greedy:
        return int(verdicts[0].greedy)
    # Cropping can make prompts equal; in a batch their losses differ by rounding, which must not choose.
    prompts = list(zip(question.prompts, question.starts))
    means = [verdicts[prompts.index(prompt)].mean for prompt in prompts]
    return means.index(min(means))
