"""CORE's bundle: its tasks by name, and everything that can be wrong with it, named by file and line."""

import json
import re

import pytest

import tiny_core
from nanochat_gka.core_metric.bundle import find_problem, read_tasks
from trainkit.cli import UserError


def test_tasks_are_chosen_by_label_and_by_set(tmp_path):
    bundle = tiny_core.write_bundle(tmp_path / "bundle")
    assert [task.label for task in read_tasks(bundle)] == list(tiny_core.TASKS)
    assert [task.label for task in read_tasks(bundle, ["jeopardy", "copa"])] == ["copa", "jeopardy"]
    task = read_tasks(bundle, ["arc_easy"])[0]
    assert (task.kind, task.shots, task.delimiter, task.baseline) == ("multiple_choice", 2, "\nAnswer: ", 25.0)
    assert read_tasks(bundle, ["copa"])[0].delimiter == " "
    for wanted, missing in (("paper", "hellaswag_zeroshot"), ("core", "boolq"), ("nonsense", "nonsense")):
        with pytest.raises(UserError, match=rf"--tasks {wanted}: .* has no .*{missing}.*; it has arc_easy, copa"):
            read_tasks(bundle, [wanted])


MC = {"query": "q", "choices": ["a", "b"], "gold": 1}
SCHEMA = {"context_options": ["a", "b"], "continuation": "c", "gold": 0}
LM = {"context": "a", "continuation": "b"}


def without(example, key):
    return {name: value for name, value in example.items() if name != key}


@pytest.mark.parametrize(
    "kind,example,problem",
    [
        ("multiple_choice", MC, None),
        ("multiple_choice", {**MC, "choices": [1, 2.5]}, None),  # jinja writes numbers out too
        ("schema", SCHEMA, None),
        ("language_modeling", LM, None),
        ("language_modeling", {**LM, "context": ""}, None),
        ("multiple_choice", without(MC, "gold"), "gold is missing"),
        ("multiple_choice", {**MC, "gold": 2}, "gold must be an index into choices, 0 to 1, got 2"),
        ("multiple_choice", {**MC, "gold": -1}, "gold must be an index"),
        ("multiple_choice", {**MC, "gold": True}, "gold must be an index"),
        ("multiple_choice", {**MC, "gold": "1"}, "gold must be an index"),
        ("multiple_choice", {**MC, "choices": []}, "choices must not be empty"),
        ("multiple_choice", {**MC, "choices": "ab"}, "choices must be a list of texts"),
        ("multiple_choice", {**MC, "choices": ["a", None]}, "choices must be a list of texts"),
        ("multiple_choice", without(MC, "choices"), "choices is missing"),
        ("multiple_choice", without(MC, "query"), "query is missing"),
        ("multiple_choice", {**MC, "query": ["q"]}, "query must be a text"),
        ("multiple_choice", [MC], "a record must be an object, got list"),
        ("schema", without(SCHEMA, "continuation"), "continuation is missing"),
        ("schema", {**SCHEMA, "context_options": []}, "context_options must not be empty"),
        ("language_modeling", {**LM, "continuation": " "}, "continuation must not be empty"),
        ("language_modeling", without(LM, "context"), "context is missing"),
    ],
    ids=str,
)
def test_what_is_wrong_with_an_example(kind, example, problem):
    found = find_problem(example, kind)
    assert found is None if problem is None else found.startswith(problem)


