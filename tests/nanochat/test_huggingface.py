"""CORE of Hugging Face's models: a tiny GPT-2 and a tiny Llama against one prompt at a time."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hub
import tiny
import tiny_core
from naive_core import naive_task
from nanochat_gka.eval_core import CoreConfig, main
from trainkit_gka.progress import read_lines

LIMIT = 48  # tokens, fewer than tiny_core's longest prompts have


def evaluate(path, bundle, out, *more):
    """The command in this process; returns its exit code."""
    flags = ["--hf-path", path, "--bundle", bundle, "--out", out, "--device-type", "cpu", *more]
    return tiny.exit_code(main, CoreConfig, *flags)


def write_tokenizer(folder: Path, bos: str) -> int:
    """A byte-level BPE as GPT-2's, trained on tiny_core's words; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[bos], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(tiny.WORDS)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos).save_pretrained(folder)
    return tokenizer.get_vocab_size()


def write_model(folder: Path, kind: str) -> torch.nn.Module:
    import transformers

    size = write_tokenizer(folder, {"gpt2": "<|endoftext|>", "llama": "<s>"}[kind])
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = dict(n_positions=LIMIT, n_embd=32, n_layer=2, n_head=2)
        config = transformers.GPT2Config(vocab_size=size, initializer_range=0.3, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = dict(max_position_embeddings=LIMIT, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        heads = dict(num_attention_heads=4, num_key_value_heads=2)
        config = transformers.LlamaConfig(vocab_size=size + 5, initializer_range=0.3, **sizes, **heads)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model.eval()


class Plain:
    """What upstream does with a tokenizer: the library's own, and a special token in front."""

    def __init__(self, folder: Path, bos: str):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.bos_id = self.tokenizer.token_to_id(bos)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind,bos", [("gpt2", "<|endoftext|>"), ("llama", "<s>")])
def test_scores_equal_the_naive_scorer_at_any_length(kind, bos, bundle, tmp_path):
    model, folder = write_model(tmp_path / "tiny-model", kind), tmp_path / "tiny-model"
    assert evaluate(folder, bundle, tmp_path / "out", "--batch-tokens", 200) == 0
    records = read_lines(tmp_path / "out/tiny-model.jsonl")
    lines = {line["config"]["task"]: line for line in records if line["kind"] == "core"}
    plain, longest = Plain(folder, bos), []

    def logits(ids):
        longest.append(ids.shape[1])
        return model(ids).logits

    logits.device = "cpu"
    for label in tiny_core.TASKS:
        want = naive_task(logits, plain, bundle, label, max_seq_len=LIMIT, together=False)
        assert lines[label]["metrics"]["accuracy"] == want.accuracy, label
    assert max(longest) == LIMIT and len({line["metrics"]["accuracy"] for line in lines.values()}) > 2
    last = (tmp_path / "out/tiny-model.csv").read_text().splitlines()[-1]
    assert last.startswith("mean of 5 tasks (max 15 each)")
    assert evaluate(folder, bundle, tmp_path / "out", "--max-seq-len", 20) == 0
    assert (tmp_path / "out/tiny-model_len20.csv").exists()


def test_a_hub_that_does_not_answer_may_answer_the_next_time(bundle, tmp_path):
    """Its client says what it tries, waiting between attempts; here it does not wait."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        env = hub.environment(silent.getsockname()[1]) | {"HF_HOME": str(tmp_path)}
        flags = ["--hf-path", "some/model", "--bundle", bundle, "--device-type", "cpu"]
        command = [sys.executable, *hub.impatient("nanochat_gka.eval_core"), *map(str, flags)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=tiny.HANG_AFTER)
    assert done.returncode == 75 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --hf-path some/model: no causal language model")


def test_models_that_cannot_be_loaded_are_one_line(bundle, tmp_path, capsys):
    model = write_model(tmp_path / "good", "gpt2")

    def check(folder, message):
        assert evaluate(folder, bundle, tmp_path / "out") == 2
        error = capsys.readouterr().err
        assert re.search(message, error) and len(error.splitlines()) == 1, error

    check(tmp_path / "nothing", "no causal language model that can be loaded from safetensors")
    model.save_pretrained(tmp_path / "pickled")
    write_tokenizer(tmp_path / "pickled", "<|endoftext|>")
    (tmp_path / "pickled/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled/pytorch_model.bin")
    check(tmp_path / "pickled", "no causal language model that can be loaded from safetensors")
    config = json.loads((tmp_path / "good/config.json").read_text())
    classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    remote = {**config, "model_type": "mine", "auto_map": classes}
    (tmp_path / "good/config.json").write_text(json.dumps(remote))
    (tmp_path / "good/mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    check(tmp_path / "good", "no causal language model that can be loaded from safetensors")
    assert not (tmp_path / "executed").exists()
    small = type(model)(type(model.config)(vocab_size=100, n_positions=LIMIT, n_embd=32, n_layer=1, n_head=2))
    small.save_pretrained(tmp_path / "small")
    write_tokenizer(tmp_path / "small", "<|endoftext|>")
    check(tmp_path / "small", r"the tokenizer has ids up to \d+, the model has 100 embeddings")
