"""Vision models small enough to build in a moment: 5 tokens of 24 channels, 3 heads of 8."""

import copy

import pytest
import timm
import torch
from torch import nn

from deit_gka.model.registry import OUR_KINDS, model_name

SMALL = dict(img_size=32, depth=2, embed_dim=24, num_heads=3, num_classes=5)
kinds = pytest.mark.parametrize("kind", OUR_KINDS)


def create(kind: str = "gka", **settings) -> nn.Module:
    """The model registered for `kind`, or timm's own for softmax, made small."""
    return timm.create_model(model_name("tiny", kind), **{**SMALL, **settings})


def small(kind: str = "gka", **settings) -> nn.Module:
    """`create` with weights drawn wide, so that tokens differ and mixing them matters."""
    model = create(kind, **settings)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=p[0].numel() ** -0.5 if name.endswith(".weight") else 1.0)
    return model


@torch.no_grad()
def assert_as_exact(model: nn.Module, outputs: torch.Tensor, images: torch.Tensor) -> None:
    """The outputs are the model's in float64, up to twice the model's error in float32 and the rounding of its sums.

    A sum of n terms rounds by at most n eps of the sum of their sizes; the longest is of the MLP's hidden channels.
    """
    exact = copy.deepcopy(model).double()(images.double())
    terms = max(p.shape[-1] for p in model.parameters() if p.ndim > 1)
    allowed = 2 * (model(images) - exact).norm() + terms * torch.finfo(torch.float32).eps * exact.norm()
    assert (outputs.double() - exact).norm() <= allowed
