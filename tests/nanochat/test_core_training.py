"""CORE while a model trains: it changes nothing, is scored once as eval_core would, and a signal loses one task."""

import json
import os
import shutil
import signal

import pytest

import gpt_runs
import tiny_core
from gpt_runs import events, final, metrics
from nanochat_gka import eval_core, train
from nanochat_gka.core_metric.scoring import TaskScorer
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.model.checkpoints import load
from trainkit_gka.cli import run

STEPS = 6
SHORT = ["--num-iterations", STEPS, "--save-every", -1]
LABELS = [*tiny_core.TASKS]


def with_core(bundle, most=8):
    return [*SHORT, "--core-metric-every", 2, "--bundle", bundle, "--core-metric-max-per-task", most, "--tensorboard"]


@pytest.fixture(scope="module")
def scored(packed, bundle, tmp_path_factory):
    """A run that was scored every second step; a signal came in the second task of the second time."""
    out, measured, measure = tmp_path_factory.mktemp("scored"), [], TaskScorer.measure

    def interrupted(self, task, *arguments):
        measured.append(task.label)
        if len(measured) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, task, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TaskScorer, "measure", interrupted)
        assert gpt_runs.train(packed, out, *with_core(bundle)) == 0
        assert measured == LABELS + LABELS[:2] and [line["step"] for line in events(out, "core")] == [2]
        assert gpt_runs.train(packed, out, *with_core(bundle)) == 0
    assert measured == LABELS + LABELS[:2] + LABELS[1:] + LABELS
    return out


def test_scores_when_due_equal_eval_core(scored, bundle, tmp_path):
    assert [record["step"] for record in events(scored, "core")] == [2, 4, 6]
    assert [record["asked"]["task"] for record in events(scored, "core_task")] == LABELS * 3
    words = ["--run", scored / "run", "--bundle", bundle, "--out", tmp_path, "--device-type", "cpu"]
    run(eval_core.main, eval_core.CoreConfig, [*map(str, words), "--max-per-task", "8"])
    lines = [json.loads(line) for line in (tmp_path / f"run_step{STEPS:06d}.jsonl").read_text().splitlines()]
    centered = {line["config"]["task"]: line["metrics"]["centered"] for line in lines if line["kind"] == "core"}
    [mean] = [line["metrics"] for line in lines if line["kind"] == "core_mean"]
    last = events(scored, "core")[-1]
    assert last["centered"] == centered and last["name"] == "mean of 5 tasks (max 8 each)"
    summary = {"name": mean["name"], "metric": mean["centered"], "standard_error": mean["standard_error"]}
    assert summary == {key: last[key] for key in summary} == metrics(scored)["core"]


def test_scoring_and_samples_leave_training_unchanged(scored, packed, tmp_path, monkeypatch):
    """A prompt that the context has no room for is left out."""
    monkeypatch.setattr(train, "SAMPLE_PROMPTS", ("no room " * 1000, *SAMPLE_PROMPTS))
    assert gpt_runs.train(packed, tmp_path, *SHORT, "--sample-every", 4) == 0
    assert final(tmp_path, STEPS) == final(scored, STEPS) and events(tmp_path, "core") == []
    losses = [[record["loss"] for record in events(out, "train")] for out in (tmp_path, scored)]
    assert losses[0] == losses[1]
    first, last = events(tmp_path, "sample")  # every four, and at the end
    loaded = load(tmp_path / "run")
    texts = Engine(loaded.model, loaded.tokenizer).complete(SAMPLE_PROMPTS, Sampling(max_tokens=16, temperature=0))
    assert (first["step"], last["step"]) == (4, 6)
    assert last["texts"] == {prompt: text for prompt, [text] in zip(SAMPLE_PROMPTS, texts)}


@pytest.mark.parametrize("line, most, message", [("{oops\n", 8, "copa.jsonl:16: "), ("", 3, "max-per-task 3")])
def test_bad_bundle_is_refused_before_the_first_step(packed, bundle, tmp_path, capsys, line, most, message):
    mine = shutil.copytree(bundle, tmp_path / "bundle")
    with open(mine / "eval_data/reasoning/copa.jsonl", "a") as file:
        file.write(line)
    assert gpt_runs.train(packed, tmp_path, *with_core(mine, most)) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert events(tmp_path, "eval") == events(tmp_path, "train") == []
