"""The engine: prompts and samples that do not depend on one another, stopping, and text from tokens."""

import dataclasses
import math
import random

import pytest
import torch

from nanochat_gka.generation.engine import Continuation, Engine
from nanochat_gka.generation.sampling import Sampling, pick
from tiny_gpt import SHAPE, VARIANTS, awake
from trainkit_gka.cli import UserError


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


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prompts_and_samples_are_independent(variant, tokenizer):
    """Whatever the number of rows: 4 prompts of different lengths, 2 samples each, which end at different times."""
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, **variant))
    prompts = ["the kernel", "", "every head learns one bandwidth and nothing else", "a"]
    sampling = Sampling(num_samples=2, max_tokens=14, temperature=1.5, top_k=0, top_p=0.95, seed=3)
    want = [[naive(model, tokenizer, prompt, sampling, sample) for sample in range(2)] for prompt in prompts]
    assert len({len(text) for texts in want for text in texts}) > 3
    for max_rows, keep_keys in ((1, False), (3, model.derives_keys), (3, False), (32, False)):
        assert Engine(model, tokenizer, max_rows, keep_keys).complete(prompts, sampling) == want


def test_greedy_is_repeated_argmax(model, tokenizer):
    start = ids = [tokenizer.bos_id, *tokenizer.encode("the kernel")]
    with torch.inference_mode():
        while len(ids) < len(start) + 20 and (len(ids) == len(start) or ids[-1] != tokenizer.bos_id):
            ids = [*ids, model(torch.tensor([ids]))[0, -1].argmax().item()]
    want = tokenizer.decode(ids[len(start) :]).removesuffix("<|bos|>")
    engine = Engine(model, tokenizer)
    assert engine.complete(["the kernel"], Sampling(max_tokens=20, temperature=0)) == [[want]]
    assert engine.complete(["the kernel"], Sampling(max_tokens=20, top_k=1, seed=9)) == [[want]]
    assert engine.complete(["the kernel"], Sampling(max_tokens=20, top_p=1e-9, top_k=0, seed=9)) == [[want]]


def test_prompt_runs_once_for_all_samples(model, tokenizer, monkeypatch):
    shapes, forward = [], type(model).forward

    def spy(self, ids, **arguments):
        shapes.append(tuple(ids.shape))
        return forward(self, ids, **arguments)

    monkeypatch.setattr(type(model), "forward", spy)
    prompt = "every head learns one bandwidth"
    Engine(model, tokenizer, max_rows=4).complete([prompt], Sampling(num_samples=8, max_tokens=5, temperature=1.0))
    length = len(tokenizer.encode(prompt)) + 1
    assert [shape for shape in shapes if shape[1] > 1] == [(1, length)]
    assert max(shape[0] for shape in shapes) == 4


def test_the_seed_decides(model, tokenizer):
    def complete(seed):
        sampling = Sampling(num_samples=2, max_tokens=12, temperature=1.0, seed=seed)
        return Engine(model, tokenizer).complete(["the"], sampling)[0]

    texts = [complete(seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_pieces_join_to_the_text(model, tokenizer):
    sampling = Sampling(num_samples=2, max_tokens=25, temperature=1.2, top_k=0)
    pieces = list(Engine(model, tokenizer).stream(["the", "a"], sampling))
    texts = Engine(model, tokenizer).complete(["the", "a"], sampling)
    for prompt in range(2):
        for sample in range(2):
            of_sample = [piece for piece in pieces if (piece.prompt, piece.sample) == (prompt, sample)]
            assert "".join(piece.text for piece in of_sample) == texts[prompt][sample]
            assert [piece.finished for piece in of_sample] == [False] * (len(of_sample) - 1) + [True]


def test_generation_ends_where_the_positions_end(model, tokenizer):
    limit = model.rotary.length
    assert len(tokenizer.encode(" kernel")) == 1
    many = Sampling(num_samples=8, max_tokens=50, temperature=5.0, top_k=0)
    pieces = list(Engine(model, tokenizer).stream([" kernel" * (limit - 3)], many))  # and BOS: two places are left
    counts = [sum(piece.sample == sample for piece in pieces) for sample in range(8)]
    assert max(counts) == 2  # fewer where a special token came first
    with pytest.raises(UserError, match=f"the prompt has {limit} tokens, the model takes at most {limit - 1}"):
        Engine(model, tokenizer).complete([" kernel" * (limit - 1)], many)


def test_the_engine_keeps_keys_when_asked(model, tokenizer, monkeypatch):
    caches, new_cache = [], type(model).new_cache

    def spy(*arguments, **named):
        caches.append(new_cache(*arguments, **named))
        return caches[-1]

    monkeypatch.setattr(type(model), "new_cache", spy)
    for keep_keys in (False, True):
        caches.clear()
        Engine(model, tokenizer, keep_keys=keep_keys).complete(["the"], Sampling(max_tokens=3))
        assert [len(cache.layers[0]) for cache in caches] == [1 + keep_keys] * 2  # of all rows, and of the prompt


FORMS = [dict(), dict(attention="vlt"), dict(attention="gka"), dict(attention="gka", head_offsets="PS")]


@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_keep_keys_needs_derived_keys(fields, tokenizer):
    model = awake(dataclasses.replace(SHAPE, **fields))
    with pytest.raises(UserError, match=r"--keep-keys is for models of --gka-values normalised or raw.*leave it out"):
        Engine(model, tokenizer, keep_keys=True)


@pytest.mark.parametrize(
    "fields,message",
    [
        (dict(temperature=-1), "--temperature must be at least 0"),
        (dict(temperature=math.nan), "--temperature"),
        (dict(top_k=-1), "--top-k"),
        (dict(top_p=0.0), "--top-p must be above 0"),
        (dict(max_tokens=0), "--max-tokens must be at least 1"),
        (dict(num_samples=0), "--num-samples must be at least 1"),
    ],
)
def test_sampling_values_out_of_bounds_are_refused(model, tokenizer, fields, message):
    with pytest.raises(UserError, match=message):
        Engine(model, tokenizer).complete(["the"], Sampling(**fields))


def test_no_rows_and_an_empty_stop_text_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        Engine(model, tokenizer, max_rows=0)
    with pytest.raises(UserError, match="stop text must not be empty"):
        Engine(model, tokenizer).complete(["the"], Sampling(), stop=[""])


def feed(stop, *pieces):
    row = Continuation(0, 0, random.Random(0), room=len(pieces) + 1, stop_texts=stop)
    texts = []
    for piece in pieces:
        texts.append(row.add(0, piece).text)
        if row.finished:
            break
    return texts, row


def test_half_characters_wait_for_their_other_half():
    owl = "🦉".encode()
    assert feed([], b"a", owl[:1], owl[1:3], owl[3:], b"b", None)[0] == ["a", "", "", "🦉", "b", ""]
    assert feed([], b"a", owl[:2], None)[0] == ["a", "", "�"]  # it never came
    assert feed([], b"a\xff", b"b", None)[0] == ["a�", "b", ""]


def test_stop_text_across_tokens_ends_the_text():
    texts, row = feed(["\n\nQ:"], b"one\n", b"\n", b"two\n", b"\nQ", b": three")
    assert texts == ["one", "", "\n\ntwo", "", ""] and row.finished
    assert "".join(feed(["stop"], b"a st", b"o", b"ne", None)[0]) == "a stone"
    assert feed(["b", "abc"], b"xabcy")[0] == ["x"]  # the one that begins first
    assert feed(["end"], b"the e", b"n", None)[0] == ["the ", "", "en"]  # the text ended before the stop text did
