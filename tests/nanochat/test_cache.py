"""The cache: decoding with it computes what a full pass does, and it is as small as it can be."""

import dataclasses

import pytest
import torch

from gka import attention_cost
from tiny_gpt import SHAPE, VARIANTS, awake

TOKENS = 40  # beyond the short window (8) of SHAPE, the context (16) and one more
# float32: a logit is a sum over 64 channels of unit size, capped at 20; four layers add their roundings.
LOGITS = dict(rtol=0, atol=1e-5)
every = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@every
@pytest.mark.parametrize("window_pattern", ["SL", "L"])
@torch.inference_mode()
def test_decoding_in_chunks_is_the_full_pass(variant, window_pattern):
    model = awake(dataclasses.replace(SHAPE, window_pattern=window_pattern, **variant))
    ids = torch.randint(70, (3, TOKENS))
    want = model(ids)
    singly, chunks = [1] * TOKENS, [5, 1, 1, 7, 1, 20, 1, 1, 1, 1, 1]
    cases = [(singly, False), (chunks, False), ([TOKENS], False)] + [(singly, True)] * model.derives_keys
    for sizes, keep_keys in cases:
        cache = model.new_cache(3, TOKENS, keep_keys=keep_keys)
        got = torch.cat([model(part, context=cache) for part in ids.split(sizes, dim=1)], dim=1)
        torch.testing.assert_close(got, want, **LOGITS)
        assert cache.lengths == [TOKENS] * 3


@every
@torch.inference_mode()
def test_last_only_gives_the_last_tokens_logits(variant):
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (3, TOKENS))
    want, cache = model(ids), model.new_cache(3, TOKENS, last_only=True)
    for start, end in ((0, 20), (20, 21), (21, 30)):
        got = model(ids[:, start:end], context=cache)
        torch.testing.assert_close(got, want[:, end - 1 : end], **LOGITS)


@every
@torch.inference_mode()
def test_rows_of_different_lengths_are_independent(variant):
    """Prompts of 3, 12, 12, 1 tokens; all grow together, by several tokens or one; one leaves, another replaces it."""
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (4, TOKENS))
    want = model(ids)
    cache, rows = model.new_cache(4, TOKENS, in_use=0), [0, 1, 2, 3]
    for row, length in enumerate((3, 12, 12, 1)):
        prompt = model.new_cache(1, length)
        model(ids[row : row + 1, :length], context=prompt)
        cache.take(prompt)

    def grow(size):
        places = [(row, slice(start, start + size)) for row, start in zip(rows, cache.lengths)]
        got = model(torch.stack([ids[place] for place in places]), context=cache)
        torch.testing.assert_close(got, torch.stack([want[place] for place in places]), **LOGITS)

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
@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[2], VARIANTS[3], VARIANTS[6], VARIANTS[7]], ids=str)
def test_bfloat16_cache_equals_the_full_pass(variant, device):
    """As the trainer's models on a GPU.

    Keys derived from the cache are those of the full pass to the last bit, so what differs is the kernels' rounding.
    """
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
    def nbytes(keep_keys=False, **fields):
        return awake(dataclasses.replace(SHAPE, **fields)).new_cache(3, 50, keep_keys=keep_keys).nbytes

    softmax = nbytes()
    assert softmax == 4 * attention_cost("softmax", 64, 4, 50, batch=3, itemsize=4).cache_bytes
    for fields in (dict(), dict(head_offsets="PNSS"), dict(gka_values="normalised")):
        assert nbytes(attention="gka", **fields) * 2 == softmax
    assert nbytes(attention="vlt") == softmax
    assert nbytes(attention="gka", gka_values="normalised", keep_keys=True) == softmax
    assert nbytes(attention="GGGA") * 8 == softmax * 5  # three layers of one tensor, one of two
    assert nbytes(attention="gka", value_embeds="all") * 4 == softmax * 3  # every second layer must keep both


def test_a_full_cache_is_an_error():
    model = awake(SHAPE)
    cache = model.new_cache(1, 4)
    with pytest.raises(ValueError, match="holds 4 tokens a row, got 5"):
        model(torch.zeros(1, 5, dtype=torch.long), context=cache)
    cache = model.new_cache(1, 200)
    model(torch.zeros(1, 160, dtype=torch.long), context=cache)
    with pytest.raises(ValueError, match="at most 160 tokens"):
        model(torch.zeros(1, 1, dtype=torch.long), context=cache)
