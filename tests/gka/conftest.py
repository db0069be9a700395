"""Every buffer that is allocated without being written is full of NaN in the operator's tests; a number of threads."""

import importlib.util

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter():
    if importlib.util.find_spec("triton") is None:
        yield
        return
    import interpreter

    with interpreter.patched_once_a_launch():
        yield


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan():
    """By torch's deterministic mode, for `empty` in all its forms; what has no deterministic way only warns."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
