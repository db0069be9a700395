"""The evaluation bundle: its tasks, their examples, and the questions that are made of them.

A bundle is a folder with core.yaml (the tasks), eval_meta_data.csv (the baselines) and eval_data/ (JSON lines, a file
per task). Errors in a task's data are raised when that task is read, so that the other tasks can be scored. Shuffling,
shots, prompts, spans and cropping are nanochat's, so that scores compare with its published ones.
"""

import csv
import hashlib
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from nanochat_gka.core_metric.published import CORE_TASKS, PAPER_TASKS
from nanochat_gka.data.tokenizer import Tokenizer
from trainkit_gka.cli import UserError

MANIFEST, BASELINES, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
CHOICES, SCHEMA, LANGUAGE = "multiple_choice", "schema", "language_modeling"
OPTIONS = {CHOICES: "choices", SCHEMA: "context_options", LANGUAGE: None}  # the list that `gold` is an index into
TASK_SETS = {"paper": PAPER_TASKS, "core": CORE_TASKS}
SHUFFLE_SEED, SHOT_SEED = 1337, 1234
# Bytes of an example, and of the list of tasks or the table of baselines; those of real bundles are far smaller.
MAX_EXAMPLE, MAX_TABLE = 2**20, 2**18

Example = dict[str, Any]


@dataclass
class Question:
    """One example ready for the model: token prompts, and where the judged span, to the prompt's end, of each begins.

    The prompt whose span has the lowest mean cross-entropy is the answer, right if it is number `gold`. Language
    modelling (`greedy`): a single prompt, right (1 = gold) if every token of the span is the model's first choice.
    """

    prompts: list[list[int]]
    starts: list[int]
    gold: int
    greedy: bool

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts))


