"""A model's score on a task, many questions at once, dealt to the processes; and on all tasks while it trains.

Questions are sorted by length, what their prompts have in common is computed once, and logits only where something is
judged. The answers are those of one example at a time, up to rounding.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.markup import escape
from rich.progress import Progress

from nanochat_gka.core_metric.bundle import Example, Question, Task, read_tasks
from nanochat_gka.core_metric.prompt_tree import PromptTree
from nanochat_gka.core_metric.report import Score, aggregate, centered, score_of
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.model.gpt import GPT
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime, Stop
from trainkit_gka.progress import RunLog

LENGTH_STEP = 16  # questions that differ by less are sorted by their beginnings: at most so many tokens of padding
LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**27}  # on a CPU they stay in its cache while they are worked on
READ_AHEAD = 1024  # questions whose prompts are held, and sorted by length, at once
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}  # of all prompts of a forward pass, by default
UNUSABLE = -1
TASK_KEYS = ("asked", "accuracy", "baseline", "examples")  # of a line of the log that counts


def batches(questions: Sequence[Question], batch_tokens: int) -> Iterator[list[int]]:
    """Places of the questions that are run together: those of like length, and among them those that begin alike.

    The number of prompts times the longest prompt stays within batch_tokens, except for a single question.
    """

    def order(place: int) -> tuple[int, list[int]]:
        return questions[place].longest // LENGTH_STEP, questions[place].prompts[0]

    batch: list[int] = []
    prompts = longest = 0
    for place in sorted(range(len(questions)), key=order):
        count = len(questions[place].prompts)
        length = questions[place].longest
        if batch and (prompts + count) * max(longest, length) > batch_tokens:
            yield batch
            batch, prompts, longest = [], 0, 0
        batch.append(place)
        prompts, longest = prompts + count, max(longest, length)
    if batch:
        yield batch


@torch.inference_mode()
def judge(model: GPT, questions: Sequence[Question]) -> list[int | None]:
    """The model's answers to one batch: the number of a prompt or, for greedy questions, 1 if the span is right else 0.

    None where losses are not finite.
    """
    prompts = [prompt for question in questions for prompt in question.prompts]
    starts = [start for question in questions for start in question.starts]
    spans = [prompt[start:] for prompt, start in zip(prompts, starts)]
    device, sizes = model.device, [len(span) for span in spans]
    tree = PromptTree(prompts, starts, [len(question.prompts) for question in questions], device)
    targets = torch.tensor([token for span in spans for token in span], dtype=torch.long, device=device)
    rows = torch.repeat_interleave(torch.tensor(sizes)).to(device)
    hidden = model.hidden(tree.ids, tree)[0]

    nats = torch.zeros(len(prompts), dtype=torch.float64, device=device)
    hits = torch.zeros(len(prompts), dtype=torch.long, device=device)
    rows_at_once = max(1, LOGITS_AT_ONCE[device.type] // model.config.vocab_size)
    for part in torch.arange(len(targets), device=device).split(rows_at_once):
        logits = model.logits(hidden[part])
        nats.index_add_(0, rows[part], F.cross_entropy(logits, targets[part], reduction="none").double())
        if questions[0].greedy:  # as are all of a task
            hits.index_add_(0, rows[part], (logits.argmax(dim=-1) == targets[part]).long())
    answers = []
    spans = zip(nats.tolist(), hits.tolist(), sizes)
    for question in questions:
        losses, right, lengths = zip(*islice(spans, len(question.prompts)))
        if not all(map(math.isfinite, losses)):
            answers.append(None)
        elif question.greedy:
            answers.append(int(right == lengths))
        else:
            means = [loss / length if length else math.nan for loss, length in zip(losses, lengths)]
            answers.append(likeliest(question, means))
    return answers


def likeliest(question: Question, means: Sequence[float]) -> int:
    """The number of the prompt with the lowest mean loss, in nats per token; NaN for an empty span.

    By Python's min as upstream: the first of equals, and an empty span's NaN only if it comes first.
    """
    # Cropping can make prompts equal; in a batch their losses differ by rounding, which must not choose.
    prompts = list(zip(question.prompts, question.starts))
    means = [means[prompts.index(prompt)] for prompt in prompts]
    return means.index(min(means))


@dataclass(frozen=True)
class TaskScorer:
    """A model, and how it is asked.

    model: a GPT or what has its hidden, logits, device, config.vocab_size. tokenizer: what has bos_id and encode.
    max_seq_len: of longer prompts the last tokens are kept. batch_tokens: of all prompts of a forward pass.
    """

    model: GPT
    tokenizer: Tokenizer
    runtime: Runtime
    max_seq_len: int
    batch_tokens: int

    def measure(self, task: Task, examples: list[Example], bar: Progress, stop: Stop | None = None) -> dict[str, Any]:
        """Accuracy, centred score and speed on `examples`, of `Task.examples`.

        A collective: rank r asks examples r, r + ranks, ... Raises UserError, on every process, for a question that
        cannot be asked and for losses that are not finite; Interrupted if `stop` is set meanwhile.
        """
        self.runtime.barrier()
        started = time.perf_counter()
        share = range(self.runtime.rank, len(examples), self.runtime.world_size)
        right = torch.zeros(len(examples), dtype=torch.float64, device=self.runtime.device)
        progress = bar.add_task(escape(task.label), total=len(share), status="")
        try:
            for count in self.runtime.rounds(self._ask(task, examples, share, right), stop):
                bar.advance(progress, count)
        finally:
            bar.remove_task(progress)
        right = self.runtime.sum(right).cpu()
        if len(unusable := (right == UNUSABLE).nonzero()):
            # The question raises here what it raised on the rank that had it.
            task.question(examples, int(unusable[0]), self.tokenizer, self.max_seq_len)
            reason = "its weights are damaged, or its training diverged"
            raise UserError(f"{task.label}: the model's losses are not numbers, so it has no score; {reason}")
        seconds = time.perf_counter() - started
        accuracy = right.mean().item()
        score = {"accuracy": accuracy, "centered": centered(accuracy, task.baseline), "baseline": task.baseline}
        return {**score, "examples": len(right), "seconds": seconds, "examples_per_second": len(right) / seconds}

    def _ask(self, task: Task, examples: list[Example], share: range, right: torch.Tensor) -> Iterator[int]:
        """Set `right` to 1 for every example of `share` with a right answer, a batch at a time; yields their sizes.

        An example that cannot be asked or judged is set to UNUSABLE, and is the last.
        """
        for first in range(0, len(share), READ_AHEAD):
            indices, questions = share[first : first + READ_AHEAD], []
            for index in indices:
                try:
                    questions.append(task.question(examples, index, self.tokenizer, self.max_seq_len))
                except UserError:
                    right[index] = UNUSABLE
                    return
            for batch in batches(questions, self.batch_tokens):
                answers = judge(self.model, [questions[place] for place in batch])
                for place, answer in zip(batch, answers):
                    right[indices[place]] = UNUSABLE if answer is None else answer == questions[place].gold
                yield len(batch)
                if None in answers:
                    return


class CoreMetric:
    """All tasks of a bundle, read and checked before step 1, at most max_per_task examples of each (-1 = all).

    Raises UserError for a bundle with anything wrong in it.
    """

    def __init__(self, scorer: TaskScorer, bundle: Path, max_per_task: int):
        self.scorer, self.runtime = scorer, scorer.runtime
        limits = {"max_per_task": max_per_task, "max_seq_len": scorer.max_seq_len}
        self.tasks = [(task, task.examples(max_per_task), task.identity() | limits) for task in read_tasks(bundle)]

    def score(self, log: RunLog, step: int, stop: Stop, bar: Progress) -> None:
        """Score the model and log it as event "core". Raises Interrupted if a signal comes first.

        Tasks that are in the log by then are not scored again.
        """
        started = time.perf_counter()
        for task, examples, identity in self.tasks:
            if self.runtime.any(log.enabled and task.label in self._scores(log, step)):
                continue
            try:
                metrics = self.scorer.measure(task, examples, bar, stop)
            except UserError as error:  # this task has no score; the run goes on
                self.runtime.print(f"warning: {error}; the mean of step {step} leaves it out")
                continue
            log.log("core_task", step, chart=False, asked=identity, **metrics)
        scores = self._scores(log, step)
        seconds = time.perf_counter() - started
        name, value, error = aggregate([*scores.values()]) if scores else ("no task", None, None)
        mean = f"{name} {value:.4f} ± {error:.4f} | {seconds:.0f} s" if scores else "no task of CORE could be scored"
        by_task = {label: score.centered for label, score in scores.items()}
        summary = {"name": name, "metric": value, "standard_error": error, "centered": by_task}
        log.log("core", step, f"step {step:05d} | {mean}", **summary)

    def _scores(self, log: RunLog, step: int) -> dict[str, Score]:
        """Those of this step's tasks that the log has, asked as they are asked now, by label."""
        identities = [identity for *_, identity in self.tasks]
        lines = [line for line in log.records("core_task", *TASK_KEYS) if line["asked"] in identities]
        scores = [score_of(line["asked"]["task"], line) for line in lines if line["step"] == step]
        return {score.label: score for score in scores}
