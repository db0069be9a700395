"""Generation: the cache changes nothing but the work, its size, sampling, stopping, and batches that do not matter."""

import dataclasses
import math
import random

import pytest
import torch

from gka import attention_cost
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.generation.engine import Continuation, Engine
from nanochat_gka.generation.sampling import Sampling, pick, truncate
from nanochat_gka.model import attention
from nanochat_gka.model.blocks import Rotary
from tiny_gpt import SHAPE, VARIANTS, awake
from trainkit.cli import UserError

TOKENS = 40  # beyond the short window (8), the context (16) and one more
# float32: a logit is a sum over 64 channels of unit size, capped at 20; four layers add their roundings.
LOGITS = dict(rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tokenizer(packed):
    return Tokenizer.load(packed / "tokenizer")


@pytest.fixture(scope="module")
def model(tokenizer):
    return awake(
        dataclasses.replace(
            SHAPE, vocab_size=tokenizer.vocab_size, attention="gka", head_offsets="PS", gka_values="normalised"
        )
    )


@pytest.mark.parametrize("pattern", ["SL", "S", "L"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.inference_mode()
def test_chunks_and_single_tokens_give_the_logits_of_the_full_pass(variant, pattern):
    model = awake(dataclasses.replace(SHAPE, window_pattern=pattern, **variant))
    ids = torch.randint(70, (3, TOKENS))
    want = model(ids)
    singly, chunks = [1] * TOKENS, [5, 1, 1, 7, 1, 20, 1, 1, 1, 1, 1]
    for sizes, keep_keys in (
        (singly, False),
        (chunks, False),
        ([TOKENS], False),
        *[(singly, True)] * model.derives_keys,
    ):
        cache, parts = model.new_cache(3, TOKENS, keep_keys=keep_keys), []
        for part in ids.split(sizes, dim=1):
            parts.append(model(part, context=cache))
        torch.testing.assert_close(torch.cat(parts, dim=1), want, **LOGITS)
        assert cache.lengths == [TOKENS] * 3


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.inference_mode()
def test_rows_of_different_lengths_do_not_see_each_other(variant):
    """Prompts of 3, 12, 12, 1 tokens; then all grow together, two tokens and one; then one leaves and another takes its place."""
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (4, TOKENS))
    want = model(ids)
    cache, rows = model.new_cache(4, TOKENS, in_use=0), [0, 1, 2, 3]
    for row, length in enumerate((3, 12, 12, 1)):
        prompt = model.new_cache(1, length)
        model(ids[row : row + 1, :length], context=prompt)
        cache.take(prompt)

    def grow(size):
        before = list(cache.lengths)
        new = torch.stack([ids[row, start : start + size] for row, start in zip(rows, before)])
        got = model(new, context=cache)
        torch.testing.assert_close(
            got, torch.stack([want[row, start : start + size] for row, start in zip(rows, before)]), **LOGITS
        )

    for size in (1, 2, 1, 7, 1):
        grow(size)
    cache.drop(1)
    rows = [0, 3, 2]
    grow(1)
    prompt = model.new_cache(1, 5)
    model(ids[1:2, :5], context=prompt)
    cache.take(prompt)
    rows.append(1)
    for _ in range(10):
        grow(1)
    cache.drop(3)  # the last row itself
    rows.pop()
    grow(1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2], VARIANTS[3], VARIANTS[6], VARIANTS[8]], ids=str)
def test_bfloat16_caches_what_the_full_pass_computes(variant, device):
    """As the trainer's models on a GPU. Keys derived from the cache are those of the full pass to the last bit, so what differs is the kernels' rounding."""
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (2, TOKENS))
    with torch.inference_mode():
        exact = model.double()(ids)
        model = model.float().to(device)
        model.embeddings_to(torch.bfloat16)
        want, cache = model(ids.to(device)).cpu(), model.new_cache(2, TOKENS)
        got = torch.cat([model(part.to(device), context=cache).cpu() for part in ids.split(1, dim=1)], dim=1)
    assert cache.layers[0][0].dtype == torch.bfloat16
    assert (got - exact).norm() <= 1.2 * (want - exact).norm()


