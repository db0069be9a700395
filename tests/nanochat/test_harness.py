"""lm-evaluation-harness on a model of ours: its command line, on tasks written here, against a plain computation."""

import functools
import json
import math
import random
import re
import sys

import pytest
import torch
import transformers

import tiny
from nanochat_gka.model.checkpoints import export, load
from tiny_gpt import greedy

transformers.utils.logging.disable_progress_bar()

ACCURACY = dict(metric="acc", aggregation="mean", higher_is_better=True)
GREEDY = dict(until=["e"], max_gen_toks=12, do_sample=False)
TASKS = {
    "multiple_choice": dict(doc_to_text="{{query}}", doc_to_choice="{{choices}}", doc_to_target="gold",
                            metric_list=[ACCURACY]),
    "generate_until": dict(doc_to_text="{{query}}", doc_to_target="{{choices[0]}}", generation_kwargs=GREEDY,
                           metric_list=[ACCURACY | dict(metric="exact_match")]),
    "loglikelihood_rolling": dict(doc_to_text="", doc_to_target="{{query}}", metric_list=[{"metric": "bits_per_byte"}]),
}  # fmt: skip


@pytest.fixture(scope="module")
def docs():
    rng, docs = random.Random(3), []
    for _ in range(12):
        query, *choices = (" ".join(rng.choices(tiny.WORDS, k=rng.randint(2, 40 if i == 0 else 5))) for i in range(4))
        docs.append({"query": query, "choices": choices, "gold": rng.randrange(3)})
    return docs


@pytest.fixture
def call(long_context, docs, tmp_path, monkeypatch):
    """The harness on tasks of these types; returns their samples and its results. `run` may have further model_args."""
    import datasets
    from lm_eval.tasks import TaskManager

    from nanochat_gka import harness  # ends the process where the extra is missing

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # An index of its own tasks takes it seconds.
    alone = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", alone)

    def run(run=f"run={long_context[0]}", *flags, types=("multiple_choice",), kind="gka", docs=docs, **more):
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        out.mkdir()
        (out / "data.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        data = dict(dataset_path="json", dataset_kwargs={"data_files": {"test": str(out / "data.jsonl")}})
        for name in types:
            task = dict(task=name, output_type=name, test_split="test") | data | TASKS[name] | more
            (out / f"{name}.yaml").write_text(json.dumps(task))
        words = ["--model", kind, "--model_args", run, "--device", "cpu", "--batch_size", "5", "--include_path", out]
        words += ["--tasks", ",".join(types), "--output_path", out, "--log_samples", *flags]
        monkeypatch.setattr(sys, "argv", ["harness", *map(str, words)])
        harness.main()
        files = [next(out.rglob(f"samples_{name}_*.jsonl")).read_text().splitlines() for name in types]
        samples = [sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"]) for lines in files]
        return samples, json.loads(next(out.rglob("results_*.json")).read_text())["results"]

    return run


def nats(model, prompt, start):
    """Cross-entropy of prompt[start:], one prompt at a time."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]))[0, start - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(prompt[start:]), reduction="sum").item()


def test_harness_scores_equal_a_plain_computation(long_context, tokenizer, docs, call):
    model = long_context[1]
    (choices, generated, _), results = call(types=TASKS)
    assert len(choices) == len(generated) == len(docs)
    limit, total, size = 65, 0.0, 0  # max_length and the token that is only predicted
    for doc, sample, text in zip(docs, choices, generated):
        ids = [tokenizer.bos_id, *tokenizer.encode(doc["query"])]
        for choice, response in zip(doc["choices"], sample["filtered_resps"]):
            prompt = [tokenizer.bos_id, *tokenizer.encode(doc["query"] + " " + choice)]
            start = len(ids) - max(0, len(prompt) - limit)
            assert float(response[0]) == pytest.approx(-nats(model, prompt[-limit:], start), rel=1e-5)
        wanted = tokenizer.decode(greedy(model, ids[-(64 - 12) :], 12, tokenizer.bos_id))
        assert text["resps"][0][0] == wanted.partition("e")[0]
        for first in range(1, len(ids), 64):
            last = min(first + 64, len(ids))
            total += nats(model, ids[max(0, last - 65) : last], min(64, last - 1) - (last - first) + 1)
        size += len(doc["query"].encode())
    bits = results["loglikelihood_rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(total / size / math.log(2), rel=1e-5)


def test_every_form_of_a_model_has_the_same_scores(long_context, call, tmp_path):
    """A run, its export, what transformers saved of that, and the harness's own `hf` on both."""
    export(load(long_context[0]), tmp_path / "exported")
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        kind.from_pretrained(tmp_path / "exported").save_pretrained(tmp_path / "saved")
    wanted = [sample["filtered_resps"] for sample in call()[0][0]]
    for folder in (tmp_path / "exported", tmp_path / "saved"):
        for run, kind in ((f"run={folder}", "gka"), (f"pretrained={folder}", "hf")):
            assert [sample["filtered_resps"] for sample in call(run, kind=kind)[0][0]] == wanted
    with pytest.raises(SystemExit):
        call(f"run={tmp_path / 'saved'},step=7")


def doc(choice):
    return {"query": "the", "choices": [choice], "gold": 0}


LONG, ROOM = r"an answer has \d+ tokens and must have 1 to 64 \(max_length\)", r"AssertionError: .*\(64\)"
EMPTY = dict(docs=[doc("row"), doc("")], target_delimiter="")  # once the likeliest answer there is
MISTAKES = [  # model_args (RUN is the run), flags, further arguments of `call`, what the error names
    ("run=", [], {}, "--model_args needs run=FOLDER"),
    ("run=RUN,steps=7", [], {}, "TypeError: .*steps"),
    ("run=RUN,max_length=641", [], {}, "max_length must be at most 640, got 641"),
    ("run=RUN", ["--trust_remote_code"], {}, "--trust_remote_code is not for --model gka"),
    ("run=RUN", ["--gen_kwargs", "max_gen_toks=64"], dict(types=["generate_until"]), ROOM),
    ("run=RUN", [], dict(docs=[doc("row"), doc("a row " * 60)]), LONG),
    ("run=RUN", [], EMPTY, "an answer has 0 tokens"),
    ("run=RUN", ["--tasks", "hellaswagg"], {}, ".*Tasks not found: hellaswagg"),
]


@pytest.mark.parametrize("run, flags, options, message", MISTAKES, ids=[row[-1][:30] for row in MISTAKES])
def test_what_cannot_be_used_is_one_line(run, flags, options, message, long_context, call, capsys):
    with pytest.raises(SystemExit) as ended:
        call(run.replace("RUN", str(long_context[0])), *flags, **options)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and re.match(f"error: {message}", last), last
