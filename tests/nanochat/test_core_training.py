"""CORE while a model trains: it changes nothing, is scored once as eval_core would, and a signal loses one task."""

import json
import os
import re
import shutil
import signal

import pytest

import tiny
import tiny_core
from nanochat_gka import eval_core
from nanochat_gka.core_metric.task_scorer import TaskScorer
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.model.checkpoints import load
from nanochat_gka.train import TrainConfig, main
from processes import signals_kept
from trainkit_gka.cli import run
from trainkit_gka.progress import read_events

MODULE, STEPS = "nanochat_gka.train", 6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return tiny_core.write_bundle(tmp_path_factory.mktemp("core") / "bundle")


@pytest.fixture(autouse=True)
def handlers():
    """The trainer takes these signals over."""
    with signals_kept():
        yield


def flags(packed, out, *more):
    places = ["--data", packed / "packed", "--out", out / "runs", "--results", out / "results.jsonl"]
    settings = ["--attention", "GA", "--num-iterations", STEPS, "--save-every", -1, "--model-tag", "run"]
    return [str(word) for word in (*places, *tiny.TRAIN_FLAGS, *settings, *more)]


def core_flags(bundle, every=2):
    return ["--core-metric-every", every, "--bundle", bundle, "--core-metric-max-per-task", 8]


def events(out, event):
    return read_events(out / "runs/run/log.jsonl", event)


def weights(out):
    folder = out / f"runs/run/checkpoints/step_{STEPS:08d}"
    return [(folder / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]


@pytest.fixture(scope="module")
def scored(packed, bundle, tmp_path_factory):
    """A finished run that was scored every second step."""
    out = tmp_path_factory.mktemp("scored")
    run(main, TrainConfig, flags(packed, out, *core_flags(bundle)))
    return out


def test_scores_when_due_equal_eval_core(scored, bundle, tmp_path, capsys):
    assert [record["step"] for record in events(scored, "core")] == [2, 4, 6]
    assert [record["asked"]["task"] for record in events(scored, "core_task")] == [*tiny_core.TASKS] * 3
    flags = ["--run", scored / "runs/run", "--bundle", bundle, "--out", tmp_path, "--device-type", "cpu"]
    flags += ["--max-per-task", 8]
    run(eval_core.main, eval_core.CoreConfig, list(map(str, flags)))
    lines = [json.loads(line) for line in (tmp_path / f"run_step{STEPS:06d}.jsonl").read_text().splitlines()]
    last = events(scored, "core")[-1]
    assert last["centered"] == {
        line["config"]["task"]: line["metrics"]["centered"] for line in lines if line["kind"] == "core"
    }
    (mean,) = [line["metrics"] for line in lines if line["kind"] == "core_mean"]
    assert (last["name"], last["metric"], last["standard_error"]) == (
        mean["name"],
        mean["centered"],
        mean["standard_error"],
    )
    assert last["name"] == "mean of 5 tasks (max 8 each)"
    result = json.loads((scored / "results.jsonl").read_text())
    assert result["metrics"]["core"] == {key: last[key] for key in ("name", "metric", "standard_error")}


def test_scoring_leaves_training_unchanged(scored, packed, tmp_path):
    run(main, TrainConfig, flags(packed, tmp_path))
    assert weights(tmp_path) == weights(scored)
    assert events(tmp_path, "core") == [] and [r["loss"] for r in events(tmp_path, "train")] == [
        r["loss"] for r in events(scored, "train")
    ]


def test_charts_name_every_task(packed, bundle, tmp_path, monkeypatch):
    """Tasks of one step under one name would be one point, of the last task."""
    charted = []

    class Charts:
        def log(self, values, step):
            charted.append((step, values))

        def finish(self): ...

    monkeypatch.setattr("trainkit_gka.progress._start_wandb", lambda *_: Charts())
    run(main, TrainConfig, flags(packed, tmp_path, *core_flags(bundle, every=STEPS), "--wandb", "offline"))
    names = [(step, name) for step, values in charted for name in values]
    assert len(names) == len(set(names)) and not any("core_task" in name for _, name in names)
    assert {(STEPS, f"core/centered/{task}") for task in tiny_core.TASKS} < set(names)


def test_next_process_scores_what_a_signal_left(scored, packed, bundle, tmp_path, monkeypatch, capsys):
    asked, measure = [], TaskScorer.measure

    def interrupted(self, task, *others):
        asked.append(task.label)
        if len(asked) == 7:  # the second task of the second time
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, task, *others)

    monkeypatch.setattr(TaskScorer, "measure", interrupted)
    command = flags(packed, tmp_path, *core_flags(bundle))
    run(main, TrainConfig, command)
    labels = [*tiny_core.TASKS]
    assert asked == labels + labels[:2] and "stopped at step 4 of 6, saved" in capsys.readouterr().out
    run(main, TrainConfig, command)
    assert asked == labels + labels[:2] + labels[1:] + labels
    assert [r["centered"] for r in events(tmp_path, "core")] == [r["centered"] for r in events(scored, "core")]
    assert weights(tmp_path) == weights(scored)


