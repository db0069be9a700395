"""lm-evaluation-harness on a model of ours: its command line, on tasks written here, against a plain computation."""

import dataclasses
import importlib
import json
import random
import sys

import pytest
import torch

import harness_command
import tiny
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from tiny_gpt import SHAPE, awake, write_run
from trainkit.cli import UserError

pytest.importorskip("lm_eval")

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


def nats(model, prompt, start):
    """Cross-entropy of prompt[start:], one prompt at a time."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]))[0, start - 1 : -1]
    targets = torch.tensor(prompt[start:])
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()


def test_harness_scores_equal_a_plain_computation(world, tmp_path, monkeypatch):
    import datasets

    root, model, tokenizer, docs = world
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    harness_command.call(root / "run", root / "tasks", "--output_path", tmp_path, "--log_samples")
    samples = {name: sorted(_samples(tmp_path, name), key=lambda sample: sample["doc_id"]) for name in TASKS}
    assert all(len(found) == len(docs) for found in samples.values())

    limit, total, size = 65, 0.0, 0  # max_length and the token that is only predicted
    for doc, sample in zip(docs, samples["choices"]):
        for choice, response in zip(doc["choices"], sample["filtered_resps"]):
            context = [tokenizer.bos_id, *tokenizer.encode(doc["query"])]
            prompt = [tokenizer.bos_id, *tokenizer.encode(doc["query"] + " " + choice)]
            start = len(context) - max(0, len(prompt) - limit)
            assert float(response[0]) == pytest.approx(-nats(model, prompt[-limit:], start), rel=1e-4)
    for doc, sample in zip(docs, samples["generate"]):
        fitting = tokenizer.decode(tokenizer.encode(doc["query"])[-(64 - 12 - 1) :])
        [[want]] = Engine(model, tokenizer).complete([fitting], Sampling(max_tokens=12, temperature=0), stop=["e"])
        assert sample["resps"][0][0] == want
    for doc in docs:
        ids = [tokenizer.bos_id, *tokenizer.encode(doc["query"])]
        for first in range(1, len(ids), 64):
            last = min(first + 64, len(ids))
            total += nats(model, ids[max(0, last - 65) : last], min(64, last - 1) - (last - first) + 1)
        size += len(doc["query"].encode())
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())["results"]
    assert results["tiny_rolling"]["bits_per_byte,none"] == pytest.approx(total / size / 0.6931471805599453, rel=1e-4)


def _samples(folder, name):
    return [json.loads(line) for line in next(folder.rglob(f"samples_tiny_{name}_*.jsonl")).read_text().splitlines()]


def test_a_missing_run_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        harness_command.call_on_nothing(tmp_path, tmp_path)
    assert exit_info.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith("error: no checkpoint in")


def test_without_the_harness_one_line_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "nanochat_gka.harness", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        importlib.import_module("nanochat_gka.harness")
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith('error: lm_eval is not installed: run pip install "gka[lm-eval]"')


def test_a_missing_gpu_is_one_line(monkeypatch):
    from nanochat_gka import harness

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="pass --device cpu"):
        harness.GKAModel("no run", device="cuda:0")
