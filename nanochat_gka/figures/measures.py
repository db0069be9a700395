"""Numbers that say in short what a head does with a text, as means over its queries.

The first token sees itself alone, whatever the head: it is left out. Everything is (..., T, T) -> (...), of weights by
the token whose value is mixed (`LayerWeights.reads`). T must be at least 2.
"""

import torch

from gka.masking import Mask
from nanochat_gka.figures.maps import LayerWeights
from trainkit_gka.figures.measures import effective_tokens


def effective(weights: torch.Tensor) -> torch.Tensor:
    """exp(entropy) of a row: 1 where one token has all the weight, i + 1 where query i weights all it sees alike."""
    return effective_tokens(weights[..., 1:, :])


def self_weight(weights: torch.Tensor) -> torch.Tensor:
    """The weight of the token itself."""
    return weights.diagonal(dim1=-2, dim2=-1)[..., 1:].mean(-1)


def previous_weight(weights: torch.Tensor) -> torch.Tensor:
    """The weight of the token before."""
    return weights.diagonal(offset=-1, dim1=-2, dim2=-1).mean(-1)


def first_weight(weights: torch.Tensor) -> torch.Tensor:
    """The weight of the text's first token, where heads may leave what they have no use for."""
    return weights[..., 1:, 0].mean(-1)


def attended_distance(weights: torch.Tensor) -> torch.Tensor:
    """How many tokens back a query looks: the distance weighted by its row."""
    places = torch.arange(weights.shape[-1])
    distances = (places[:, None] - places).clamp(min=0)
    return (weights * distances).sum(-1)[..., 1:].mean(-1)


MEASURES = {
    "effective tokens": effective,
    "weight of itself": self_weight,
    "weight of the token before": previous_weight,
    "weight of the first token": first_weight,
    "mean distance (tokens)": attended_distance,
}


def uniform(layer: LayerWeights) -> torch.Tensor:
    """W of a head that weights all it sees alike, (T, T)."""
    count = layer.weights.shape[-1]
    visible = Mask(causal=True, window=layer.window).dense(count, count, torch.device("cpu")).float()
    return visible / visible.sum(-1, keepdim=True)
