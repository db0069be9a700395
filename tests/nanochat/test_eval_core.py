"""The CORE command: files, continuing, bad tasks beside good ones, ranks."""

import dataclasses
import json
import random
import re
import shutil

import pytest
import torch

import tiny
import tiny_core
from naive_core import naive_task
from nanochat_gka import eval_core
from nanochat_gka.core_metric import task_scorer
from nanochat_gka.core_metric.bundle import read_tasks
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.eval_core import CoreConfig, main
from tiny_gpt import SHAPE, awake, write_run
from trainkit_gka.distributed import Runtime
from trainkit_gka.progress import read_lines

MODULE = "nanochat_gka.eval_core"


@pytest.fixture(scope="module")
def world(packed, bundle, tmp_path_factory):
    """A run, its model, its tokenizer, and a bundle."""
    root = tmp_path_factory.mktemp("eval_core")
    tokenizer = Tokenizer.load(packed / "tokenizer")
    model = awake(dataclasses.replace(SHAPE, sequence_len=64, vocab_size=tokenizer.vocab_size, attention="gka"))
    write_run(root / "tiny-gka", model, packed / "tokenizer")
    return root / "tiny-gka", model, tokenizer, bundle


def evaluate(world, out, *more, bundle=None):
    """The command in this process; returns its exit code."""
    flags = ["--run", world[0], "--bundle", bundle or world[3], "--out", out, "--device-type", "cpu", *more]
    return tiny.exit_code(main, CoreConfig, *flags)


MEAN = f"mean of 5 tasks (max {tiny_core.COUNT} each)"


def tasks_of(path):
    """The lines of a results file that are of one task."""
    return [line for line in read_lines(path) if line.get("kind") == "core"]


def table(path):
    return {row.split(",")[0].strip(): row.split(",")[1].strip() for row in path.read_text().splitlines()}


def test_scores_are_the_naive_scorers(world, tmp_path, monkeypatch):
    monkeypatch.setattr(task_scorer, "READ_AHEAD", 4)
    assert evaluate(world, tmp_path) == 0
    _, model, tokenizer, bundle = world
    found = table(tmp_path / "tiny-gka_step000007.csv")
    for label in tiny_core.TASKS:
        assert found[label] == f"{naive_task(model, tokenizer, bundle, label).accuracy:.6f}"
    lines = tasks_of(tmp_path / "tiny-gka_step000007.jsonl")
    assert [line["config"]["task"] for line in lines] == list(tiny_core.TASKS)
    assert all(line["metrics"]["examples"] == tiny_core.COUNT for line in lines)
    records = read_lines(tmp_path / "tiny-gka_step000007.jsonl")
    (mean,) = [line for line in records if line.get("kind") == "core_mean"]
    assert mean["metrics"]["name"] == MEAN and MEAN in found  # five tasks are not CORE
    assert f"{mean['metrics']['centered']:.6f}" in (tmp_path / "tiny-gka_step000007.csv").read_text()
    assert evaluate(world, tmp_path) == 0
    kinds = [line.get("kind") for line in read_lines(tmp_path / "tiny-gka_step000007.jsonl")]
    assert kinds.count("core") == 5 and kinds.count("core_mean") == 1  # nothing is new


def test_only_changed_tasks_are_scored_again(world, tmp_path):
    bundle, out = shutil.copytree(world[3], tmp_path / "bundle"), tmp_path / "out"
    log = out / "tiny-gka_step000007.jsonl"

    def scored(*more):
        """The tasks that the command scores, and their examples."""
        before = len(tasks_of(log)) if log.exists() else 0
        assert evaluate(world, out, *more, bundle=bundle) == 0
        return [(line["config"]["task"], line["metrics"]["examples"]) for line in tasks_of(log)[before:]]

    count = tiny_core.COUNT
    assert scored("--tasks", "copa", "winograd") == [("copa", count), ("winograd", count)]
    assert scored() == [(label, count) for label in ("arc_easy", "lambada_openai", "jeopardy")]
    assert scored("--max-per-task", 6) == [(label, 6) for label in tiny_core.TASKS]  # other questions
    assert scored("--tasks", "copa") == []
    assert set(table(log.with_suffix(".csv"))) == {*tiny_core.TASKS, "Task", MEAN}  # nothing is forgotten
    assert {*tiny_core.TASKS} < set(table(out / "tiny-gka_step000007_max6.csv"))
    with open(bundle / "eval_data/reasoning/copa.jsonl", "a") as file:
        file.write(json.dumps({"query": "the", "choices": ["a", "of"], "gold": 0}) + "\n")
    assert scored() == [("copa", count + 1)]


