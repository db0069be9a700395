"""A CORE bundle small enough for a second: every type of task, shots, delimiters, and the odd cases."""

import json
import random
from pathlib import Path

import tiny

HEADER = "Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline,Centered Metric?,Description"
TASKS = {  # label: (file, type, shots, delimiter or None, baseline)
    "copa": ("reasoning/copa.jsonl", "multiple_choice", 0, None, 50),
    "arc_easy": ("knowledge/arc.jsonl", "multiple_choice", 2, "\\nAnswer: ", 25),
    "winograd": ("language/winograd.jsonl", "schema", 1, None, 50),
    "lambada_openai": ("language/lambada.jsonl", "language_modeling", 0, None, 0),
    "jeopardy": ("knowledge/jeopardy.jsonl", "language_modeling", 3, "\\nAnswer: ", 0),
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
        return {
            "context_options": [f"{stem} {words(1, 2)}" for _ in range(2)],
            "continuation": words(1, 8) + ".",
            "gold": rng.randrange(2),
        }
    return {"context": f" {words(3, 25)} \n", "continuation": words(1, 2)}


def write_bundle(folder: Path, labels=tuple(TASKS)) -> Path:
    rng = random.Random(0)
    folder.mkdir(parents=True)
    lines = ["icl_tasks:"]
    for label in labels:
        file, kind, shots, delimiter, _ = TASKS[label]
        lines += ["-", f"  label: {label}", f"  dataset_uri: {file}"]
        lines += [f"  num_fewshot: [{shots}]", f"  icl_task_type: {kind}"]
        lines += [f'  continuation_delimiter: "{delimiter}"'] if delimiter else []
        path = folder / "eval_data" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(_example(kind, rng, number)) + "\n" for number in range(COUNT)))
    (folder / "core.yaml").write_text("\n".join(lines) + "\n")
    rows = [f'{label},,,,,{task[4]},,"words, and more"' for label, task in TASKS.items()]
    (folder / "eval_meta_data.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return folder


def make_lambada_unusable(folder: Path, examples: list[dict]) -> None:
    """Give lambada_openai these examples, and no delimiter: the tokenizer merges "ker" + "nel" into one token."""
    manifest = (folder / "core.yaml").read_text()
    at = manifest.index("  num_fewshot", manifest.index("lambada_openai"))
    (folder / "core.yaml").write_text(manifest[:at] + '  continuation_delimiter: ""\n' + manifest[at:])
    path = folder / "eval_data" / TASKS["lambada_openai"][0]
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
