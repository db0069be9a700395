"""From examples to what the model is asked: few-shot prompts, their tokens, and the span of each that is judged.

Shuffling, shots, prompts, spans and cropping are nanochat's, so that scores compare with its published ones.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from nanochat_gka.core_metric.bundle import CHOICES, LANGUAGE, Example, Task
from nanochat_gka.data.tokenizer import Tokenizer
from trainkit_gka.cli import UserError

SHUFFLE_SEED, SHOT_SEED = 1337, 1234
BETWEEN = "\n\n"


@dataclass
class Question:
    """One example ready for the model: token prompts, and where the judged span of each begins.

    A span reaches to its prompt's end. Multiple choice and schema: the prompt whose span has the lowest mean
    cross-entropy is the answer, right if it is number `gold`. Language modelling (`greedy`): a single prompt, right
    (1 = gold) if every token of the span is the model's first choice.
    """

    prompts: list[list[int]]
    starts: list[int]
    gold: int
    greedy: bool

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))


def shuffled(examples: list[Example], max_per_task: int = -1) -> list[Example]:
    """The examples in the order in which they are asked, at most max_per_task of them (-1 = all)."""
    examples = list(examples)
    random.Random(SHUFFLE_SEED).shuffle(examples)
    return examples[:max_per_task] if max_per_task > 0 else examples


def question(task: Task, examples: list[Example], index: int, tokenizer: Tokenizer, max_seq_len: int) -> Question:
    """Example `index` of the shuffled ones, its shots drawn from the others.

    A prompt of more than max_seq_len tokens keeps its last ones, as upstream does for models with a limit; of a span
    that begins before what is kept, the tokens that still have a predecessor count. Raises UserError where the
    tokenizer merges the continuation into its context.
    """
    prompts, starts = _prompts(task, examples[index], _shots(task, examples, index), tokenizer)
    cuts = [max(0, len(prompt) - max_seq_len) for prompt in prompts]
    prompts = [prompt[cut:] for prompt, cut in zip(prompts, cuts)]
    starts = [max(1, start - cut) for start, cut in zip(starts, cuts)]
    return Question(prompts, starts, examples[index].get("gold", 1), greedy=task.kind == LANGUAGE)


def _shots(task: Task, examples: list[Example], index: int) -> list[Example]:
    rest = [*range(index), *range(index + 1, len(examples))]
    return [examples[i] for i in random.Random(SHOT_SEED + index).sample(rest, task.shots)] if task.shots else []


def _prompts(
    task: Task, example: Example, shots: list[Example], tokenizer: Tokenizer
) -> tuple[list[list[int]], list[int]]:
    def encode(text: str) -> list[int]:
        return [tokenizer.bos_id, *tokenizer.encode(text)]

    before = "".join(_shot(task, shot) + BETWEEN for shot in shots)
    if task.kind == LANGUAGE:
        context = before + example["context"].strip() + task.delimiter
        without, full = encode(context.strip()), encode(context + example["continuation"])
        if len(full) <= len(without) or full[: len(without)] != without:
            merged = f"it merges {example['continuation']!r} into its context"
            raise UserError(f"{task.file}: {task.label} cannot be asked with this tokenizer: {merged}")
        return [full], [len(without)]
    if task.kind == CHOICES:
        prompts = [encode(before + example["query"] + task.delimiter + choice) for choice in example["choices"]]
        return prompts, [common_prefix(prompts)] * len(prompts)
    prompts = [
        encode(before + option + task.delimiter + example["continuation"]) for option in example["context_options"]
    ]
    common = common_prefix([prompt[::-1] for prompt in prompts])
    return prompts, [len(prompt) - common for prompt in prompts]


def _shot(task: Task, shot: Example) -> str:
    if task.kind == LANGUAGE:
        return shot["context"].strip() + task.delimiter + shot["continuation"]
    if task.kind == CHOICES:
        return shot["query"] + task.delimiter + shot["choices"][shot["gold"]]
    return shot["context_options"][shot["gold"]] + task.delimiter + shot["continuation"]


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Number of tokens at the beginning that all sequences share."""
    low, high = min(sequences), max(sequences)  # in lexical order the others lie between
    for position, (a, b) in enumerate(zip(low, high)):
        if a != b:
            return position
    return min(len(low), len(high))