def test_gkas_cache_has_half_the_bytes():
    def cache(keep_keys=False, **fields):
        return awake(dataclasses.replace(SHAPE, **fields)).new_cache(3, 50, keep_keys=keep_keys)

    softmax = cache()
    assert softmax.nbytes == 4 * attention_cost("softmax", 64, 4, 50, batch=3, itemsize=4).cache_bytes
    for fields in (dict(), dict(head_offsets="PNSS"), dict(gka_values="raw"), dict(gka_values="normalised")):
        assert cache(attention="gka", **fields).nbytes * 2 == softmax.nbytes
    assert cache(attention="vlt").nbytes == softmax.nbytes
    assert cache(attention="gka", gka_values="normalised", keep_keys=True).nbytes == softmax.nbytes
    assert cache(attention="GGGA").nbytes * 8 == softmax.nbytes * 5  # three layers of one tensor, one of two
    assert (
        cache(attention="gka", value_embeds="all").nbytes * 4 == softmax.nbytes * 3
    )  # every second layer must keep both


@pytest.mark.parametrize(
    "fields", [dict(), dict(attention="vlt"), dict(attention="gka"), dict(attention="gka", head_offsets="PS")], ids=str
)
def test_keys_can_be_kept_only_where_they_would_be_computed_again(fields, tokenizer):
    model = awake(dataclasses.replace(SHAPE, **fields))
    with pytest.raises(ValueError, match="keep_keys is for gka layers whose values are not rotated"):
        model.new_cache(1, 4, keep_keys=True)
    with pytest.raises(UserError, match=r"--keep-keys is for models of --gka-values normalised or raw.*leave it out"):
        Engine(model, tokenizer, keep_keys=True)


@pytest.mark.parametrize("values", ["rotated", "normalised"])
@torch.inference_mode()
def test_the_papers_form_decodes_without_touching_the_past_tokens_again(values, monkeypatch):
    """One token is rotated for each layer, and the operator reads the cache itself: keys and values are one view of its one tensor."""
    model = awake(
        dataclasses.replace(SHAPE, attention="gka", gka_values=values, window_pattern="S")
    )  # windows of 8, and at last of 16
    cache, rotated, asked = model.new_cache(2, TOKENS), [], []
    model(torch.randint(70, (2, 20)), context=cache)
    forward, operator = Rotary.forward, attention.gaussian_attention
    monkeypatch.setattr(
        Rotary, "forward", lambda self, x, positions: rotated.append(x.shape[1]) or forward(self, x, positions)
    )
    monkeypatch.setattr(
        attention,
        "gaussian_attention",
        lambda x, sigma, **request: asked.append(request) or operator(x, sigma, **request),
    )
    model(torch.randint(70, (2, 1)), context=cache)
    assert len(asked) == 4
    if values == "rotated":
        assert rotated == [1] * 4
        for request, [stored] in zip(asked, cache.layers):
            assert (
                request["keys"] is request["values"]
                and request["keys"].untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
            )
    else:
        assert rotated == [1, 10] * 3 + [1, 18]  # the new token, then the window, the token itself and a predecessor


def test_a_full_cache_says_so():
    model = awake(SHAPE)
    cache = model.new_cache(1, 4)
    with pytest.raises(ValueError, match="holds 4 tokens a row, got 5"):
        model(torch.zeros(1, 5, dtype=torch.long), context=cache)
    cache = model.new_cache(1, 200)
    model(torch.zeros(1, 160, dtype=torch.long), context=cache)
    with pytest.raises(ValueError, match="at most 160 tokens"):
        model(torch.zeros(1, 1, dtype=torch.long), context=cache)


# The engine


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
def test_many_prompts_and_samples_at_once_are_each_as_if_alone(variant, tokenizer):
    """Whatever the number of rows: 4 prompts of different lengths, 2 samples each, which end at different times."""
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, **variant))
    prompts = ["the kernel", "", "every head learns one bandwidth and nothing else", "a"]
    sampling = Sampling(num_samples=2, max_tokens=24, temperature=1.5, top_k=0, top_p=0.95, seed=3)
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


def test_a_prompt_runs_once_however_many_samples_it_has(model, tokenizer, monkeypatch):
    seen = []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, ids, **more: seen.append(tuple(ids.shape)) or forward(self, ids, **more)
    )
    prompt = "every head learns one bandwidth"
    Engine(model, tokenizer, max_rows=4).complete([prompt], Sampling(num_samples=8, max_tokens=5, temperature=1.0))
    length = len(tokenizer.encode(prompt)) + 1
    assert [shape for shape in seen if shape[1] > 1] == [(1, length)]
    assert max(shape[0] for shape in seen) == 4


