"""What the live views store: an image or a text, and the features and bandwidths of every GKA layer and head.

W follows from these alone, so that the page computes its rows itself (template/kernel.js). Features are stored in half
precision; `row_bound` says what that changes.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from deit_gka.figures.sheet import Subject
from nanochat_gka.figures.maps import LayerMaps
from runs.report.blocks import data_address, encoded
from trainkit_gka.cli import UserError

BUDGET = 2_000_000  # bytes of features in one view
CANVAS = 448  # pixels of the longer side of the drawn image; images smaller than SMALL are stored as large
SMALL = 64
HALF_ROUNDING, HALF_TINY = 2.0**-11, 2.0**-25  # of the nearest half: relative, and where those are subnormal


@dataclass(frozen=True)
class LiveView:
    """A view of the page. about: the model and what it sees, in words. data: what its script reads."""

    name: str
    title: str
    about: str
    data: dict[str, Any]

    @property
    def is_text(self) -> bool:
        return "words" in self.data

    @property
    def canvas(self) -> tuple[int, int]:
        """Width and height in pixels of where the image is drawn."""
        height, width = self.data["shape"]
        return round(CANVAS * width / max(height, width)), round(CANVAS * height / max(height, width))

    @property
    def json(self) -> Markup:
        """The data as JSON that cannot end the script element it is in."""
        return Markup(json.dumps(self.data, ensure_ascii=False).replace("<", "\\u003c"))


def halves(features: list[torch.Tensor]) -> str:
    """The layers' features, (N, H, D) each, as little-endian half-precision numbers in base64.

    Raises UserError for features that are too large for them.
    """
    exact = torch.stack(features).cpu()
    if not exact.abs().max() <= torch.finfo(torch.half).max:
        raise UserError("a model's features are beyond half precision (65,504): its live view cannot be stored")
    return encoded(exact.numpy().astype("<f2").tobytes())


def row_bound(queries: torch.Tensor, keys: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """By how much storing features in half precision may change each weight, relatively: (Q, D), (K, D) -> (Q, 1).

    A feature moves by at most δ = 2^-11 |x| + 2^-25 sqrt(D), so that a distance d moves by e <= δ_q + δ_k and its
    exponent by (2 d e + e²) / 2σ². A weight is a quotient of two sums of such kernels: exp(2 max exponent) - 1.
    """
    moved = [HALF_ROUNDING * x.norm(dim=-1) + HALF_TINY * x.shape[-1] ** 0.5 for x in (queries, keys)]
    distance, error = torch.cdist(queries, keys), moved[0][:, None] + moved[1][None]
    exponent = (2 * distance * error + error**2) / (2 * sigma**2)
    return (2 * exponent.amax(-1, keepdim=True)).expm1()


def image_view(subjects: list[Subject]) -> LiveView | None:
    """One model on one or more images; as many of these as the budget allows. None without a layer with features."""
    kept = [
        (number, layer)
        for number, layer in enumerate(subjects[0].layers if subjects else [], start=1)
        if layer.features is not None
    ]
    if not kept:
        return None
    first = subjects[0]
    size = sum(layer.features.numel() for _, layer in kept) * 2
    chosen = subjects[: max(1, BUDGET // size)]
    none = [0] * first.num_heads
    layers = [
        dict(number=number, sigma=layer.sigma.tolist(), causal=False, window=None, keyOffsets=none, valueOffsets=none)
        for number, layer in kept
    ]
    tokens = first.tokens
    items = []
    for subject in chosen:
        features = [subject.layers[number - 1].features for number, _ in kept]
        items.append(dict(name=subject.image, image=picture_of(subject), features=halves(features)))
    _, heads, dim = kept[0][1].features.shape
    (rows, columns), height, width = tokens.grid, *first.pixels.shape[:2]
    data = dict(tokens=tokens.count, heads=heads, dim=dim, layers=layers, items=items, rows=rows, columns=columns)
    data |= dict(patch=tokens.patch, prefix=tokens.prefix, hasClass=tokens.has_class, shape=(height, width))
    data["start"] = tokens.token(rows // 2, columns // 2)
    about = f"{first.about}; {height} × {width} pixels, {rows} × {columns} patches, {tokens.count} tokens."
    return LiveView("image", "An image", about, data)


def picture_of(subject: Subject) -> str:
    """The image as the model sees it; small ones with larger pixels and exact."""
    image = Image.fromarray(np.uint8(np.rint(255 * subject.pixels)))
    factor = CANVAS // max(image.size) if max(image.size) < SMALL else 1
    if factor > 1:
        image = image.resize((image.width * factor, image.height * factor), Image.NEAREST)
    return data_address(image, lossless=factor > 1)


def text_view(name: str, about: str, words: list[str], maps: list[LayerMaps]) -> LiveView | None:
    """One language model on one text; as many of its first tokens as the budget allows, which see no later ones.

    words: the text of every token. None without a layer with features.
    """
    kept = [(number, layer) for number, layer in enumerate(maps, start=1) if layer.features is not None]
    if not kept:
        return None
    layers = [
        dict(
            number=number,
            sigma=layer.sigma.tolist(),
            causal=True,
            window=layer.window,
            keyOffsets=layer.key_offsets.tolist(),
            valueOffsets=layer.value_offsets.tolist(),
        )
        for number, layer in kept
    ]
    length, heads, dim = kept[0][1].features.shape
    tokens = max(1, min(length, BUDGET // (2 * heads * dim * len(kept))))
    items = [dict(name=name, features=halves([layer.features[:tokens] for _, layer in kept]))]
    data = dict(tokens=tokens, heads=heads, dim=dim, layers=layers, items=items, words=words[:tokens])
    data["start"] = 2 * tokens // 3
    about = f"{about}; the first {tokens} of {length} tokens."
    return LiveView(f"text-{name}", f"A text, {name}", about, data)
