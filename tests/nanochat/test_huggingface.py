"""CORE of Hugging Face's models: a tiny GPT-2 and a tiny Llama against one prompt at a time."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

import hub
import tiny
import tiny_core
from naive_core import naive_task
from nanochat_gka.eval_core import CoreConfig, main
from tiny_pack import rewrite_json
from trainkit_gka.progress import read_lines

LIMIT = 48  # tokens, fewer than tiny_core's longest prompts have
KINDS = {
    "gpt2": dict(n_positions=LIMIT, n_embd=32, n_layer=2, n_head=2),
    "llama": dict(max_position_embeddings=LIMIT, hidden_size=32, intermediate_size=48)
    | dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
}


def evaluate(path, bundle, out, *more):
    """The command in this process; returns its exit code."""
    flags = ["--hf-path", path, "--bundle", bundle, "--out", out, "--device-type", "cpu", *more]
    return tiny.exit_code(main, CoreConfig, *flags)


def write_model(folder: Path, kind: str, embeddings: int = 305) -> torch.nn.Module:
    """With a byte-level BPE as GPT-2's, trained on tiny_core's words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(tiny.WORDS)], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=embeddings, initializer_range=0.3, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_the_naive_scorer_at_any_length(kind, bundle, tmp_path):
    """With a tokenizer as upstream uses it: the library's, and a special token in front."""
    folder, out = tmp_path / "tiny-model", tmp_path / "out"
    model = write_model(folder, kind)
    assert evaluate(folder, bundle, out, "--batch-tokens", 200) == 0
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
    assert (out / "tiny-model.csv").read_text().splitlines()[-1].startswith("mean of 5 tasks (max 15 each)")
    assert evaluate(folder, bundle, out, "--max-seq-len", 20) == 0 and (out / "tiny-model_len20.csv").exists()


def test_a_hub_that_does_not_answer_may_answer_the_next_time(bundle, tmp_path):
    """Its client waits between its attempts; here it does not wait."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        env = hub.environment(silent.getsockname()[1]) | {"HF_HOME": str(tmp_path)}
        flags = ["--hf-path", "some/model", "--bundle", bundle, "--device-type", "cpu"]
        command = [sys.executable, *hub.impatient("nanochat_gka.eval_core"), *map(str, flags)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=tiny.HANG_AFTER)
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --hf-path some/model: no causal language model")


NO_MODEL = "no causal language model that can be loaded from safetensors"
BAD_MODELS = {"nothing": NO_MODEL, "pickled": NO_MODEL, "code": NO_MODEL, "few": "the model has 100 embeddings"}


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_models_that_cannot_be_loaded_are_one_line(kind, bundle, tmp_path, capsys):
    """No code that comes with a model is executed, and nothing is unpickled."""
    folder = tmp_path / "model"
    model = None if kind == "nothing" else write_model(folder, "gpt2", 100 if kind == "few" else 305)
    if kind == "pickled":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    if kind == "code":
        classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
        rewrite_json(folder / "config.json", model_type="mine", auto_map=classes)
        (folder / "mine.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")
    assert evaluate(folder, bundle, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert BAD_MODELS[kind] in error and len(error.splitlines()) == 1 and not (folder / "executed").exists()
