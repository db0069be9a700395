"""What the tests of vision models share."""

import pytest
import timm.layers
import torch


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
