"""Warnings of bandwidths that make the kernel the identity or a plain mean."""

import math

import pytest

from gka import bandwidth_warnings

CASES = [(0.0, "small"), (5.6e-3, "small"), (5.7e-3, ""), (64**0.25, ""), (1130, ""), (1132, "large")]


@pytest.mark.parametrize("sigma, fault", [*CASES, (math.inf, "large")])
def test_a_bandwidth_is_judged_by_what_it_does_to_features_of_its_length(sigma, fault):
    """Tokens that differ by 1 % of the norm have no weight at all; or opposite ones have the same to 1e-4."""
    warnings = bandwidth_warnings(3, [1.0, sigma, sigma], 64, "--lr")
    assert [*warnings] == (["sigma of layer_3, heads 1, 2"] if fault else [])
    assert all(fault in line and "--lr" in line for line in warnings.values())
    norm = 64**0.5
    near, far = (math.exp(-(distance**2) / (2 * sigma**2)) if sigma else 0.0 for distance in (norm / 100, 2 * norm))
    assert (near < math.exp(-100)) == (fault == "small") and (far > 1 - 1e-4) == (fault == "large")
