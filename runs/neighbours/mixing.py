"""What every method is here: a mixing of tokens, (q, k, v) -> y, and the layer around it that all of them share.

Legend: B batch, H heads, N tokens, D head_dim, C = H * D. Tensors of a mixing are (B, H, N, D).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn


@dataclass(frozen=True)
class About:
    """What tables say of a method.

    label: its row in the paper's Table 1. projections: letters of the W_Q, W_K, W_V that it learns; all have W_O.
    causal: whether its definition has a causal form. complexity: of the mixing, in N tokens, m features or landmarks.
    """

    label: str
    reference: str
    projections: str
    causal: bool
    complexity: str


class Mixing(nn.Module, ABC):
    """A method: `forward` as one computes it, `exact` as its equation is written, with every weight built.

    tokens: the length that learned parameters are for; shorter inputs use a part of them. size: the number of features,
    landmarks or compressed tokens, m in tables, where a method has it; None takes its own default. Raises ValueError
    if a causal form is asked of a method without.
    """

    about: ClassVar[About]
    METHODS: ClassVar[dict[str, type["Mixing"]]] = {}

    def __init_subclass__(cls, name: str, **arguments):
        super().__init_subclass__(**arguments)
        Mixing.METHODS[name] = cls

    def __init__(self, heads: int, head_dim: int, tokens: int, causal: bool = False, size: int | None = None):
        super().__init__()
        if causal and not self.about.causal:
            raise ValueError(f"{self.about.label} has no causal form")
        self.heads, self.head_dim, self.tokens, self.causal = heads, head_dim, tokens, causal
        self.size = self.default_size() if size is None else size

    def default_size(self) -> int:
        """m of the method; 0 where it has none."""
        return 0

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """y, (B, H, N, D), of three tensors of that shape."""

    @abstractmethod
    def exact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The same, from the N x N weights of the paper's equation."""

    def hidden(self, tokens: int, device: torch.device) -> torch.Tensor:
        """(N, N), True where a query must not look: nowhere, or at later tokens."""
        nothing = torch.zeros(tokens, tokens, dtype=torch.bool, device=device)
        return ~torch.ones_like(nothing).tril() if self.causal else nothing


class MixingLayer(nn.Module):
    """(B, N, C) -> (B, N, C): the method's input projections as one linear map, mixing, W_O. Biases as in DeiT.

    timm builds it as a layer of its ViT and initialises the linear maps as those of its own attention.
    """

    def __init__(self, mixing: Mixing):
        super().__init__()
        self.mixing, dim, letters = mixing, mixing.heads * mixing.head_dim, mixing.about.projections
        self.inputs = nn.Linear(dim, len(letters) * dim) if letters else None
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, **unused) -> torch.Tensor:
        shape = (-1, self.mixing.heads, self.mixing.head_dim)
        if self.inputs is None:
            q = k = v = x.unflatten(-1, shape[1:]).transpose(1, 2)
        else:
            q, k, v = self.inputs(x).unflatten(-1, shape).permute(2, 0, 3, 1, 4)
        return self.proj(self.mixing(q, k, v).transpose(1, 2).flatten(2))


def normalised(affinity: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """affinity @ v with every row of the affinities, (B, H, N, N), divided by its sum."""
    return affinity / affinity.sum(-1, keepdim=True) @ v


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The scaled dot products q.k / sqrt(D), (B, H, N, M)."""
    return q @ k.mT / q.shape[-1] ** 0.5
