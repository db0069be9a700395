"""CORE: the command's files, continuing, bad tasks, ranks; while a model trains; and of Hugging Face's models."""

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

import gpt_runs
import tiny
import tiny_core
from naive_core import naive_task
from nanochat_gka import train
from nanochat_gka.core_metric import scoring
from nanochat_gka.core_metric.scoring import TaskScorer
from nanochat_gka.eval_core import CoreConfig, main
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.model.checkpoints import load
from tiny import events, final, metrics
from tiny_core import COUNT
from tiny_gpt import awake, write_run
from tiny_pack import rewrite_json
from trainkit_gka.cli import PassingFault
from trainkit_gka.progress import read_lines

NAME = "tiny-gka_step000007"


def flags(folder, bundle, out, *more, model="--run"):
    return [model, folder, "--bundle", bundle, "--out", out, "--device-type", "cpu", *more]


def evaluate(*arguments, **options):
    """The command in this process; returns its exit code."""
    return tiny.exit_code(main, CoreConfig, *flags(*arguments, **options))


def tasks_of(out, kind="core"):
    """The lines of the results file that are of one task, or of the mean."""
    return [line for line in read_lines(out / f"{NAME}.jsonl") if line.get("kind") == kind]


def test_scores_are_the_naive_scorers_and_a_stopped_command_continues(long_context, tokenizer, bundle, tmp_path):
    """It is stopped in its third task, whose batches were partly done."""
    (folder, model), counts, judge = long_context, [], scoring.judge

    def stopping(*arguments):
        counts.append(len(tasks_of(tmp_path)))
        if counts.count(2) == 2:
            raise KeyboardInterrupt
        return judge(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "READ_AHEAD", 4)
        patched.setattr(scoring, "judge", stopping)
        assert evaluate(folder, bundle, tmp_path) == 130
    first_two = tasks_of(tmp_path)
    assert len(first_two) == 2
    assert evaluate(folder, bundle, tmp_path) == 0
    lines = tasks_of(tmp_path)
    assert lines[:2] == first_two and [line["config"]["task"] for line in lines] == list(tiny_core.TASKS)
    assert all(line["metrics"]["examples"] == COUNT for line in lines)
    for line in lines:
        _, right = naive_task(model, tokenizer, bundle, line["config"]["task"])
        assert line["metrics"]["accuracy"] == pytest.approx(sum(right) / COUNT)
    [mean] = tasks_of(tmp_path, "core_mean")
    assert mean["metrics"]["name"] == f"mean of 5 tasks (max {COUNT} each)"  # five tasks are not CORE
    assert mean["metrics"]["centered"] == pytest.approx(sum(line["metrics"]["centered"] for line in lines) / 5)
    assert evaluate(folder, bundle, tmp_path) == 0
    assert len(tasks_of(tmp_path)) == 5 and len(tasks_of(tmp_path, "core_mean")) == 1  # nothing is new


def test_only_tasks_that_are_asked_differently_are_scored_again(long_context, packed, bundle, tmp_path):
    """A line of the file is used again only if the weights, the data, and how it was asked are the same."""
    (folder, model), out = long_context, tmp_path / "out"
    mine = shutil.copytree(bundle, tmp_path / "bundle")

    def scored(*more, run=folder):
        """The tasks that the command scores, and their examples."""
        before = len(tasks_of(out))
        assert evaluate(run, mine, out, *more) == 0
        return [(line["config"]["task"], line["metrics"]["examples"]) for line in tasks_of(out)[before:]]

    assert scored("--tasks", "copa", "winograd") == [("copa", COUNT), ("winograd", COUNT)]
    assert scored() == [(label, COUNT) for label in ("arc_easy", "lambada_openai", "jeopardy")]
    assert scored("--max-per-task", 6) == [(label, 6) for label in tiny_core.TASKS]  # other questions
    assert scored("--batch-tokens", 77) == []  # it changes nothing
    tiny_core.write_examples(mine, "copa", [{"query": "the", "choices": ["a", "of"], "gold": 0}], mode="a")
    assert scored() == [("copa", COUNT + 1)]
    about = mine / "core.yaml"
    about.write_text(about.read_text().replace("- 3\n", "- 2\n").replace("label: winograd", "label: x"))
    (mine / "eval_meta_data.csv").open("a").write("x,,,,,50,,\n")
    assert scored() == [("x", COUNT), ("jeopardy", COUNT)]
    other = write_run(tmp_path / "tiny-gka", awake(model.config, seed=1), packed / "tokenizer")
    assert scored("--tasks", "copa", run=other) == [("copa", COUNT + 1)]


def test_a_model_with_nan_weights_has_no_score(long_context, packed, bundle, tmp_path, capsys):
    broken = awake(long_context[1].config)
    with torch.no_grad():
        broken.transformer.h[-1].mlp.c_proj.weight.fill_(float("nan"))
    folder = write_run(tmp_path / "tiny-gka", broken, packed / "tokenizer")
    assert evaluate(folder, bundle, tmp_path, "--tasks", "copa") == 2
    assert "copa: the model's losses are not numbers" in capsys.readouterr().err and tasks_of(tmp_path) == []


