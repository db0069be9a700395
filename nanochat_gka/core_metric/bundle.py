"""The evaluation bundle: which tasks there are, their examples, their random baselines.

A bundle is a folder with core.yaml (the tasks), eval_meta_data.csv (the baselines) and eval_data/ (a JSON-lines file per task). What is wrong with one
task's data is a UserError naming file and line when that task is read, so that the others can still be scored.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainkit.cli import UserError

MANIFEST, BASELINES, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
CHOICES, SCHEMA, LANGUAGE = "multiple_choice", "schema", "language_modeling"
# Texts, and the list that `gold` points into, of an example.
FIELDS = {
    CHOICES: (("query",), "choices"),
    SCHEMA: (("continuation",), "context_options"),
    LANGUAGE: (("context", "continuation"), None),
}
# The 22 tasks whose mean is CORE, in the order of the published tables.
CORE_TASKS = (
    "hellaswag_zeroshot", "jeopardy", "bigbench_qa_wikidata", "arc_easy", "arc_challenge", "copa", "commonsense_qa", "piqa", "openbook_qa",
    "lambada_openai", "hellaswag", "winograd", "winogrande", "bigbench_dyck_languages", "agi_eval_lsat_ar", "bigbench_cs_algorithms",
    "bigbench_operators", "bigbench_repeat_copy_logic", "squad", "coqa", "boolq", "bigbench_language_identification",
)  # fmt: skip
# How many examples each has in the published bundle; GPT-2 124M's published accuracies are whole numbers of these.
CORE_SIZES = dict(zip(CORE_TASKS, (10042, 2117, 20321, 2376, 1172, 100, 1221, 1838, 500, 5153, 10042, 273, 1267, 1000, 230, 1320, 210, 32, 10570, 7983,
                                   3270, 10000)))  # fmt: skip
# The six that the paper reports for both of its models (table of the centred CORE subset).
PAPER_TASKS = ("hellaswag_zeroshot", "copa", "openbook_qa", "lambada_openai", "winograd", "winogrande")
TASK_SETS = {"paper": PAPER_TASKS, "core": CORE_TASKS}

Example = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One task of the bundle. baseline: accuracy of guessing, in percent. `where` is its place in the manifest, for messages."""

    label: str
    file: Path
    kind: str
    shots: int
    delimiter: str
    baseline: float | None
    where: str

    def examples(self) -> list[Example]:
        """All examples in file order. Raises UserError naming file and line for anything that cannot be asked or judged."""
        if self.kind not in FIELDS:
            raise UserError(
                f"{self.where}: {self.label} has the unknown icl_task_type {self.kind!r}; known are {', '.join(FIELDS)}"
            )
        if self.baseline is None:
            raise UserError(f"{self.where}: {self.label} has no row with a random baseline in {BASELINES}")
        if self.shots < 0:
            raise UserError(f"{self.where}: num_fewshot of {self.label} must not be negative, got {self.shots}")
        try:
            lines = self.file.read_bytes().splitlines()
        except OSError as error:
            raise UserError(
                f"{self.where}: the file of {self.label} cannot be read: {self.file} ({error.strerror})"
            ) from None
        examples = [self._parse(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
        if len(examples) <= self.shots:
            raise UserError(
                f"{self.file}: {self.label} needs {self.shots + 1} examples or more ({self.shots} shots and a question), got {len(examples)}"
            )
        return examples

    def _parse(self, line: bytes, number: int) -> Example:
        try:
            example = json.loads(line)
        except (ValueError, RecursionError) as error:  # malformed JSON or not UTF-8; nested beyond reason
            raise UserError(f"{self.file}:{number}: not a JSON record ({error})") from None
        if problem := find_problem(example, self.kind):
            raise UserError(f"{self.file}:{number}: {problem}")
        texts, options = FIELDS[self.kind]
        as_text = {key: str(example[key]) for key in texts}
        return (
            as_text
            if options is None
            else {**as_text, options: [str(option) for option in example[options]], "gold": example["gold"]}
        )


def find_problem(example: Any, kind: str) -> str | None:
    """Why an example of `kind` cannot be asked or judged, or None."""
    if not isinstance(example, dict):
        return f"a record must be an object, got {type(example).__name__}"
    texts, options = FIELDS[kind]
    for key in texts:
        if not _is_text(example.get(key)):
            return f"{key} must be a text" if key in example else f"{key} is missing"
    if kind == LANGUAGE:
        return None if str(example["continuation"]).strip() else "continuation must not be empty"
    if not isinstance(example.get(options), list) or not all(map(_is_text, example[options])):
        return f"{options} must be a list of texts" if options in example else f"{options} is missing"
    if not example[options]:
        return f"{options} must not be empty"
    gold = example.get("gold")
    if gold is None:
        return "gold is missing"
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(example[options]):
        return f"gold must be an index into {options}, 0 to {len(example[options]) - 1}, got {gold!r}"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def read_tasks(bundle: Path, wanted: Sequence[str] = ("all",)) -> list[Task]:
    """The tasks of a bundle folder in its order. wanted: labels, "all", "core" (the 22 of CORE) or "paper" (the six of the paper).

    Raises UserError for a folder without readable manifest or baselines and for a task that is not in it.
    """
    manifest, baselines = bundle / MANIFEST, read_baselines(bundle / BASELINES)
    try:
        entries = yaml.load(manifest.read_text(encoding="utf-8"), _LineLoader)["icl_tasks"]
        tasks = [_task(entry, bundle, manifest, baselines) for entry in entries]
    except OSError:
        raise UserError(f"no CORE bundle in {bundle}: {manifest} cannot be read") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise UserError(f"{manifest}{f':{mark.line + 1}' if mark else ''}: not valid YAML") from None
    except (KeyError, TypeError, ValueError, IndexError, UnicodeDecodeError):
        raise UserError(
            f"{manifest}: needs a list icl_tasks of label, dataset_uri, num_fewshot (a list) and icl_task_type"
        ) from None
    labels = {task.label for task in tasks}
    if not tasks or len(labels) < len(tasks):
        twice = sorted(label for label in labels if sum(task.label == label for task in tasks) > 1)
        raise UserError(f"{manifest}: {f'lists {twice[0]} more than once' if twice else 'lists no tasks'}")
    for name in wanted:
        if missing := [label for label in TASK_SETS.get(name, () if name == "all" else (name,)) if label not in labels]:
            raise UserError(
                f"--tasks {name}: {bundle} has no {', '.join(missing)}; it has {', '.join(sorted(labels))} (and there are all, core, paper)"
            )
    chosen = {label for name in wanted for label in (labels if name == "all" else TASK_SETS.get(name, (name,)))}
    return [task for task in tasks if task.label in chosen]


def _task(entry: dict, bundle: Path, manifest: Path, baselines: dict[str, float]) -> Task:
    where = f"{manifest}:{entry[_LineLoader.KEY]}"
    file = bundle / DATA / str(entry["dataset_uri"])
    if not file.resolve().is_relative_to(bundle.resolve()):
        raise UserError(f"{where}: dataset_uri must stay inside the bundle, got {entry['dataset_uri']!r}")
    shots, delimiter = int(entry["num_fewshot"][0]), str(entry.get("continuation_delimiter", " "))
    return Task(
        str(entry["label"]),
        file,
        str(entry["icl_task_type"]),
        shots,
        delimiter,
        baselines.get(str(entry["label"])),
        where,
    )


class _LineLoader(yaml.SafeLoader):
    """Notes in every mapping the line it begins at."""

    KEY = "line of the file"

    def construct_mapping(self, node, deep=False):
        return {**super().construct_mapping(node, deep), self.KEY: node.start_mark.line + 1}


def read_baselines(path: Path) -> dict[str, float]:
    """Accuracy of guessing per task, in percent. Raises UserError naming file and line."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            baselines = {}
            for row in reader:
                baselines[row["Eval Task"]] = float(row["Random baseline"])
                if not 0 <= baselines[row["Eval Task"]] < 100:
                    raise ValueError
            return baselines
    except OSError:
        raise UserError(f"no CORE bundle in {path.parent}: {path} cannot be read") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    except (KeyError, TypeError):  # no such column; a row that ends before it
        raise UserError(f"{path}:{reader.line_num}: needs the columns Eval Task and Random baseline") from None
    except (ValueError, csv.Error):
        raise UserError(f"{path}:{reader.line_num}: Random baseline must be a percentage below 100") from None
