"""The engine: samples that do not depend on one another, which tokens are drawn, stopping, and text from tokens."""

import dataclasses
import math
import random

import pytest
import torch

import tiny
from nanochat_gka.generation.engine import Continuation, Engine
from nanochat_gka.generation.sampling import Sampling, pick, truncate
from tiny_gpt import SHAPE, VARIANTS, awake


@pytest.fixture(scope="module")
def model(tokenizer):
    shape = dict(vocab_size=tokenizer.vocab_size, attention="gka", head_offsets="PS", gka_values="normalised")
    return awake(dataclasses.replace(SHAPE, **shape))


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


@pytest.mark.parametrize("variant", VARIANTS[::4], ids=str)  # test_cache.py decodes with all
def test_prompts_and_samples_are_independent(variant, tokenizer):
    """Whatever the number of rows: 4 prompts of different lengths, 2 samples each, which end at different times."""
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, **variant))
    prompts = ["the kernel", "", "every head learns one bandwidth and nothing else", "a"]
    sampling = Sampling(num_samples=2, max_tokens=14, temperature=1.5, top_k=0, top_p=0.95, seed=3)
    want = [[naive(model, tokenizer, prompt, sampling, sample) for sample in range(2)] for prompt in prompts]
    assert len({len(text) for texts in want for text in texts}) > 3
    for max_rows, keep_keys in ((1, False), (3, model.derives_keys), (3, False), (32, False)):
        assert Engine(model, tokenizer, max_rows, keep_keys).complete(prompts, sampling) == want


def test_generation_ends_where_the_positions_end(model, tokenizer):
    limit = model.rotary.length
    assert len(tokenizer.encode(" kernel")) == 1
    many = Sampling(num_samples=8, max_tokens=50, temperature=5.0, top_k=0)
    pieces = list(Engine(model, tokenizer).stream([" kernel" * (limit - 3)], many))  # and BOS: two places are left
    counts = [sum(piece.sample == sample for piece in pieces) for sample in range(8)]
    assert max(counts) == 2  # fewer where a special token came first
    with tiny.one_line_error(f"the prompt has {limit} tokens, the model takes at most {limit - 1}"):
        Engine(model, tokenizer).complete([" kernel" * (limit - 1)], many)


# The text of tokens


def feed(stop, *pieces):
    row = Continuation(0, 0, random.Random(0), room=len(pieces) + 1, stop_texts=stop)
    texts = []
    for piece in pieces:
        texts.append(row.add(0, piece).text)
        if row.is_done:
            break
    return texts, row


def test_half_characters_wait_for_their_other_half():
    owl = "🦉".encode()
    assert feed([], b"a", owl[:1], owl[1:3], owl[3:], b"b", None)[0] == ["a", "", "", "🦉", "b", ""]
    assert feed([], b"a", owl[:2], None)[0] == ["a", "", "�"]  # it never came
    assert feed([], b"a\xff", b"b", None)[0] == ["a�", "b", ""]


def test_stop_text_across_tokens_ends_the_text():
    texts, row = feed(["\n\nQ:"], b"one\n", b"\n", b"two\n", b"\nQ", b": three")
    assert texts == ["one", "", "\n\ntwo", "", ""] and row.is_done
    assert "".join(feed(["stop"], b"a st", b"o", b"ne", None)[0]) == "a stone"
    assert feed(["b", "abc"], b"xabcy")[0] == ["x"]  # the one that begins first
    assert feed(["end"], b"the e", b"n", None)[0] == ["the ", "", "en"]  # the text ended before the stop text did


# Which tokens are drawn


def test_truncation_keeps_the_most_likely():
    # Exact in binary, so that limits are met exactly.
    p = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]], dtype=torch.float64)

    def kept(top_k=0, top_p=1.0):
        return truncate(p, top_k, top_p)[0].nonzero()[:, 0].tolist()

    assert kept() == kept(top_k=9) == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.5) == [1]
    assert kept(top_p=0.51) == kept(top_p=0.75) == [1, 3]
    assert kept(top_p=0.8) == [0, 1, 3]
    # 0.5 is two thirds of the 0.75 that are left.
    assert kept(top_k=2, top_p=0.6) == [1] and kept(top_k=2, top_p=0.7) == [1, 3]
    assert torch.equal(truncate(p, 2, 1.0)[0], torch.tensor([0, 0.5, 0, 0.25, 0], dtype=torch.float64))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_probabilities(temperature):
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]]).expand(20_000, 4)
    sources = [random.Random(seed) for seed in range(20_000)]
    tokens = pick(logits, sources, Sampling(temperature=temperature, top_k=3))
    counts = torch.bincount(torch.tensor(tokens), minlength=4)
    want = (torch.tensor([1.0, 0.0, -math.inf, 2.0]) / temperature).softmax(0)
    assert counts[2] == 0
    # Five standard deviations of a binomial count.
    assert ((counts / 20_000 - want).abs() <= 5 * (want * (1 - want) / 20_000).sqrt()).all()