def test_two_ranks_have_the_scores_of_one_and_any_names_an_unusable_question(long_context, bundle, tmp_path):
    """A continuation that the tokenizer merges into its context, in the second rank's share; other tasks go on."""
    mine = shutil.copytree(bundle, tmp_path / "bundle")
    about = (mine / "core.yaml").read_text()
    empty = "continuation_delimiter: ''\n  dataset_uri: language/lambada.jsonl"
    (mine / "core.yaml").write_text(about.replace("dataset_uri: language/lambada.jsonl", empty))
    examples, order = [{"context": "the", "continuation": " kernel"}] * COUNT, [*range(COUNT)]
    random.Random(1337).shuffle(order)
    examples[order[5]] = {"context": "the ker", "continuation": "nel"}
    tiny_core.write_examples(mine, "lambada_openai", examples)
    done = tiny.call("nanochat_gka.eval_core", *flags(long_context[0], mine, tmp_path / "two"), ranks=2, check=False)
    assert done.returncode != 0
    message = "lambada_openai cannot be asked with this tokenizer: it merges 'nel' into its context"
    assert f"lambada.jsonl: {message}" in done.stderr
    assert evaluate(long_context[0], mine, tmp_path / "one") == 2
    two, one = (
        {line["config"]["task"]: line["metrics"]["accuracy"] for line in tasks_of(tmp_path / name)}
        for name in ("two", "one")
    )
    assert two == one and {*tiny_core.TASKS} - {*two} == {"lambada_openai"}


MISTAKES = [
    (["--max-per-task", "3"], "jeopardy needs 4 examples or more .*max-per-task 3"),
    (["--hf-path", "gpt2", "--step", "3"], "--step is for a run of ours"),
    (["--step", "99"], "no checkpoint in .* at step 99"),
    (["--bundle", "/nonexistent.zip"], "/nonexistent.zip: No such file"),
]


@pytest.mark.parametrize("more, message", MISTAKES)
def test_bad_flags_are_one_line(long_context, bundle, tmp_path, more, message, capsys):
    assert evaluate(long_context[0], bundle, tmp_path, *more) == 2
    assert re.search(message, capsys.readouterr().err)


# While a model trains

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
    assert evaluate(scored / "run", bundle, tmp_path, "--max-per-task", 8) == 0
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
@pytest.mark.parametrize("packing", ["dry", "dry zip", ""])
def test_bad_bundle_is_refused_before_the_first_step(packed, bundle, tmp_path, line, most, message, packing):
    mine = shutil.copytree(bundle, tmp_path / "bundle")
    with open(mine / "eval_data/reasoning/copa.jsonl", "a") as file:
        file.write(line)
    if "zip" in packing:
        mine = shutil.make_archive(tmp_path / "mine", "zip", mine)
    dry = ["--dry-run"] * ("dry" in packing)
    assert message in gpt_runs.refused(packed, tmp_path / "out", *with_core(mine, most), *dry)
    assert events(tmp_path / "out", "eval") == events(tmp_path / "out", "train") == []
    assert (tmp_path / "out").exists() == (not dry)


# Hugging Face's models

LIMIT = 48  # tokens, fewer than tiny_core's longest prompts have


def write_model(folder: Path, embeddings: int = 305) -> torch.nn.Module:
    """A small Llama with a byte-level BPE as GPT-2's, trained on tiny_core's words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(tiny.WORDS)], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    torch.manual_seed(0)
    shape = dict(max_position_embeddings=LIMIT, hidden_size=32, intermediate_size=48)
    shape |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.AutoConfig.for_model("llama", vocab_size=embeddings, initializer_range=0.3, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model.eval()


def test_scores_equal_the_naive_scorer_at_any_length(bundle, tmp_path):
    """With a tokenizer as upstream uses it: the library's, and a special token in front."""
    folder, out = tmp_path / "tiny-model", tmp_path / "out"
    model = write_model(folder)
    assert evaluate(folder, bundle, out, "--batch-tokens", 200, model="--hf-path") == 0
    records = [line for line in read_lines(out / "tiny-model.jsonl") if line["kind"] == "core"]
    scores = {line["config"]["task"]: line["metrics"]["accuracy"] for line in records}
    tokenizer, lengths = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), []
    plain = SimpleNamespace(bos_id=0, encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids)

    def logits(ids):
        lengths.append(ids.shape[1])
        return model(ids).logits

    for label in tiny_core.TASKS:
        _, right = naive_task(logits, plain, bundle, label, max_seq_len=LIMIT)
        assert scores[label] == sum(right) / len(right), label
    assert max(lengths) == LIMIT and len(set(scores.values())) > 2


NO_MODEL = "no causal language model that can be loaded from safetensors"
BAD_MODELS = {"nothing": NO_MODEL, "pickled": NO_MODEL, "code": NO_MODEL, "few": "the model has 100 embeddings"}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_models_that_cannot_be_loaded_are_one_line(kind, bundle, tmp_path, capsys):
    """No code that comes with a model is executed, and nothing is unpickled."""
    folder = tmp_path / "model"
    model = None if kind == "nothing" else write_model(folder, 100 if kind == "few" else 305)
    if kind == "pickled":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    if kind == "code":
        classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
        rewrite_json(folder / "config.json", model_type="mine", auto_map=classes)
        (folder / "mine.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")
    assert evaluate(folder, bundle, tmp_path / "out", model="--hf-path") == 2
    error = capsys.readouterr().err
    assert BAD_MODELS[kind] in error and len(error.splitlines()) == 1 and not (folder / "executed").exists()


def test_a_hub_that_does_not_answer_may_answer_the_next_time(bundle, tmp_path):
    """Here its client is told that there is no network."""
    flags_of_hub = flags("some/model", bundle, tmp_path, model="--hf-path")
    assert "--hf-path some/model: " in tiny.refused(main, CoreConfig, *flags_of_hub, code=PassingFault.code)
