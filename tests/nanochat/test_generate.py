"""Writing text from the command line."""

import dataclasses
import io
import json

import pytest
import torch

import tiny
from nanochat_gka import generate
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from tiny_gpt import SHAPE, awake, write_run


def write(trained, *flags):
    """The command in this process; returns its exit code."""
    flags = ["--run", trained[0], "--device-type", "cpu", "--max-tokens", 12, *flags]
    return tiny.exit_code(generate.main, generate.GenerateConfig, *flags)


def test_text_goes_to_output_and_the_rest_to_error(trained, tokenizer, capsys):
    assert write(trained, "--prompt", "the kernel", "a", "--num-samples", 2, "--seed", 5) == 0
    printed = capsys.readouterr()
    texts = Engine(trained[1], tokenizer).complete(["the kernel", "a"], Sampling(num_samples=2, max_tokens=12, seed=5))
    want = [prompt + text + "\n\n" for prompt, row in zip(["the kernel", "a"], texts) for text in row]
    assert printed.out == "".join(want)


def test_a_stream_is_the_same_text(trained, tokenizer, capsys):
    assert write(trained, "--prompt", "the kernel", "--num-samples", 2, "--stream", "--stop", "e") == 0
    [texts] = Engine(trained[1], tokenizer).complete(["the kernel"], Sampling(num_samples=2, max_tokens=12), stop=["e"])
    assert capsys.readouterr().out == "".join("the kernel" + text + "\n" for text in texts)


def test_prompts_file_gives_json_lines_in_order(trained, tokenizer, tmp_path, capsys):
    """Of a file with a byte order mark, Windows' line ends, and a separator that JSON leaves as it is."""
    prompts = ["the :smile: kernel", "two\nlines\u2028", "every head [bold]"]
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    (tmp_path / "prompts.txt").write_bytes(text.encode())
    flags = ["--num-samples", 3, "--max-rows", 2, "--temperature", 1.5]
    assert write(trained, "--prompts-file", tmp_path / "prompts.txt", *flags) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    want = Engine(trained[1], tokenizer).complete(prompts, Sampling(num_samples=3, max_tokens=12, temperature=1.5))
    assert records == [{"prompt": prompt, "texts": texts} for prompt, texts in zip(prompts, want)]


def test_a_model_with_nan_weights_writes_nothing(trained, packed, tokenizer, tmp_path, capsys):
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size))
    with torch.no_grad():
        model.transformer.h[0].attn.c_proj.weight.fill_(float("nan"))
    run_folder = write_run(tmp_path / "run", model, packed / "tokenizer")
    assert write((run_folder, None), "--temperature", 1) == 2
    assert "logits are not numbers" in capsys.readouterr().err


def test_interactive_continues_what_is_typed(trained, tokenizer, monkeypatch, capsys):
    """And the same prompt another time with another text."""

    def typed(text, *flags):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert write(trained, "--interactive", *flags) == 0
        return capsys.readouterr()

    printed = typed(f"the kernel\n{'the kernel ' * 100}\n\nevery\n", "--temperature", 0)
    texts = Engine(trained[1], tokenizer).complete(["the kernel", "", "every"], Sampling(max_tokens=12, temperature=0))
    assert printed.out == f"the kernel{texts[0][0]}\n{texts[1][0]}\nevery{texts[2][0]}\n"
    assert "error: the prompt has" in printed.err
    first, second = typed("the\nthe\n", "--temperature", 2, "--top-k", 0).out.split("the")[1:]
    assert len(first) > 9 and first != second
    assert "error" not in typed("the\nthe\n", "--seed", 2**63 - 1).err  # after which comes 0


BAD = [
    (["--prompts-file", "x", "--stream"], "leave --stream and --interactive out"),
    (["--step", "-2"], "--step must be"),
    (["--stop", ""], "a stop text must not be empty"),
    (["--run", "/nonexistent"], "no checkpoint in /nonexistent"),
]


@pytest.mark.parametrize("flags, message", BAD)
def test_bad_flags_are_one_line(trained, flags, message, capsys):
    assert write(trained, *flags) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error


def test_the_prompts_beside_bad_lines_are_written(trained, tmp_path, capsys):
    lines = [b"the kernel", b"\xff the", b"", b"the " * 400, b'"every\\nhead"', b'"\\ud800"', b'"open', b'""', b"a"]
    (tmp_path / "prompts.txt").write_bytes(b"\n".join(lines))
    assert write(trained, "--prompts-file", tmp_path / "prompts.txt") == 2
    printed = capsys.readouterr()
    written = [json.loads(line) for line in printed.out.splitlines()]
    assert [record["prompt"] for record in written] == ["the kernel", "every\nhead", "", "a"]
    assert all(len(record["texts"]) == 1 for record in written)
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    places = [f"prompts.txt:{number}: " for number in (2, 4, 6, 7)]
    assert len(errors) == 5 and all(place in error for place, error in zip(places, errors))
