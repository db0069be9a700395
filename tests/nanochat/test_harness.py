"""lm-evaluation-harness on a model of ours: its command line, on tasks written here, against a plain computation."""

import dataclasses
import functools
import json
import random
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers

import tiny
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.model.checkpoints import export, load
from tiny_gpt import SHAPE, awake, greedy, write_run

transformers.utils.logging.disable_progress_bar()

HEAD = """
task: tiny_NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
"""
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "generate": """
output_type: generate_until
doc_to_text: "{{query}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}}"
metric_list: [{metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def world(packed, tmp_path_factory):
    """A run on disk, its model and tokenizer, and the questions."""
    root = tmp_path_factory.mktemp("harness")
    tokenizer = Tokenizer.load(packed / "tokenizer")
    shape = dict(sequence_len=64, vocab_size=tokenizer.vocab_size, attention="gka", head_offsets="PS")
    model = awake(dataclasses.replace(SHAPE, **shape))
    write_run(root / "run", model, packed / "tokenizer")
    rng = random.Random(3)
    docs = []
    for _ in range(12):
        query, *choices = (" ".join(rng.choices(tiny.WORDS, k=rng.randint(2, 40 if i == 0 else 5))) for i in range(4))
        docs.append({"query": query, "choices": choices, "gold": rng.randrange(3)})
    (root / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (root / "tasks").mkdir()
    for name, text in TASKS.items():
        head = HEAD.replace("NAME", name).replace("DATA", str(root / "data.jsonl"))
        (root / "tasks" / f"tiny_{name}.yaml").write_text(head + text)
    return root, model, tokenizer, docs


def command(run: Path | str, tasks: Path, *flags, kind: str = "gka", key: str = "run") -> None:
    """The harness on the tasks of a folder, without an index of its own, which takes seconds.

    Each task is named as its file. Further model_args may follow `run`.
    """
    from lm_eval.tasks import TaskManager

    from nanochat_gka import harness  # ends the process where the extra is missing

    names = ",".join(path.stem for path in tasks.glob("*.yaml"))
    words = ["--model", kind, "--model_args", f"{key}={run}", "--device", "cpu", "--batch_size", "5"]
    words += ["--tasks", names, "--include_path", str(tasks), *map(str, flags)]
    alone = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    with mock.patch.object(sys, "argv", ["harness", *words]), mock.patch.object(TaskManager, "__init__", alone):
        harness.main()


def nats(model, prompt, start):
    """Cross-entropy of prompt[start:], one prompt at a time."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]))[0, start - 1 : -1]
    targets = torch.tensor(prompt[start:])
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()


