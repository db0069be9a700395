"""Vision models small enough to build in a moment: 5 tokens of 24 channels, 3 heads of 8."""

import pytest
import timm
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