def test_score_identity_covers_all_settings(world, tmp_path):
    """A line of the file is used again only if the weights, the data, and how it was asked are the same."""
    device = torch.device("cpu")
    runtime, evaluated = Runtime(0, 1, device), eval_core.open_model(CoreConfig(run=world[0]), device)
    task = read_tasks(world[3], ["jeopardy"])[0]

    def identity(task=task, evaluated=evaluated, **flags):
        config = CoreConfig(out=tmp_path, **flags)
        return json.dumps(eval_core.open_file(config, runtime, evaluated).identity(task))

    (tmp_path / "other.jsonl").write_text("{}")
    changes = dict(kind="schema", shots=2, delimiter=" ", label="x", file=tmp_path / "other.jsonl")
    changed = {identity(dataclasses.replace(task, **{key: value})) for key, value in changes.items()}
    changed |= {identity(max_seq_len=20), identity(max_per_task=5)}
    changed |= {identity(evaluated=dataclasses.replace(evaluated, sha256="0"))}
    assert len(changed) == len(changes) + 3 and identity() not in changed
    assert identity() == identity(batch_tokens=7, prefix_reuse=False, max_seq_len=10**9)  # these change nothing


def test_a_model_with_nan_weights_has_no_score(world, packed, tmp_path, capsys):
    model = awake(world[1].config)
    with torch.no_grad():
        model.transformer.h[-1].mlp.c_proj.weight.fill_(float("nan"))
    broken = write_run(tmp_path / "broken", model, packed / "tokenizer")
    assert evaluate((broken, *world[1:]), tmp_path / "out", "--tasks", "copa") == 2
    assert "copa: the model's losses are not numbers" in capsys.readouterr().err
    assert tasks_of(tmp_path / "out" / "broken_step000007.jsonl") == []


def test_any_rank_names_an_unusable_question(world, tmp_path):
    """A continuation that the tokenizer merges into its context, in the second rank's share.

    Both ranks must go on, and score the other tasks.
    """
    bundle = shutil.copytree(world[3], tmp_path / "bundle")
    good = [{"context": "the", "continuation": " kernel"}] * tiny_core.COUNT
    order = [*range(tiny_core.COUNT)]
    random.Random(1337).shuffle(order)
    good[order[5]] = {"context": "the ker", "continuation": "nel"}
    tiny_core.make_lambada_unusable(bundle, good)
    flags = ["--run", world[0], "--bundle", bundle, "--out", tmp_path / "out", "--device-type", "cpu"]
    done = tiny.call(MODULE, *flags, ranks=2, check=False)
    assert done.returncode != 0
    message = "lambada_openai cannot be asked with this tokenizer: it merges 'nel' into its context"
    assert f"lambada.jsonl: {message}" in done.stderr
    evaluate(world, tmp_path / "one")
    two, one = (table(tmp_path / name / "tiny-gka_step000007.csv") for name in ("out", "one"))
    others = set(tiny_core.TASKS) - {"lambada_openai"}
    assert {label: one[label] for label in others} == {label: two[label] for label in tiny_core.TASKS if label in two}


@pytest.mark.parametrize(
    "more,message",
    [
        (["--max-per-task", "3"], "--max-per-task 3 is too few for jeopardy: 3 shots and a question"),
        (["--hf-path", "gpt2", "--step", "3"], "--step is for a run of ours; a model of --hf-path has no steps"),
        (["--step", "99"], "no checkpoint in .* at step 99"),
        (["--bundle", "/nonexistent.zip"], "/nonexistent.zip: No such file"),
    ],
)
def test_bad_flags_are_one_line(world, tmp_path, more, message, capsys):
    assert evaluate(world, tmp_path, *more) == 2
    assert re.search(message, capsys.readouterr().err)
