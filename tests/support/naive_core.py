"""The slow, obviously correct CORE scorer: one example at a time, full logits of every position, no cache.

It is the oracle that the fast scorer is tested against; it shares no code with that.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml

PART_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class NaiveResult:
    """One entry per example, in the shuffled and capped order."""

    predictions: list[int]
    correct: list[bool]

    @property
    def accuracy(self) -> float:
        return sum(self.correct) / len(self.correct)


def naive_task(
    model: Callable[[torch.Tensor], torch.Tensor],
    tokenizer,
    bundle: Path,
    label: str,
    max_per_task: int = -1,
    max_seq_len: int | None = None,
    together: bool = True,
) -> NaiveResult:
    """Score one task of the bundle. `model` maps (B, T) ids to (B, T, V) logits.

    together: an example's prompts are one padded batch, as in nanochat; otherwise each is a batch of its own.
    """
    manifest = yaml.safe_load((bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
    task = {entry["label"]: entry for entry in manifest}[label]
    kind = task["icl_task_type"]
    delimiter = task.get("continuation_delimiter", " ")
    shots = task["num_fewshot"][0]

    with open(bundle / "eval_data" / task["dataset_uri"], encoding="utf-8") as file:
        examples = [json.loads(line) for line in file if line.strip()]
    random.Random(1337).shuffle(examples)
    if max_per_task > 0:
        examples = examples[:max_per_task]

    predictions, correct = [], []
    for idx, example in enumerate(examples):
        fewshot = []
        if shots > 0:
            rest = [i for i in range(len(examples)) if i != idx]
            fewshot = [examples[i] for i in random.Random(1234 + idx).sample(rest, shots)]
        prompts, starts = tokenize_example(tokenizer, kind, example, fewshot, delimiter)
        if max_seq_len is not None:
            cuts = [max(0, len(prompt) - max_seq_len) for prompt in prompts]
            prompts = [prompt[cut:] for prompt, cut in zip(prompts, cuts)]
            starts = [start - cut for start, cut in zip(starts, cuts)]
        starts = [max(1, start) for start in starts]  # token 0 has no predictor

        prediction = score_example(model, kind, prompts, starts, tokenizer.bos_id, together)
        predictions.append(prediction)
        correct.append(prediction == (1 if kind == "language_modeling" else example["gold"]))
    return NaiveResult(predictions, correct)


def render(kind: str, example: dict, fewshot: list[dict], delimiter: str) -> list[str]:
    """The example's prompts as text: one per choice or context option, or (without, with) the continuation."""
    if kind == "multiple_choice":
        parts = [shot["query"] + delimiter + shot["choices"][shot["gold"]] for shot in fewshot]
        return [PART_SEPARATOR.join([*parts, example["query"] + delimiter + choice]) for choice in example["choices"]]
    if kind == "schema":
        parts = [shot["context_options"][shot["gold"]] + delimiter + shot["continuation"] for shot in fewshot]
        return [
            PART_SEPARATOR.join([*parts, option + delimiter + example["continuation"]])
            for option in example["context_options"]
        ]
    if kind == "language_modeling":
        parts = [shot["context"].strip() + delimiter + shot["continuation"] for shot in fewshot]
        without = PART_SEPARATOR.join([*parts, example["context"].strip() + delimiter])
        return [without.strip(), without + example["continuation"]]
    raise ValueError(f"unknown task type {kind!r}")


def tokenize_example(
    tokenizer, kind: str, example: dict, fewshot: list[dict], delimiter: str
) -> tuple[list[list[int]], list[int]]:
    """The prompts to run as token lists, and where the scored span of each begins; a span ends with its prompt."""
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in render(kind, example, fewshot, delimiter)]
    if kind == "multiple_choice":
        common = common_length(prompts)
        return prompts, [common] * len(prompts)
    if kind == "schema":
        common = common_length([prompt[::-1] for prompt in prompts])
        return prompts, [len(prompt) - common for prompt in prompts]
    without, full = prompts
    if full[: len(without)] != without:
        raise ValueError("the tokens of the prompt without its continuation are not a prefix of those with it")
    return [full], [len(without)]


def common_length(sequences: list[list[int]]) -> int:
    """Number of leading tokens that all sequences share."""
    length = 0
    while (
        all(len(sequence) > length for sequence in sequences) and len({sequence[length] for sequence in sequences}) == 1
    ):
        length += 1
    return length


@torch.inference_mode()
def score_example(
    model, kind: str, prompts: list[list[int]], starts: list[int], bos_id: int, together: bool = True
) -> int:
    """The answer: the prompt whose span has the lowest mean cross-entropy.

    For language modelling it is 1 if the span is what greedy decoding chooses, else 0.
    """
    longest = max(len(prompt) for prompt in prompts)
    padded = [prompt + [bos_id] * (longest - len(prompt)) for prompt in prompts]
    device = getattr(model, "device", "cpu")
    batches = [padded] if together else [[prompt] for prompt in prompts]
    logits = [row for batch in batches for row in model(torch.tensor(batch, dtype=torch.int64, device=device)).float()]

    losses = []
    for row, (prompt, start) in enumerate(zip(prompts, starts)):
        end = len(prompt)
        predictors = logits[row][start - 1 : end - 1]  # token j is predicted at position j - 1
        targets = torch.tensor(prompt[start:], dtype=torch.int64, device=device)
        if kind == "language_modeling":
            return int((predictors.argmax(dim=-1) == targets).all().item())
        losses.append(F.cross_entropy(predictors, targets, reduction="none").mean().item())  # NaN for an empty span
    return losses.index(min(losses))
