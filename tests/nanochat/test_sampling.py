"""Sampling: which tokens may be drawn, and how often each is."""

import math
import random

import pytest
import torch

from nanochat_gka.generation.sampling import Sampling, pick, truncate


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


def test_a_token_of_probability_zero_is_never_drawn():
    class Lowest(random.Random):
        def random(self):
            return 0.0

    assert pick(torch.tensor([[-9.0, 1.0, 2.0, -9.0]]), [Lowest()], Sampling(top_k=2)) == [1]


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
