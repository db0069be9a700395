"""A model's score on a task: the examples dealt to the processes, asked in batches, counted."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.progress import Progress

from nanochat_gka.core_metric.bundle import Example, Task
from nanochat_gka.core_metric.questions import Question, question
from nanochat_gka.core_metric.report import centered
from nanochat_gka.core_metric.scoring import answer, batches, judge
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.model.gpt import GPT
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime, Stop
from trainkit_gka.files import sha256

RIGHT, CANNOT_BE_ASKED, NOT_FINITE = 1, 2, 3
READ_AHEAD = 1024  # questions whose prompts are held, and sorted by length, at once
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}  # of all prompts of a forward pass, by default


def check_enough(tasks: Sequence[Task], max_per_task: int, flag: str) -> None:
    """Raises UserError if max_per_task examples (-1 = all) are too few for a task's shots and a question."""
    for task in tasks:
        if 0 < max_per_task <= task.shots:
            raise UserError(f"{flag} {max_per_task} is too few for {task.label}: {task.shots} shots and a question")


def task_identity(task: Task) -> dict[str, Any]:
    """What decides a task's questions, apart from sampling and cropping. Raises OSError if its data cannot be read."""
    return {
        "task": task.label,
        "kind": task.kind,
        "shots": task.shots,
        "delimiter": task.delimiter,
        "data": sha256(task.file),
    }


@dataclass(frozen=True)
class TaskScorer:
    """A model, and how it is asked.

    model: a GPT, or anything else with its `hidden` (of a prompt tree), `logits`, `device` and `config.vocab_size`.
    tokenizer: anything with `bos_id` and `encode`. max_seq_len: of longer prompts the last so many tokens are kept.
    batch_tokens and prefix_reuse change the speed alone.
    """

    model: GPT
    tokenizer: Tokenizer
    runtime: Runtime
    max_seq_len: int
    batch_tokens: int
    prefix_reuse: bool = True

    def measure(self, task: Task, examples: list[Example], bar: Progress, stop: Stop | None = None) -> dict[str, Any]:
        """Accuracy, centred score and speed on the examples, which are shuffled and sampled already.

        A collective: every process asks its share. Raises UserError, on every process, for a question that cannot be
        asked and for losses that are not finite; Interrupted if `stop` is set meanwhile.
        """
        self.runtime.barrier()
        started = time.perf_counter()
        progress = bar.add_task(escape(task.label), total=len(self._share(examples)), status="")
        outcome = torch.zeros(len(examples), dtype=torch.float64, device=self.runtime.device)
        try:
            for count in self.runtime.rounds(self._ask(task, examples, outcome), stop):
                bar.advance(progress, count)
        finally:
            bar.remove_task(progress)
        outcome = self.runtime.sum(outcome).cpu()
        if (outcome == NOT_FINITE).any():
            reason = "its weights are damaged, or its training diverged"
            raise UserError(f"{task.label}: the model's losses are not numbers, so it has no score; {reason}")
        unasked = (outcome == CANNOT_BE_ASKED).nonzero()
        if len(unasked):
            self._question(task, examples, int(unasked[0]))  # raises here what it raised on the rank that had it
        seconds, accuracy = time.perf_counter() - started, outcome.mean().item()
        return {
            "accuracy": accuracy,
            "centered": centered(accuracy, task.baseline),
            "baseline": task.baseline,
            "examples": len(examples),
            "seconds": seconds,
            "examples_per_second": len(examples) / seconds,
        }

    def _share(self, examples: list[Example]) -> range:
        """The examples that this rank asks: r, r + ranks, ..."""
        return range(self.runtime.rank, len(examples), self.runtime.world_size)

    def _ask(self, task: Task, examples: list[Example], outcome: torch.Tensor) -> Iterator[int]:
        """Put RIGHT into `outcome` for every example of this rank's share with a right answer, a batch at a time.

        Yields the batches' sizes. What makes the task unusable is put there for its example and ends it.
        """
        share = self._share(examples)
        for first in range(0, len(share), READ_AHEAD):
            indices, questions = share[first : first + READ_AHEAD], []
            for index in indices:
                try:
                    questions.append(self._question(task, examples, index))
                except UserError:
                    outcome[index] = CANNOT_BE_ASKED
                    return
            for batch in batches(questions, self.batch_tokens):
                verdicts = judge(self.model, [questions[place] for place in batch], self.prefix_reuse)
                for place, verdict in zip(batch, verdicts):
                    if not all(math.isfinite(prompt.nats) for prompt in verdict):
                        outcome[indices[place]] = NOT_FINITE
                        return
                    outcome[indices[place]] = RIGHT if answer(questions[place], verdict) == questions[place].gold else 0
                yield len(batch)

    def _question(self, task: Task, examples: list[Example], index: int) -> Question:
        return question(task, examples, index, self.tokenizer, self.max_seq_len)