def test_the_seed_decides(model, tokenizer):
    texts = [
        Engine(model, tokenizer).complete(["the"], Sampling(num_samples=2, max_tokens=12, temperature=1.0, seed=seed))[
            0
        ]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_pieces_join_to_the_text_and_the_last_one_says_so(model, tokenizer):
    sampling = Sampling(num_samples=2, max_tokens=25, temperature=1.2, top_k=0)
    pieces = list(Engine(model, tokenizer).stream(["the", "a"], sampling))
    texts = Engine(model, tokenizer).complete(["the", "a"], sampling)
    for prompt in range(2):
        for sample in range(2):
            mine = [piece for piece in pieces if (piece.prompt, piece.sample) == (prompt, sample)]
            assert "".join(piece.text for piece in mine) == texts[prompt][sample]
            assert [piece.finished for piece in mine] == [False] * (len(mine) - 1) + [True]


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
    made, new_cache = [], type(model).new_cache
    monkeypatch.setattr(
        type(model), "new_cache", lambda *arguments, **named: made.append(new_cache(*arguments, **named)) or made[-1]
    )
    for keep_keys in (False, True):
        made.clear()
        Engine(model, tokenizer, keep_keys=keep_keys).complete(["the"], Sampling(max_tokens=3))
        assert [len(cache.layers[0]) for cache in made] == [1 + keep_keys] * 2  # of all rows, and of the prompt


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
def test_sampling_that_makes_no_sense_is_refused(model, tokenizer, fields, message):
    with pytest.raises(UserError, match=message):
        Engine(model, tokenizer).complete(["the"], Sampling(**fields))


def test_an_engine_without_rows_and_an_empty_stop_text_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        Engine(model, tokenizer, max_rows=0)
    with pytest.raises(UserError, match="stop text must not be empty"):
        Engine(model, tokenizer).complete(["the"], Sampling(), stop=[""])


# Sampling


def test_truncation_keeps_the_most_likely():
    p = torch.tensor(
        [[0.125, 0.5, 0.0625, 0.25, 0.0625]], dtype=torch.float64
    )  # exact in binary, so that limits are met exactly

    def kept(top_k=0, top_p=1.0):
        return truncate(p, top_k, top_p)[0].nonzero()[:, 0].tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 3] and kept(top_k=9) == [0, 1, 2, 3, 4]
    assert (
        kept(top_p=0.5) == [1]
        and kept(top_p=0.51) == [1, 3]
        and kept(top_p=0.75) == [1, 3]
        and kept(top_p=0.8) == [0, 1, 3]
    )
    assert kept(top_k=2, top_p=0.6) == [1] and kept(top_k=2, top_p=0.7) == [
        1,
        3,
    ]  # 0.5 is two thirds of the 0.75 that are left
    assert torch.equal(truncate(p, 2, 1.0)[0], torch.tensor([0, 0.5, 0, 0.25, 0], dtype=torch.float64))


def test_a_draw_of_zero_does_not_take_a_token_of_probability_zero():
    class Lowest(random.Random):
        def random(self):
            return 0.0

    assert pick(torch.tensor([[-9.0, 1.0, 2.0, -9.0]]), [Lowest()], Sampling(top_k=2)) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_probabilities(temperature):
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]]).expand(20_000, 4)
    counts = torch.bincount(
        torch.tensor(
            pick(logits, [random.Random(i) for i in range(20_000)], Sampling(temperature=temperature, top_k=3))
        ),
        minlength=4,
    )
    want = (torch.tensor([1.0, 0.0, -math.inf, 2.0]) / temperature).softmax(0)
    assert counts[2] == 0
    # Five standard deviations of a binomial count.
    assert ((counts / 20_000 - want).abs() <= 5 * (want * (1 - want) / 20_000).sqrt()).all()


# Text from tokens


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


def test_a_stop_text_ends_and_is_not_shown_even_across_tokens():
    texts, row = feed(["\n\nQ:"], b"one\n", b"\n", b"two\n", b"\nQ", b": three")
    assert texts == ["one", "", "\n\ntwo", "", ""] and row.finished
    assert "".join(feed(["stop"], b"a st", b"o", b"ne", None)[0]) == "a stone"
    assert feed(["b", "abc"], b"xabcy")[0] == ["x"]  # the one that begins first
    assert feed(["end"], b"the e", b"n", None)[0] == ["the ", "", "en"]  # the text ended before the stop text did
