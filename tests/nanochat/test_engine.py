"""Drawing text from a model: prompts and samples, truncation, stop texts; and from the command line."""

import dataclasses
import io
import json
import math
import random

import pytest
import torch

import tiny
from nanochat_gka import generate
from nanochat_gka.generation.engine import Continuation, Engine
from nanochat_gka.generation.sampling import Sampling, pick, truncate
from tiny_gpt import SHAPE, VARIANTS, awake, write_run


def naive(model, tokenizer, prompt, sampling, sample=0):
    """The same rules without cache or batch: the whole text again for every token."""
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    start, draws = len(ids), sampling.draws(prompt, sample)
    with torch.inference_mode():
        while len(ids) < start + sampling.max_tokens:
            token = pick(model(torch.tensor([ids]))[:, -1], [draws], sampling)[0]
            if token >= tokenizer.bos_id:
                break
            ids.append(token)
    return tokenizer.decode(ids[start:])


@pytest.mark.parametrize("variant", [VARIANTS[number] for number in (0, 4, 8, 14)], ids=str)
def test_prompts_and_samples_are_independent(variant, tokenizer):
    """Whatever the number of rows: 4 prompts of different lengths, 2 samples each, which end at different times.

    test_cache.py decodes with all variants; here are softmax, both ways of gka to store keys and values, and a hybrid.
    """
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, **variant))
    prompts = ["the kernel", "", "every head learns one bandwidth and nothing else", "a"]
    sampling = Sampling(num_samples=2, max_tokens=14, temperature=1.5, top_k=0, top_p=0.95, seed=3)
    want = [[naive(model, tokenizer, prompt, sampling, sample) for sample in range(2)] for prompt in prompts]
    assert len({len(text) for texts in want for text in texts}) > 3
    for max_rows, keep_keys in ((1, False), (3, model.derives_keys), (3, False), (32, False)):
        assert Engine(model, tokenizer, max_rows, keep_keys).complete(prompts, sampling) == want


def test_generation_ends_where_the_positions_end(trained, tokenizer):
    model = trained[1]
    limit = model.rotary.length
    assert len(tokenizer.encode(" kernel")) == 1
    many = Sampling(num_samples=8, max_tokens=50, temperature=5.0, top_k=0)
    pieces = list(Engine(model, tokenizer).stream([" kernel" * (limit - 3)], many))  # and BOS: two places are left
    assert max(sum(piece.sample == sample for piece in pieces) for sample in range(8)) == 2  # fewer after a special one
    with tiny.one_line_error(f"the prompt has {limit} tokens, the model takes at most {limit - 1}"):
        Engine(model, tokenizer).complete([" kernel" * (limit - 1)], many)


OWL = "🦉".encode()
TEXTS = [  # stop texts; the bytes of tokens, None for a special one; the text that each token releases
    ([], [b"a", OWL[:1], OWL[1:3], OWL[3:], b"b", None], ["a", "", "", "🦉", "b", ""]),
    ([], [b"a", OWL[:2], None], ["a", "", "�"]),  # the other half never came
    ([], [b"a\xff", b"b", None], ["a�", "b", ""]),
    (["\n\nQ:"], [b"one\n", b"\n", b"two\n", b"\nQ", b": three", b"no"], ["one", "", "\n\ntwo", "", ""]),
    (["stop"], [b"a st", b"o", b"ne", None], ["a ", "", "stone", ""]),
    (["b", "abc"], [b"xabcy"], ["x"]),  # the one that begins first
    (["end"], [b"the e", b"n", None], ["the ", "", "en"]),  # the text ended before the stop text did
]


@pytest.mark.parametrize("stop, tokens, wanted", TEXTS, ids=range(len(TEXTS)))
def test_text_waits_for_the_rest_of_characters_and_stop_texts(stop, tokens, wanted):
    row = Continuation(0, 0, random.Random(0), room=len(tokens) + 1, stop_texts=stop)
    texts = []
    while not row.is_done:
        texts.append(row.add(0, tokens[len(texts)]).text)
    assert texts == wanted


TRUNCATIONS = [  # top_k, top_p, which tokens stay; probabilities are exact in binary, so that limits are met exactly
    (0, 1.0, [0, 1, 2, 3, 4]), (9, 1.0, [0, 1, 2, 3, 4]), (2, 1.0, [1, 3]), (0, 0.5, [1]), (0, 0.51, [1, 3]),
    (0, 0.75, [1, 3]), (0, 0.8, [0, 1, 3]), (2, 0.6, [1]), (2, 0.7, [1, 3]),  # 0.5 is two thirds of top 2's 0.75
]  # fmt: skip


@pytest.mark.parametrize("top_k, top_p, stay", TRUNCATIONS)
def test_truncation_keeps_the_most_likely(top_k, top_p, stay):
    p = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]], dtype=torch.float64)
    expected = torch.zeros_like(p)
    expected[:, stay] = p[:, stay]
    assert torch.equal(truncate(p, top_k, top_p), expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_probabilities(temperature):
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]]).expand(20_000, 4)
    tokens = pick(logits, [random.Random(seed) for seed in range(20_000)], Sampling(temperature=temperature, top_k=3))
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / 20_000
    want = (torch.tensor([1.0, 0.0, -math.inf, 2.0]) / temperature).softmax(0)
    # Five standard deviations of a binomial count; of the fourth token none.
    assert ((shares - want).abs() <= 5 * (want * (1 - want) / 20_000).sqrt()).all()


# The command


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
