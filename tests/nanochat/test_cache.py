"""The cache: decoding with it computes what a full pass does, and it is as small as it can be."""

import dataclasses

import pytest
import torch

import gpt_checks
from gka import attention_cost
from gpt_checks import TOKENS
from tiny_gpt import SHAPE, VARIANTS, awake

every = pytest.mark.parametrize("variant", VARIANTS, ids=str)


@every
def test_decoding_is_the_full_pass(variant):
    """In chunks, of the last token alone, and of rows of different lengths."""
    model = awake(dataclasses.replace(SHAPE, **variant))
    gpt_checks.chunks_give_the_full_pass(model)
    gpt_checks.last_only_gives_the_last_tokens_logits(model)
    gpt_checks.rows_of_different_lengths_are_independent(model)
    gpt_checks.chunks_give_the_full_pass(awake(dataclasses.replace(SHAPE, window_pattern="L", **variant)))


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