@dataclass(frozen=True)
class Task:
    """One task of the bundle. baseline: accuracy of guessing, in percent, from 0 to below 100."""

    label: str
    file: Path
    kind: str
    shots: int
    delimiter: str
    baseline: float | None

    def identity(self) -> dict[str, Any]:
        """What decides its questions, apart from sampling and cropping. Raises UserError if its data cannot be read."""
        about = {"task": self.label, "kind": self.kind, "shots": self.shots, "delimiter": self.delimiter}
        return {**about, "data": hashlib.sha256(self._read()).hexdigest()}

    def examples(self, max_per_task: int = -1) -> list[Example]:
        """The examples in the order in which they are asked, at most max_per_task of them (-1 = all).

        Raises UserError, naming the file, if one cannot be asked or judged, or if there are too few.
        """
        if self.kind not in OPTIONS:
            raise UserError(f"{self.label} has the unknown icl_task_type {self.kind!r}; known are {', '.join(OPTIONS)}")
        if self.baseline is None:
            raise UserError(f"{self.label} has no random baseline from 0 to below 100 in {BASELINES}")
        lines = enumerate(self._read().splitlines(), start=1)
        examples = [self._parse(line, number) for number, line in lines if line.strip()]
        random.Random(SHUFFLE_SEED).shuffle(examples)
        examples = examples[:max_per_task] if max_per_task > 0 else examples
        if len(examples) <= self.shots:
            needed = f"{self.shots + 1} examples or more ({self.shots} shots and a question)"
            limit = f" (max-per-task {max_per_task})" if max_per_task > 0 else ""
            raise UserError(f"{self.file}: {self.label} needs {needed}, got {len(examples)}{limit}")
        return examples

    def question(self, examples: list[Example], index: int, tokenizer: Tokenizer, max_seq_len: int) -> Question:
        """Number `index` of `examples`, its shots drawn from the others.

        A prompt of more than max_seq_len tokens keeps its last ones, as upstream does for models with a limit; of a
        span that begins before what is kept, the tokens that still have a predecessor count. Raises UserError where the
        tokenizer merges the continuation into its context.
        """

        def encode(text: str) -> list[int]:
            return [tokenizer.bos_id, *tokenizer.encode(text)]

        example = examples[index]
        rest = [*examples[:index], *examples[index + 1 :]]
        shots = random.Random(SHOT_SEED + index).sample(rest, self.shots)
        before = "".join(self._text(shot, shot.get("gold")) + "\n\n" for shot in shots)
        if self.kind == LANGUAGE:
            without = encode((before + self._text({**example, "continuation": ""}, None)).strip())
            prompts = [encode(before + self._text(example, None))]
            starts = [len(without)]
            if prompts[0][: len(without)] != without or len(prompts[0]) == len(without):
                merged = f"it merges {example['continuation']!r} into its context"
                raise UserError(f"{self.file}: {self.label} cannot be asked with this tokenizer: {merged}")
        else:
            options = range(len(example[OPTIONS[self.kind]]))
            prompts = [encode(before + self._text(example, option)) for option in options]
            if self.kind == CHOICES:
                starts = [common_prefix(prompts)] * len(prompts)
            else:
                common = common_prefix([prompt[::-1] for prompt in prompts])
                starts = [len(prompt) - common for prompt in prompts]
        cuts = [max(0, len(prompt) - max_seq_len) for prompt in prompts]
        prompts = [prompt[cut:] for prompt, cut in zip(prompts, cuts)]
        starts = [max(1, start - cut) for start, cut in zip(starts, cuts)]
        return Question(prompts, starts, example.get("gold", 1), greedy=self.kind == LANGUAGE)

    def _text(self, example: Example, option: int | None) -> str:
        """An example with the answer number `option`; language modelling has one answer."""
        if self.kind == LANGUAGE:
            return f"{str(example['context']).strip()}{self.delimiter}{example['continuation']}"
        if self.kind == CHOICES:
            return f"{example['query']}{self.delimiter}{example['choices'][option]}"
        return f"{example['context_options'][option]}{self.delimiter}{example['continuation']}"

    def _read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except OSError as error:
            raise UserError(f"the file of {self.label} cannot be read: {self.file} ({error.strerror})") from None

    def _parse(self, line: bytes, number: int) -> Example:
        try:
            if len(line) > MAX_EXAMPLE:
                raise ValueError(f"{len(line):,} bytes, at most {MAX_EXAMPLE:,}")
            example, options = json.loads(line), OPTIONS[self.kind]
            if not options and not str(example["continuation"]).strip():
                raise ValueError("continuation must not be empty")
            if options and not (isinstance(example[options], list) and example["gold"] in range(len(example[options]))):
                raise ValueError(f"gold must be an index into the list {options}, got {example['gold']!r}")
            self._text(example, example.get("gold"))
            return example
        except KeyError as error:
            problem = f"{error.args[0]} is missing"
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"not an example of {self.kind} ({error})"
        raise UserError(f"{self.file}:{number}: {problem}")


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Number of tokens at the beginning that all sequences share."""
    low, high = min(sequences), max(sequences)  # in lexical order the others lie between
    differing = (position for position, (a, b) in enumerate(zip(low, high)) if a != b)
    return next(differing, min(len(low), len(high)))


def read_tasks(bundle: Path, wanted: Sequence[str] = ("all",)) -> list[Task]:
    """The tasks of a bundle folder in its order.

    wanted: labels, "all", "core" (the 22 of CORE) or "paper" (the six of the paper).
    Raises UserError for a folder without readable core.yaml or baselines, and for a task that is not in it.
    """
    manifest, table = bundle / MANIFEST, bundle / BASELINES
    try:
        rows = csv.DictReader(io.StringIO(_read_table(table), newline=""))
        numbers = ((row["Eval Task"], float(row["Random baseline"])) for row in rows)
        baselines = {label: number for label, number in numbers if 0 <= number < 100}
    except (KeyError, TypeError, ValueError, csv.Error):
        raise UserError(f"{table}: needs the columns Eval Task and Random baseline, a number in percent") from None
    try:
        tasks = [_task(entry, bundle, baselines) for entry in yaml.safe_load(_read_table(manifest))["icl_tasks"]]
        if not tasks:
            raise ValueError("no task")
    except (yaml.YAMLError, KeyError, TypeError, ValueError, IndexError, RecursionError):
        form = "a list icl_tasks of label, dataset_uri, num_fewshot (a list of one count) and icl_task_type"
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
    """Whether a path of a bundle names something inside the bundle, on any system."""
    parts = PurePosixPath(path).parts
    return bool(parts) and path[0] != "/" and ".." not in parts and not {*"\\:\0"} & {*path}


def _task(entry: dict[str, Any], bundle: Path, baselines: dict[str, float]) -> Task:
    label, kind, shots = entry["label"], entry["icl_task_type"], entry["num_fewshot"][0]
    file, delimiter = entry["dataset_uri"], entry.get("continuation_delimiter", " ")
    if not all(isinstance(text, str) for text in (label, kind, file, delimiter)) or type(shots) is not int or shots < 0:
        raise TypeError("not text, or not a count")
    if not is_inside(file):
        raise UserError(f"{bundle / MANIFEST}: {label}'s dataset_uri {file} leads out of the bundle")
    return Task(label, bundle / DATA / file, kind, shots, delimiter, baselines.get(label))


def _read_table(path: Path) -> str:
    """The text of a bundle's small file. Raises UserError if it cannot be read or is large, UnicodeDecodeError."""
    try:
        if (size := path.stat().st_size) > MAX_TABLE:
            raise UserError(f"{path} has {size:,} bytes, and that of a bundle at most {MAX_TABLE:,}")
        return path.read_bytes().decode("utf-8")
    except OSError:
        raise UserError(f"no CORE bundle in {path.parent}: {path} cannot be read") from None
