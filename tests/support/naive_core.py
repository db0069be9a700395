"""The slow, obviously correct CORE scorer: one prompt at a time, full logits of every position, no cache.

It is the oracle that the fast scorer is tested against; it shares no code with that.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml


def naive_task(
    model: Callable[[torch.Tensor], torch.Tensor],
    tokenizer,
    bundle: Path,
    label: str,
    max_per_task: int = -1,
    max_seq_len: int = 10**9,
) -> tuple[list[int], list[bool]]:
    """Score one task of the bundle. `model` maps (B, T) ids to (B, T, V) logits.

    Returns each example's answer and whether it is right, in the shuffled and capped order.
    """
    tasks = yaml.safe_load((bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
    [task] = [entry for entry in tasks if entry["label"] == label]
    kind, delimiter, shots = task["icl_task_type"], task.get("continuation_delimiter", " "), task["num_fewshot"][0]
    lines = (bundle / "eval_data" / task["dataset_uri"]).read_text(encoding="utf-8").split("\n")
    examples = [json.loads(line) for line in lines if line.strip()]
    random.Random(1337).shuffle(examples)
    examples = examples[:max_per_task] if max_per_task > 0 else examples

    predictions, correct = [], []
    for index, example in enumerate(examples):
        rest = [i for i in range(len(examples)) if i != index]
        fewshot = [examples[i] for i in random.Random(1234 + index).sample(rest, shots)] if shots > 0 else []
        prompts, starts = tokenize(tokenizer, kind, example, fewshot, delimiter)
        cuts = [max(0, len(prompt) - max_seq_len) for prompt in prompts]
        prompts = [prompt[cut:] for prompt, cut in zip(prompts, cuts)]
        starts = [max(1, start - cut) for start, cut in zip(starts, cuts)]  # token 0 has no predictor
        predictions.append(predict(model, kind, prompts, starts))
        correct.append(predictions[-1] == (1 if kind == "language_modeling" else example["gold"]))
    return predictions, correct


def render(kind: str, example: dict, delimiter: str, option: int | None) -> str:
    """An example as text, with the answer number `option` where there are several."""
    if kind == "multiple_choice":
        return example["query"] + delimiter + example["choices"][option]
    if kind == "schema":
        return example["context_options"][option] + delimiter + example["continuation"]
    return example["context"].strip() + delimiter + example["continuation"]


def tokenize(tokenizer, kind: str, example: dict, fewshot: list[dict], delimiter: str) -> tuple[list, list[int]]:
    """The prompts to run as token lists, and where the scored span of each begins; a span ends with its prompt."""
    before = "".join(render(kind, shot, delimiter, shot.get("gold")) + "\n\n" for shot in fewshot)
    count = len(example.get("choices", example.get("context_options", [None])))
    texts = [before + render(kind, example, delimiter, option) for option in range(count)]
    prompts = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts]
    if kind == "multiple_choice":
        return prompts, [common_length(prompts)] * count
    if kind == "schema":
        common = common_length([prompt[::-1] for prompt in prompts])
        return prompts, [len(prompt) - common for prompt in prompts]
    context = before + example["context"].strip() + delimiter
    without = [tokenizer.bos_id, *tokenizer.encode(context.strip())]
    assert prompts[0][: len(without)] == without
    return prompts, [len(without)]


def common_length(sequences: list[list[int]]) -> int:
    """Number of leading tokens that all sequences share."""
    length, shortest = 0, min(map(len, sequences))
    while length < shortest and len({sequence[length] for sequence in sequences}) == 1:
        length += 1
    return length


@torch.inference_mode()
def predict(model, kind: str, prompts: list[list[int]], starts: list[int]) -> int:
    """The answer: the prompt whose span has the lowest mean cross-entropy.

    For language modelling it is 1 if the span is what greedy decoding chooses, else 0.
    """
    losses = []
    for prompt, start in zip(prompts, starts):
        predictors = model(torch.tensor([prompt]))[0, start - 1 : -1].float()  # token j is predicted at position j - 1
        targets = torch.tensor(prompt[start:], dtype=torch.int64)
        if kind == "language_modeling":
            return int((predictors.argmax(dim=-1) == targets).all().item())
        losses.append(F.cross_entropy(predictors, targets).item())  # NaN for an empty span
    return losses.index(min(losses))
