"""Pictures of attention."""

import pytest
import torch

from deit_gka.figures import cls_attention as figures
from tiny_vision import SIZE
from vision_runs import NAMES, micro


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_attention_maps_are_the_weights_the_model_used(name):
    model, images = micro(3, name), torch.randn(2, 3, SIZE, SIZE)
    before, outputs = model.eval()(images).detach(), {}

    def keep(layer):
        return lambda module, args, output: outputs.update({layer: (args[0], output)})

    hooks = [block.attn.register_forward_hook(keep(layer)) for layer, block in enumerate(model.blocks)]
    maps = [layer.weights for layer in figures.attention_maps(model, images)]
    for hook in hooks:
        hook.remove()
    assert [weights.shape for weights in maps] == [(2, 2, 17, 17)] * 2 and not torch.equal(maps[0], maps[1])
    for layer, weights in enumerate(maps):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17))
        attention, (x, output) = model.blocks[layer].attn, outputs[layer]
        heads = x.unflatten(-1, (2, -1))
        if name == "deit_tiny_patch16_224":
            values = attention.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)[2]
        else:
            values = attention.values(heads)
        again = attention.proj(torch.einsum("bhij,bjhd->bihd", weights, values).flatten(2))
        torch.testing.assert_close(again, output, rtol=1e-4, atol=1e-5)
    assert all(not block.attn._forward_pre_hooks for block in model.blocks)  # none is left
    torch.testing.assert_close(model(images), before)
    seen = figures.cls_map(maps[-1], (4, 4))
    assert seen.shape == (2, 2, 4, 4) and seen[1, 0, 2, 3] == maps[-1][1, 0, 0, 1 + 2 * 4 + 3]


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


def test_hooks_go_when_the_model_fails():
    model = micro(3)
    with pytest.raises(AssertionError):
        figures.attention_maps(model, torch.randn(1, 3, SIZE + 1, SIZE))
    assert all(not block.attn._forward_pre_hooks for block in model.blocks)


def test_the_picture_of_cls_attention(tmp_path):
    from PIL import Image

    rows = {name: micro(3, name) for name in NAMES[:2]}
    path = figures.draw_cls_attention(rows, torch.randn(3, 3, SIZE, SIZE), tmp_path / "cls.png", titles=["a", "b", "c"])
    width, height = Image.open(path).size
    assert width > 300 and height > 300
