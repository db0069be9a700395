"""Writing text from the command line."""

import io
import json

import pytest
import torch

import tiny
from nanochat_gka import generate
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from tiny_gpt import awake, write_run


def write(trained, *flags):
    """The command in this process; returns its exit code."""
    flags = ["--run", trained[0], "--device-type", "cpu", "--max-tokens", 12, *flags]
    return tiny.exit_code(generate.main, generate.GenerateConfig, *flags)


@pytest.fixture
def continued(trained, tokenizer):
    """A function: what the engine makes of prompts."""
    engine = Engine(trained[1], tokenizer)
    return lambda prompts, stop=(), **settings: engine.complete(prompts, Sampling(max_tokens=12, **settings), stop)


def test_text_goes_to_output_at_once_or_as_a_stream(trained, continued, capsys):
    assert write(trained, "--prompt", "the kernel", "a", "--num-samples", 2, "--seed", 5) == 0
    rows = zip(["the kernel", "a"], continued(["the kernel", "a"], num_samples=2, seed=5))
    assert capsys.readouterr().out == "".join(prompt + text + "\n\n" for prompt, row in rows for text in row)
    assert write(trained, "--prompt", "the kernel", "--num-samples", 2, "--stream", "--stop", "e") == 0
    [texts] = continued(["the kernel"], num_samples=2, stop=["e"])
    assert capsys.readouterr().out == "".join("the kernel" + text + "\n" for text in texts)


def test_prompts_file_gives_json_lines_in_order_and_names_bad_lines(trained, continued, tmp_path, capsys):
    """Of a file with a byte order mark, Windows' line ends, and a separator that JSON leaves as it is."""
    lines = [
        "\ufeffthe :smile: kernel",
        '"two\\nlines\u2028"',
        "",
        "the " * 400,
        '"\\ud800"',
        '"open',
        '""',
        "a [b]",
    ]
    content = "\r\n".join(lines).encode()
    (tmp_path / "prompts.txt").write_bytes(content + b"\n\xff the\nevery head")
    flags = ["--num-samples", 3, "--max-rows", 2, "--temperature", 1.5]
    assert write(trained, "--prompts-file", tmp_path / "prompts.txt", *flags) == 2
    printed = capsys.readouterr()
    prompts = ["the :smile: kernel", "two\nlines\u2028", "", "a [b]", "every head"]
    texts = continued(prompts, num_samples=3, temperature=1.5)
    records = [json.loads(line) for line in printed.out.splitlines()]
    assert records == [{"prompt": prompt, "texts": row} for prompt, row in zip(prompts, texts)]
    errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    places = [f"prompts.txt:{number}: " for number in (4, 5, 6, 9)]
    assert len(errors) == 5 and all(place in error for place, error in zip(places, errors))


def test_interactive_continues_what_is_typed(trained, continued, monkeypatch, capsys):
    """And the same prompt another time with another text."""

    def typed(text, *flags):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert write(trained, "--interactive", *flags) == 0
        return capsys.readouterr()

    printed = typed(f"the kernel\n{'the kernel ' * 100}\n\nevery\n", "--temperature", 0)
    prompts = ["the kernel", "", "every"]
    texts = continued(prompts, temperature=0)
    assert printed.out == "".join(f"{prompt}{text}\n" for prompt, [text] in zip(prompts, texts))
    assert "error: the prompt has" in printed.err
    first, second = typed("the\nthe\n", "--temperature", 2, "--top-k", 0).out.split("the")[1:]
    assert len(first) > 9 and first != second
    assert "error" not in typed("the\nthe\n", "--seed", 2**63 - 1).err  # after which comes 0


BAD = [
    (["--prompts-file", "x", "--stream"], "leave --stream and --interactive out"),
    (["--step", "-2"], "--step must be"),
    (["--stop", ""], "a stop text must not be empty"),
    (["--run", "/nonexistent"], "no checkpoint in /nonexistent"),
    (["--run", "NAN"], "logits are not numbers"),
]


@pytest.mark.parametrize("flags, message", BAD)
def test_bad_flags_and_models_are_one_line(trained, packed, tmp_path, flags, message, capsys):
    if "NAN" in flags:
        model = awake(trained[1].config)
        with torch.no_grad():
            model.transformer.h[0].attn.c_proj.weight.fill_(float("nan"))
        flags = ["--run", write_run(tmp_path / "run", model, packed / "tokenizer")]
    assert write(trained, *flags) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in error
