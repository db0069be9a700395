"""The cache: decoding with it computes what a full pass does, and it is as small as it can be."""

import dataclasses

import pytest
import torch

from gka import attention_cost
from tiny_gpt import SHAPE, VARIANTS, awake

TOKENS = 40  # beyond the short window (8) of SHAPE, the context (16) and one more
every = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def assert_close(got, want):
    """In float32 a logit is a sum over 64 channels of unit size, capped at 20; four layers add their roundings."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


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
        assert_close(torch.cat([model(part, context=cache) for part in ids.split(sizes, dim=1)], dim=1), want)
        assert cache.lengths == [TOKENS] * 3
    cache = model.new_cache(3, TOKENS, last_only=True)
    for start, end in ((0, 20), (20, 21), (21, 30)):
        assert_close(model(ids[:, start:end], context=cache), want[:, end - 1 : end])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", [VARIANTS[number] for number in (0, 2, 3, 6, 7)], ids=str)
@torch.inference_mode()
def test_bfloat16_cache_equals_the_full_pass(variant, device):
    """As the trainer's models on a GPU.

    Keys derived from the cache are those of the full pass to the last bit, so what differs is the kernels' rounding.
    """
    model = awake(dataclasses.replace(SHAPE, **variant))
    ids = torch.randint(70, (2, TOKENS))
    exact = model.double()(ids)
    model = model.float().to(device)
    model.embeddings_to(torch.bfloat16)
    want, cache = model(ids.to(device)).cpu(), model.new_cache(2, TOKENS)
    got = torch.cat([model(part.to(device), context=cache).cpu() for part in ids.split(1, dim=1)], dim=1)
    assert cache.layers[0][0].dtype == torch.bfloat16
    assert (got - exact).norm() <= 1.2 * (want - exact).norm()


SIZES = [  # fields of a model, its cache's bytes over those of softmax
    (dict(attention="softmax"), 1), (dict(attention="vlt"), 1), (dict(attention="gka"), 0.5),
    (dict(attention="gka", head_offsets="PNSS"), 0.5), (dict(attention="gka", gka_values="unrotated"), 0.5),
    (dict(attention="GGGA"), 0.625),  # three layers of one tensor, one of two
    (dict(attention="gka", value_embeds="every-second"), 0.75),  # every second layer must keep both
]  # fmt: skip


@pytest.mark.parametrize("fields, ratio", SIZES, ids=str)
def test_gkas_cache_has_half_the_bytes_and_an_end(fields, ratio):
    model = awake(dataclasses.replace(SHAPE, **fields))
    softmax = 4 * attention_cost("softmax", 64, 4, 50, batch=3, itemsize=4).cache_bytes
    assert model.new_cache(3, 50).nbytes == ratio * softmax
    if model.derives_keys:
        assert model.new_cache(3, 50, keep_keys=True).nbytes == softmax
    with pytest.raises(ValueError, match="holds 4 tokens a row, got 5"):
        model(torch.zeros(1, 5, dtype=torch.long), context=model.new_cache(1, 4))
    cache = model.new_cache(1, 200)
    model(torch.zeros(1, 160, dtype=torch.long), context=cache)
    with pytest.raises(ValueError, match="at most 160 tokens"):
        model(torch.zeros(1, 1, dtype=torch.long), context=cache)
