"""CORE's bundle: its tasks by name, its examples, and one clear error for data that cannot be used."""

import pytest

import tiny
import tiny_core
from nanochat_gka.core_metric.bundle import parse_example, read_tasks
from trainkit_gka.cli import UserError


@pytest.fixture
def bundle(tmp_path):
    return tiny_core.write_bundle(tmp_path / "bundle")


def test_tasks_are_chosen_by_label_and_by_set(bundle):
    assert [task.label for task in read_tasks(bundle)] == list(tiny_core.TASKS)
    assert [task.label for task in read_tasks(bundle, ["jeopardy", "copa"])] == ["copa", "jeopardy"]
    task = read_tasks(bundle, ["arc_easy"])[0]
    assert (task.kind, task.shots, task.delimiter, task.baseline) == ("multiple_choice", 2, "\nAnswer: ", 25.0)
    assert read_tasks(bundle, ["copa"])[0].delimiter == " "
    for wanted, missing in (("paper", "hellaswag_zeroshot"), ("core", "boolq"), ("nonsense", "nonsense")):
        with pytest.raises(UserError, match=rf"--tasks {wanted}: .* has no .*{missing}.*; it has arc_easy, copa"):
            read_tasks(bundle, [wanted])


CHOICES = {"query": "q", "choices": ["a", "b"], "gold": 1}
SCHEMA = {"context_options": ["a", "b"], "continuation": "c", "gold": 0}
LANGUAGE = {"context": "a", "continuation": "b"}


@pytest.mark.parametrize(
    "record, kind", [(CHOICES, "multiple_choice"), (SCHEMA, "schema"), (LANGUAGE, "language_modeling")], ids=str
)
def test_an_example_keeps_the_fields_of_its_kind(record, kind):
    assert parse_example({**record, "id": 7}, kind) == record
    for missing in record:
        with pytest.raises(KeyError):
            parse_example({key: value for key, value in record.items() if key != missing}, kind)


@pytest.mark.parametrize(
    "changes", [{"gold": -1}, {"gold": "1"}, {"choices": [], "gold": 0}, {"choices": "ab"}], ids=str
)
def test_unusable_examples_are_refused(changes):
    assert parse_example({**CHOICES, "choices": [1, 2.5]}, "multiple_choice")["choices"] == ["1", "2.5"]
    with pytest.raises((TypeError, ValueError)):
        parse_example({**CHOICES, **changes}, "multiple_choice")
    with pytest.raises(ValueError, match="continuation"):
        parse_example({**LANGUAGE, "continuation": " "}, "language_modeling")


def spoil(bundle, old, new, file="core.yaml"):
    path = bundle / file
    path.write_text(path.read_text().replace(old, new, 1))


def append(bundle, line):
    with (bundle / COPA).open("ab") as file:
        file.write(line)


COPA = "eval_data/reasoning/copa.jsonl"
BAD_TASKS = {
    "no file": (lambda folder: (folder / COPA).unlink(), r"the file of copa cannot be read: .*copa.jsonl"),
    "no JSON": (lambda folder: append(folder, b"\n{oops\n"), r"copa.jsonl:17: not a JSON record"),
    "no gold": (lambda folder: append(folder, b'{"query": "q", "choices": ["a"]}'), "copa.jsonl:16: gold is missing"),
    "too deep": (lambda folder: append(folder, b"[" * 200_000), "copa.jsonl:16: not an example"),
    "long": (lambda folder: append(folder, b'"%s"' % (b"a" * 2**20)), "copa.jsonl:16: 1,048,578 bytes; an example"),
    "unknown type": (lambda folder: spoil(folder, "multiple_choice", "essay"), "the unknown icl_task_type 'essay'"),
    "no baseline": (lambda folder: spoil(folder, "copa,", "x,", "eval_meta_data.csv"), "copa has no row with a random"),
}


@pytest.mark.parametrize("damage,message", BAD_TASKS.values(), ids=BAD_TASKS)
def test_a_bad_task_leaves_the_others_readable(damage, message, bundle):
    damage(bundle)
    tasks = read_tasks(bundle)
    with tiny.one_line_error(message):
        tasks[0].examples()
    assert all(task.examples() for task in tasks[1:])


FORM = "is not the YAML file of a CORE bundle"
NO_BUNDLES = {
    "no tasks": (lambda folder: (folder / "core.yaml").unlink(), r"no CORE bundle in .*core.yaml cannot be read"),
    "no YAML": (lambda folder: (folder / "core.yaml").write_text("icl_tasks:\n  - {label: copa\n"), FORM),
    "code": (lambda folder: spoil(folder, "label: copa", "label: !!python/object/apply:os.getcwd []"), FORM),
    "leaves": (lambda folder: spoil(folder, "reasoning/", "../../"), r"copa's dataset_uri .*copa.jsonl leads out of"),
    "aliases": (lambda folder: spoil(folder, "label: copa", "label: &a copa\n  more: *a"), FORM),  # may be of any size
    "deep": (lambda folder: (folder / "core.yaml").write_text("[" * 1000), FORM),
    "no column": (lambda folder: spoil(folder, "Random", "Chance", "eval_meta_data.csv"), "needs the columns"),
}


@pytest.mark.parametrize("damage,message", NO_BUNDLES.values(), ids=NO_BUNDLES)
def test_other_folders_are_one_error(damage, message, bundle):
    damage(bundle)
    with tiny.one_line_error(message):
        read_tasks(bundle)