def test_two_processes_score_alike(scored, packed, bundle, tmp_path):
    """The first two steps of two processes differ from those of one by rounding alone; no answer here is so close."""
    tiny.call(MODULE, *flags(packed, tmp_path, *core_flags(bundle), "--stop-after", 3), ranks=2)
    assert [r["centered"] for r in events(tmp_path, "core")] == [events(scored, "core")[0]["centered"]]


def test_run_goes_on_without_an_unusable_task(packed, bundle, tmp_path, capsys):
    mine = tmp_path / "bundle"
    shutil.copytree(bundle, mine)
    manifest = (mine / "core.yaml").read_text()
    lambada = manifest.index("  num_fewshot", manifest.index("lambada_openai"))
    (mine / "core.yaml").write_text(manifest[:lambada] + '  continuation_delimiter: ""\n' + manifest[lambada:])
    example = {"context": "the ker", "continuation": "nel"}  # one token with what is before it
    (mine / "eval_data/language/lambada.jsonl").write_text((json.dumps(example) + "\n") * 8)
    run(main, TrainConfig, flags(packed, tmp_path, *core_flags(mine, every=STEPS)))
    printed = capsys.readouterr().out
    assert "lambada_openai cannot be asked with this tokenizer" in printed and "finished, validation bpb" in printed
    assert [record["name"] for record in events(tmp_path, "core")] == ["mean of 4 tasks (max 8 each)"]


@pytest.mark.parametrize(
    "damage,message",
    [
        (lambda bundle: (bundle / "core.yaml").unlink(), "no CORE bundle in "),
        (
            lambda bundle: (bundle / "eval_data/reasoning/copa.jsonl").write_text("{oops\n"),
            "copa.jsonl:1: not a JSON record",
        ),
        (lambda bundle: (bundle / "eval_data/language/winograd.jsonl").unlink(), "the file of winograd cannot be read"),
        (lambda bundle: None, "--core-metric-max-per-task 3 is too few for jeopardy: 3 shots and a question"),
    ],
)
def test_bad_bundle_is_refused_before_the_first_step(damage, message, packed, bundle, tmp_path, capsys):
    mine = tmp_path / "bundle"
    shutil.copytree(bundle, mine)
    damage(mine)
    more = [
        "--core-metric-every",
        5,
        "--bundle",
        mine,
        *(["--core-metric-max-per-task", 3] if "too few" in message else []),
    ]
    with pytest.raises(SystemExit) as left:
        run(main, TrainConfig, flags(packed, tmp_path, *more))
    error = capsys.readouterr().err
    assert left.value.code == 2 and message in error and len(error.splitlines()) == 1
    assert events(tmp_path, "eval") == events(tmp_path, "train") == []


def test_printed_lines_have_eta_and_peak_memory(packed, tmp_path, capsys):
    run(main, TrainConfig, flags(packed, tmp_path, "--log-every", 1, "--sample-every", 4))
    printed = capsys.readouterr().out.splitlines()
    steps = [line for line in printed if line.startswith("step 0000") and "loss" in line]
    assert len(steps) == STEPS and all(len(line) <= 140 for line in steps)
    assert re.fullmatch(
        r"step 00001/00006 \| loss \d\.\d{4} \| lr x1\.00 \| peak [\d,]+ MiB RSS", steps[0]
    )  # nothing is timed yet
    assert (
        re.fullmatch(r"step 00005/.* \| [\d,]+ tok/s \| eta \d+:\d\d:\d\d \| peak [\d,]+ MiB RSS", steps[4])
        and "| eta 0:00:00 |" in steps[5]
    )
    for step in (4, 6):  # every four, and at the end
        (record,) = [record for record in events(tmp_path, "sample") if record["step"] == step]
        assert tuple(record["texts"]) == SAMPLE_PROMPTS
    loaded = load(tmp_path / "runs/run")
    texts = Engine(loaded.model, loaded.tokenizer).complete(SAMPLE_PROMPTS, Sampling(max_tokens=16, temperature=0))
    assert [[text] for text in record["texts"].values()] == texts
    assert sum(line.startswith("sample: ") for line in printed) == 2 * len(SAMPLE_PROMPTS)


def test_missing_bundle_is_refused_before_the_first_step(packed, tmp_path, capsys):
    more = ["--core-metric-every", 5, "--bundle-url", "http://127.0.0.1:9/eval_bundle.zip"]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr("nanochat_gka.core_metric.fetch.time.sleep", lambda seconds: None)
        run(main, TrainConfig, flags(packed, tmp_path, *more))
    assert "could not download http://127.0.0.1:9/" in capsys.readouterr().err and events(tmp_path, "train") == []
    assert TrainConfig().core_metric_every == -1
