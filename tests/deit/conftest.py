"""What the tests of vision models share."""

import pytest
import timm.layers
import torch

from digit_runs import SOFTMAX, accuracy, train


@pytest.fixture
def explicit():
    """timm's switch for attention that builds W; models built in the test take that path."""
    timm.layers.set_fused_attn(False)
    yield
    timm.layers.set_fused_attn(True)


@pytest.fixture
def images():
    """Two images for `tiny_vit.small`, (2, 3, 32, 32)."""
    return torch.randn(2, 3, 32, 32)


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A softmax ViT that knows digits at 32 pixels: a run."""
    out = tmp_path_factory.mktemp("digits")
    train(out, "--model", SOFTMAX, "--epochs", 5, "--lr", 0.2)
    assert accuracy(out) > 65
    return out
