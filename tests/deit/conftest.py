"""What the tests of vision models and of their training share. No test may change the pictures and runs."""

import pytest
import timm.layers
import torch

import tiny_vision
import vision_runs


@pytest.fixture(params=[True, False], ids=["fused", "explicit"])
def fused(request):
    """Whether models that are built in the test take the fused path, or one that builds W: timm's switch, both ways."""
    timm.layers.set_fused_attn(request.param)
    yield request.param
    timm.layers.set_fused_attn(True)


@pytest.fixture
def images():
    """Two images for `tiny_vit.small`, (2, 3, 32, 32)."""
    return torch.randn(2, 3, 32, 32)


@pytest.fixture
def photo(tmp_path):
    """The path of a picture of stripes."""
    path = tmp_path / "stripes.png"
    tiny_vision.photo(0).save(path)
    return path


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    """A softmax ViT that knows digits at 32 pixels: a run."""
    out = tmp_path_factory.mktemp("digits")
    vision_runs.train_digits(out, *vision_runs.KNOWS_DIGITS)
    assert vision_runs.accuracy(out) > 65
    return out


@pytest.fixture(scope="session")
def uninterrupted(pictures, tmp_path_factory):
    """The whole run, by the command one would type."""
    out = tmp_path_factory.mktemp("uninterrupted")
    assert "finished, top-1" in vision_runs.train(pictures, out).stdout
    return out
