"""A CORE bundle small enough for a second: every type of task, shots, delimiters, and the odd cases."""

import json
import random
from pathlib import Path

import yaml

import tiny

HEADER = "Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline,Centered Metric?,Description"
TASKS = {  # label: (file, type, shots, delimiter or None, baseline)
    "copa": ("reasoning/copa.jsonl", "multiple_choice", 0, None, 50),
    "arc_easy": ("knowledge/arc.jsonl", "multiple_choice", 2, "\nAnswer: ", 25),
    "winograd": ("language/winograd.jsonl", "schema", 1, None, 50),
    "lambada_openai": ("language/lambada.jsonl", "language_modeling", 0, None, 0),
    "jeopardy": ("knowledge/jeopardy.jsonl", "language_modeling", 3, "\nAnswer: ", 0),
}
COUNT = 15


def _example(kind: str, rng: random.Random, number: int) -> dict:
    def words(low, high):
        return " ".join(rng.choices(tiny.WORDS, k=rng.randint(low, high)))

    if kind == "multiple_choice":
        count, choices = rng.choice([2, 4, 5]), []
        while len(choices) < count:  # two that are alike would tie, and rounding would choose
            choices += [choice for choice in [words(1, 6)] if choice not in choices]
        if number % 7 == 0:
            choices[1] = choices[0] + " " + choices[1]  # the first is all of the second's beginning
            choices = choices[:2]
        return {"query": words(2, 18), "choices": choices, "gold": rng.randrange(len(choices))}
    if kind == "schema":
        stem = words(2, 14)
        options = [f"{stem} {words(1, 2)}" for _ in range(2)]
        return {"context_options": options, "continuation": words(1, 8) + ".", "gold": rng.randrange(2)}
    return {"context": f" {words(3, 25)} \n", "continuation": words(1, 2)}


def write_bundle(folder: Path, labels=tuple(TASKS)) -> Path:
    rng, entries = random.Random(0), []
    for label in labels:
        file, kind, shots, delimiter, _ = TASKS[label]
        entries.append({"label": label, "dataset_uri": file, "num_fewshot": [shots], "icl_task_type": kind})
        entries[-1] |= {"continuation_delimiter": delimiter} if delimiter else {}
        write_examples(folder, label, [_example(kind, rng, number) for number in range(COUNT)])
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    rows = [f'{label},,,,,{task[4]},,"words, and more"' for label, task in TASKS.items()]
    (folder / "eval_meta_data.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return folder


def write_examples(folder: Path, label: str, examples: list[dict], mode: str = "w") -> None:
    """Write a task's examples, or append them (mode "a")."""
    path = folder / "eval_data" / TASKS[label][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        file.writelines(json.dumps(example) + "\n" for example in examples)