def spoil(folder, old, new, file="core.yaml"):
    path = folder / file
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    "change,message",
    [
        (
            lambda b: (b / "eval_data/reasoning/copa.jsonl").unlink(),
            r"core.yaml:3: the file of copa cannot be read: .*copa.jsonl \(No such file",
        ),
        (
            lambda b: (b / "eval_data/reasoning/copa.jsonl").open("a").write("\n{oops\n"),
            r"copa.jsonl:17: not a JSON record",
        ),
        (
            lambda b: (b / "eval_data/reasoning/copa.jsonl").open("ab").write(b'{"query": "\xff"}'),
            r"copa.jsonl:16: not a JSON record",
        ),
        (
            lambda b: (b / "eval_data/reasoning/copa.jsonl").open("a").write(json.dumps(without(MC, "gold"))),
            "copa.jsonl:16: gold is missing",
        ),
        (
            lambda b: (b / "eval_data/reasoning/copa.jsonl").open("a").write(json.dumps({**MC, "choices": []})),
            "copa.jsonl:16: choices must not be empty",
        ),
        (lambda b: (b / "eval_data/reasoning/copa.jsonl").write_text(""), "copa.jsonl: copa needs 1 examples or more"),
        (
            lambda b: (b / "eval_data/reasoning/copa.jsonl").write_text("[" * 200_000 + "\n"),
            "copa.jsonl:1: not a JSON record",
        ),
        (lambda b: spoil(b, "[0]", "[-1]"), "core.yaml:3: num_fewshot of copa must not be negative, got -1"),
        (lambda b: spoil(b, "multiple_choice", "[essay]"), r"core.yaml:3: copa has the unknown icl_task_type"),
        (
            lambda b: spoil(b, "multiple_choice", "essay"),
            r"core.yaml:3: copa has the unknown icl_task_type 'essay'; known are multiple_choice",
        ),
        (
            lambda b: spoil(b, "copa,", "opac,", "eval_meta_data.csv"),
            "core.yaml:3: copa has no row with a random baseline in eval_meta_data.csv",
        ),
    ],
)
def test_a_bad_task_is_named_by_file_and_line_when_it_is_read(change, message, tmp_path):
    bundle = tiny_core.write_bundle(tmp_path / "bundle")
    change(bundle)
    tasks = read_tasks(bundle)
    with pytest.raises(UserError, match=message):
        tasks[0].examples()
    assert all(task.examples() for task in tasks[1:])


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda b: (b / "core.yaml").unlink(), r"no CORE bundle in .*core.yaml cannot be read"),
        (lambda b: (b / "eval_meta_data.csv").unlink(), r"eval_meta_data.csv cannot be read"),
        (lambda b: (b / "core.yaml").write_text("icl_tasks:\n  - {label: copa\n"), r"core.yaml:3: not valid YAML"),
        (lambda b: (b / "core.yaml").write_text("tasks: []"), r"core.yaml: needs a list icl_tasks of label"),
        (lambda b: (b / "core.yaml").write_text("icl_tasks: []"), r"core.yaml: lists no tasks"),
        (lambda b: spoil(b, "label: winograd", "label: copa"), r"core.yaml: lists copa more than once"),
        (
            lambda b: spoil(b, "50,,", f'50,,"{"x" * 200_000}",', "eval_meta_data.csv"),
            r"eval_meta_data.csv:\d+: Random baseline must be",
        ),
        (
            lambda b: spoil(b, "[0]", "0"),
            r"core.yaml: needs a list icl_tasks of label, dataset_uri, num_fewshot \(a list\)",
        ),
        (
            lambda b: spoil(b, "reasoning/copa.jsonl", "../../../etc/passwd"),
            r"core.yaml:3: dataset_uri must stay inside the bundle",
        ),
        (
            lambda b: spoil(b, ",50,", ",half,", "eval_meta_data.csv"),
            r"eval_meta_data.csv:2: Random baseline must be a percentage below 100",
        ),
        (
            lambda b: spoil(b, "Random baseline", "Chance", "eval_meta_data.csv"),
            r"eval_meta_data.csv:2: needs the columns",
        ),
        (
            lambda b: spoil(b, "label: copa", "label: !!python/object/apply:os.getcwd []"),
            r"core.yaml:3: not valid YAML",
        ),
    ],
)
def test_a_bundle_that_is_none_is_one_error(change, message, tmp_path):
    bundle = tiny_core.write_bundle(tmp_path / "bundle")
    change(bundle)
    with pytest.raises(UserError) as caught:
        read_tasks(bundle)
    assert re.search(message, str(caught.value)), caught.value