@pytest.fixture
def call(world, tmp_path, monkeypatch):
    """The command on the world's tasks, or those given as text by name; returns the samples and the results."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def run(given=world[0] / "run", *flags, tasks=None, data=world[0] / "data.jsonl", **options):
        folder, out = world[0] / "tasks", tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        if tasks:
            folder = out / "tasks"
            folder.mkdir(parents=True)
            for name, text in tasks.items():
                head = HEAD.replace("NAME", name).replace("DATA", str(data))
                (folder / f"tiny_{name}.yaml").write_text(head + text)
        command(given, folder, "--output_path", out, "--log_samples", *flags, **options)
        samples = {name: _samples(out, name) for name in tasks or TASKS}
        return samples, json.loads(next(out.rglob("results_*.json")).read_text())["results"]

    return run


def _samples(folder, name):
    lines = next(folder.rglob(f"samples_tiny_{name}_*.jsonl")).read_text().splitlines()
    return sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"])


def test_harness_scores_equal_a_plain_computation(world, call):
    _, model, tokenizer, docs = world
    samples, results = call()
    assert all(len(found) == len(docs) for found in samples.values())

    limit, total, size = 65, 0.0, 0  # max_length and the token that is only predicted
    for doc, sample in zip(docs, samples["choices"]):
        for choice, response in zip(doc["choices"], sample["filtered_resps"]):
            context = [tokenizer.bos_id, *tokenizer.encode(doc["query"])]
            prompt = [tokenizer.bos_id, *tokenizer.encode(doc["query"] + " " + choice)]
            start = len(context) - max(0, len(prompt) - limit)
            assert float(response[0]) == pytest.approx(-nats(model, prompt[-limit:], start), rel=1e-5)
    for doc, sample in zip(docs, samples["generate"]):
        ids = [tokenizer.bos_id, *tokenizer.encode(doc["query"])][-(64 - 12) :]
        text = tokenizer.decode(greedy(model, ids, 12, tokenizer.bos_id))
        assert sample["resps"][0][0] == text.partition("e")[0]
    for doc in docs:
        ids = [tokenizer.bos_id, *tokenizer.encode(doc["query"])]
        for first in range(1, len(ids), 64):
            last = min(first + 64, len(ids))
            total += nats(model, ids[max(0, last - 65) : last], min(64, last - 1) - (last - first) + 1)
        size += len(doc["query"].encode())
    bits = results["tiny_rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(total / size / 0.6931471805599453, rel=1e-5)


def test_every_form_of_a_model_has_the_same_scores(world, call, tmp_path):
    """A run, its export, what transformers saved of that, and the harness's own `hf` on both."""
    export(load(world[0] / "run"), tmp_path / "exported")
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        kind.from_pretrained(tmp_path / "exported").save_pretrained(tmp_path / "saved")
    choices = {"choices": TASKS["choices"]}
    wanted = [sample["filtered_resps"] for sample in call(tasks=choices)[0]["choices"]]
    for folder in ("exported", "saved"):
        for options in ({}, {"kind": "hf", "key": "pretrained"}):
            [found] = call(tmp_path / folder, tasks=choices, **options)[0].values()
            assert [sample["filtered_resps"] for sample in found] == wanted
    with pytest.raises(SystemExit):
        call(f"{tmp_path / 'saved'},step=7", tasks=choices)


EMPTY = "an answer to question 1 of tiny_choices is empty"  # one once had a likelihood of 1, the best there is
ONE_LINE = {
    "no run": ("", [], "--model_args needs run=FOLDER"),
    "unknown": ("RUN,steps=7", [], "--model_args has steps, which is not known; there are run, step, "),
    "long": ("RUN,max_length=641", [], "max_length must be at most 640, got 641"),
    "remote code": ("RUN", ["--trust_remote_code"], "--trust_remote_code is not for --model gka"),
    "room": ("RUN", ["--gen_kwargs", "max_gen_toks=64"], r"the generation arguments .*\(64\) must be less"),
}
LONG = r"an answer has \d+ tokens and must have 1 to 64 \(max_length\): ' a row a row"
ANSWERS = {"empty": ("the", "", EMPTY), "long": ("the", "a row " * 60, LONG)}


def last_error(capsys, command) -> str:
    """The last line that a command prints, which must leave with 2."""
    with pytest.raises(SystemExit) as left:
        command()
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("given,flags,message", ONE_LINE.values(), ids=ONE_LINE)
def test_what_cannot_be_used_is_one_line(given, flags, message, world, call, capsys):
    run = given.replace("RUN", str(world[0] / "run"))
    last = last_error(capsys, lambda: call(run, *flags, tasks={"generate": TASKS["generate"]}))
    assert re.match(f"error: {message}", last), last


@pytest.mark.parametrize("query,answer,message", ANSWERS.values(), ids=ANSWERS)
def test_answers_that_cannot_be_scored_are_refused(query, answer, message, call, tmp_path, capsys):
    docs = [{"query": "the", "choices": ["row", "token"], "gold": 0}, {"query": query, "choices": [answer], "gold": 0}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = TASKS["choices"] + 'target_delimiter: ""\n' if not answer else TASKS["choices"]
    last = last_error(capsys, lambda: call(tasks={"choices": task}, data=tmp_path / "data.jsonl"))
    assert re.match(f"error: {message}", last), last
