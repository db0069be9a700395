"""The evaluation bundle: which tasks there are, their examples, their random baselines.

A bundle is a folder with core.yaml (the tasks), eval_meta_data.csv (the baselines) and eval_data/ (JSON lines, a file
per task). Errors in a task's data are raised when that task is read, so that the other tasks can be scored.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from trainkit_gka.cli import UserError

MANIFEST, BASELINES, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
CHOICES, SCHEMA, LANGUAGE = "multiple_choice", "schema", "language_modeling"
# For each kind of task, an example's fields of text and the list that its `gold` is an index into.
FIELDS = {
    CHOICES: (("query",), "choices"),
    SCHEMA: (("continuation",), "context_options"),
    LANGUAGE: (("context", "continuation"), None),
}
# The 22 tasks whose mean is CORE, in the order of the published tables, and how many examples each has in the published
# bundle. GPT-2 124M's published accuracies are whole numbers of these.
CORE_SIZES = {
    "hellaswag_zeroshot": 10042,
    "jeopardy": 2117,
    "bigbench_qa_wikidata": 20321,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "copa": 100,
    "commonsense_qa": 1221,
    "piqa": 1838,
    "openbook_qa": 500,
    "lambada_openai": 5153,
    "hellaswag": 10042,
    "winograd": 273,
    "winogrande": 1267,
    "bigbench_dyck_languages": 1000,
    "agi_eval_lsat_ar": 230,
    "bigbench_cs_algorithms": 1320,
    "bigbench_operators": 210,
    "bigbench_repeat_copy_logic": 32,
    "squad": 10570,
    "coqa": 7983,
    "boolq": 3270,
    "bigbench_language_identification": 10000,
}
CORE_TASKS = tuple(CORE_SIZES)
# The six that the paper reports for both of its models (table of the centred CORE subset).
PAPER_TASKS = ("hellaswag_zeroshot", "copa", "openbook_qa", "lambada_openai", "winograd", "winogrande")
TASK_SETS = {"paper": PAPER_TASKS, "core": CORE_TASKS}

# Bytes of an example, and of the list of tasks or the table of baselines; those of real bundles are far smaller.
MAX_EXAMPLE, MAX_TABLE = 2**20, 2**18

Example = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One task of the bundle. baseline: accuracy of guessing, in percent."""

    label: str
    file: Path
    kind: str
    shots: int
    delimiter: str
    baseline: float | None

    def examples(self) -> list[Example]:
        """All examples in file order. Raises UserError, naming the file, if one cannot be asked or judged."""
        if self.kind not in FIELDS:
            kinds = ", ".join(FIELDS)
            raise UserError(f"{self.label} has the unknown icl_task_type {self.kind!r}; known are {kinds}")
        if self.baseline is None:
            raise UserError(f"{self.label} has no row with a random baseline in {BASELINES}")
        try:
            lines = self.file.read_bytes().splitlines()
        except OSError as error:
            raise UserError(f"the file of {self.label} cannot be read: {self.file} ({error.strerror})") from None
        examples = [self._parse(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
        if len(examples) <= self.shots:
            needed = f"{self.shots + 1} examples or more ({self.shots} shots and a question)"
            raise UserError(f"{self.file}: {self.label} needs {needed}, got {len(examples)}")
        return examples

    def _parse(self, line: bytes, number: int) -> Example:
        if len(line) > MAX_EXAMPLE:
            raise UserError(f"{self.file}:{number}: {len(line):,} bytes; an example has at most {MAX_EXAMPLE:,}")
        try:
            return parse_example(json.loads(line), self.kind)
        except json.JSONDecodeError as error:
            problem = f"not a JSON record ({error})"
        except KeyError as error:
            problem = f"{error.args[0]} is missing"
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"not an example of {self.kind} ({error})"
        raise UserError(f"{self.file}:{number}: {problem}")


def parse_example(record: dict[str, Any], kind: str) -> Example:
    """The fields of an example of `kind`. Raises KeyError, TypeError or ValueError if it cannot be asked or judged."""
    texts, options = FIELDS[kind]
    example: Example = {key: str(record[key]) for key in texts}
    if kind == LANGUAGE and not example["continuation"].strip():
        raise ValueError("continuation must not be empty")
    if options:
        if not isinstance(record[options], list) or record["gold"] not in range(len(record[options])):
            raise ValueError(f"gold must be an index into the list {options}, got {record['gold']!r}")
        example |= {options: [str(option) for option in record[options]], "gold": record["gold"]}
    return example


def read_tasks(bundle: Path, wanted: Sequence[str] = ("all",)) -> list[Task]:
    """The tasks of a bundle folder in its order.

    wanted: labels, "all", "core" (the 22 of CORE) or "paper" (the six of the paper).
    Raises UserError for a folder without readable core.yaml or baselines, and for a task that is not in it.
    """
    manifest, baselines = bundle / MANIFEST, read_baselines(bundle / BASELINES)
    try:
        entries = yaml.safe_load(_read_table(manifest))["icl_tasks"]
        tasks = [_task(entry, bundle, baselines) for entry in entries]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, IndexError, RecursionError):
        form = "a list icl_tasks of label, dataset_uri, num_fewshot (a list) and icl_task_type"
        raise UserError(f"{manifest} is not the YAML file of a CORE bundle, {form}") from None
    labels = [task.label for task in tasks]
    chosen: set[str] = set()
    for name in wanted:
        named = labels if name == "all" else TASK_SETS.get(name, (name,))
        if missing := [label for label in named if label not in labels]:
            present = f"it has {', '.join(sorted(labels))} (and there are all, core, paper)"
            raise UserError(f"--tasks {name}: {bundle} has no {', '.join(missing)}; {present}")
        chosen.update(named)
    return [task for task in tasks if task.label in chosen]


def is_inside(path: str) -> bool:
    """Whether a path of a bundle stays in the bundle, on any system."""
    return not (path.startswith("/") or "\\" in path or ":" in path or ".." in PurePosixPath(path).parts)


def _task(entry: dict[str, Any], bundle: Path, baselines: dict[str, float]) -> Task:
    label, kind, shots = entry["label"], entry["icl_task_type"], int(entry["num_fewshot"][0])
    file, delimiter = entry["dataset_uri"], entry.get("continuation_delimiter", " ")
    if not all(isinstance(text, str) for text in (label, kind, file, delimiter)):
        raise TypeError("not text")
    if not is_inside(file):
        raise UserError(f"{bundle / MANIFEST}: {label}'s dataset_uri {file} leads out of the bundle")
    return Task(label, bundle / DATA / file, kind, shots, delimiter, baselines.get(label))


def read_baselines(path: Path) -> dict[str, float]:
    """Accuracy of guessing per task, in percent. Raises UserError if the file is absent or has another form."""
    try:
        rows = csv.DictReader(io.StringIO(_read_table(path), newline=""))
        return {row["Eval Task"]: float(row["Random baseline"]) for row in rows}
    except (KeyError, TypeError, ValueError, csv.Error):
        raise UserError(f"{path}: needs the columns Eval Task and Random baseline, a number in percent") from None


def _read_table(path: Path) -> str:
    """The text of a bundle's small file. Raises UserError if it cannot be read or is large, UnicodeDecodeError."""
    try:
        if (size := path.stat().st_size) > MAX_TABLE:
            raise UserError(f"{path} has {size:,} bytes, and that of a bundle at most {MAX_TABLE:,}")
        return path.read_bytes().decode("utf-8")
    except OSError:
        raise UserError(f"no CORE bundle in {path.parent}: {path} cannot be read") from None
