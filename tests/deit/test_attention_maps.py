"""Pictures of attention."""

import pytest
import torch

from deit_gka.figures import cls_attention as figures
from tiny_vision import SIZE
from vision_runs import NAMES, micro


def test_the_class_token_sees_the_patches_row_by_row():
    weights = torch.rand(2, 3, 1 + 4 * 5, 1 + 4 * 5)
    seen = figures.cls_map(weights, (4, 5))
    assert seen.shape == (2, 3, 4, 5) and seen[1, 0, 2, 3] == weights[1, 0, 0, 1 + 2 * 5 + 3]


@pytest.mark.parametrize("name", NAMES)
def test_of_no_images_there_are_no_maps(name):
    for layer in figures.attention_maps(micro(3, name), torch.randn(0, 3, SIZE, SIZE)):
        assert layer.weights.shape == (0, 2, 17, 17) and layer.error == 0
        assert layer.features is None or len(layer.features) == 0


def test_maps_in_pixels_are_never_negative():
    """One patch that has it all: bicubic swings below 0 around it."""
    maps = torch.zeros(1, 1, 4, 4)
    maps[..., 1, 2] = 1
    assert torch.nn.functional.interpolate(maps, size=(32, 32), mode="bicubic", align_corners=False).min() < -0.05
    pixels = figures.to_pixels(maps, 32)
    assert pixels.shape == (1, 1, 32, 32) and pixels.min() == 0 and pixels.argmax() // 32 in range(8, 16)


def test_the_picture_of_cls_attention(tmp_path):
    from PIL import Image

    rows = {name: micro(3, name) for name in NAMES[:2]}
    path = figures.draw_cls_attention(rows, torch.randn(3, 3, SIZE, SIZE), tmp_path / "cls.png", titles=["a", "b", "c"])
    width, height = Image.open(path).size
    assert width > 300 and height > 300
