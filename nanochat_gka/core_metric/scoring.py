"""Many questions at once: sorted by length, what the prompts of a question share computed once, logits only where something is judged.

The answers are those of one example at a time (runs/bench/core_naive.py), up to rounding.
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

LENGTH_STEP = 16  # tokens of padding, at most, that questions which begin alike may cost attention
LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # on a CPU they stay in its cache while they are worked on


def batches(questions: Sequence[Question], batch_tokens: int) -> Iterator[list[int]]:
    """Places of questions that are run together: of like length, and among these those that begin alike; prompts x longest prompt within batch_tokens."""
    batch: list[int] = []
    prompts = longest = 0
    for place in sorted(
        range(len(questions)), key=lambda i: (questions[i].longest // LENGTH_STEP, questions[i].prompts[0])
    ):
        asked = questions[place]
        if batch and (prompts + len(asked.prompts)) * max(longest, asked.longest) > batch_tokens:
            yield batch
            batch, prompts, longest = [], 0, 0
        batch.append(place)
        prompts, longest = prompts + len(asked.prompts), max(longest, asked.longest)
    if batch:
        yield batch


@dataclass(frozen=True)
class Verdict:
    """On the judged span of one prompt: its cross-entropy in nats, its tokens, and whether each of them is the model's first choice.

    greedy is looked into only in batches with a greedy question, and False in others.
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
    prompts = [prompt for asked in questions for prompt in asked.prompts]
    starts = [start for asked in questions for start in asked.starts]
    tree = PromptTree(prompts, starts, [len(asked.prompts) for asked in questions], model.device, share=prefix_reuse)

    sizes = [len(prompt) - start for prompt, start in zip(prompts, starts)]
    targets = torch.tensor(
        [token for prompt, start in zip(prompts, starts) for token in prompt[start:]],
        dtype=torch.long,
        device=model.device,
    )
    rows = torch.repeat_interleave(torch.tensor(sizes)).to(model.device)
    hidden = model.hidden(tree.ids, tree)[0]

    look = any(asked.greedy for asked in questions)
    nats = torch.zeros(len(prompts), dtype=torch.float64, device=model.device)
    hits = torch.zeros(len(prompts), dtype=torch.long, device=model.device)
    rows_at_once = max(1, LOGITS_AT_ONCE[model.device.type] // model.config.vocab_size)
    for part in torch.arange(len(targets), device=model.device).split(rows_at_once):
        logits = model.logits(hidden[part])
        nats.index_add_(0, rows[part], F.cross_entropy(logits, targets[part], reduction="none").double())
        if look:
            hits.index_add_(0, rows[part], (logits.argmax(dim=-1) == targets[part]).long())
    verdicts = iter(
        [Verdict(loss, size, look and hit == size) for loss, size, hit in zip(nats.tolist(), sizes, hits.tolist())]
    )
    return [list(islice(verdicts, len(asked.prompts))) for asked in questions]


def answer(asked: Question, verdicts: list[Verdict]) -> int:
    """The model's answer: the number of a prompt, or, for a greedy question, 1 if the span is right else 0.

    The lowest mean loss wins, by Python's min as upstream: the first of equals, and an empty span's NaN only if it comes first.
    """
    if asked.greedy:
        return int(verdicts[0].greedy)
    means = [verdict.mean for verdict in verdicts]
    return means.index(min(means))
