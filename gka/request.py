"""What an implementation is asked for: one frozen object, made and checked at the door (api.py)."""

from dataclasses import dataclass

import torch

from gka.masking import Mask


@dataclass(frozen=True)
class Request:
    """The tensors of one attention, in one dtype and on one device, and who may look at whom.

    Legend: B batch, Tq queries, Tk keys, H heads, D head_dim.
    """

    x: torch.Tensor  # queries, (B, Tq, H, D)
    keys: torch.Tensor | None  # (B, Tk, H, D), or None: x
    values: torch.Tensor | None  # (B, Tk, H, D), or None: the keys
    mask: Mask
    needs_grad: bool

    @property
    def own_keys(self) -> bool:
        """Whether the queries are the keys too (self-attention)."""
        return self.keys is None

    @property
    def own_values(self) -> bool:
        """Whether the keys are the values too."""
        return self.values is None

    @property
    def key_features(self) -> torch.Tensor:
        """The keys, whichever tensor they are."""
        return self.x if self.keys is None else self.keys

    @property
    def value_features(self) -> torch.Tensor:
        """The values, whichever tensor they are."""
        return self.key_features if self.values is None else self.values

    @property
    def num_queries(self) -> int:
        return self.x.shape[1]

    @property
    def num_keys(self) -> int:
        return self.key_features.shape[1]

    @property
    def head_dim(self) -> int:
        return self.x.shape[3]


@dataclass(frozen=True)
class GaussianRequest(Request):
    """One call of `gaussian_attention`."""

    log_sigma: torch.Tensor  # (H,)
    eps: float | None  # added to the row sum (paper eq. 4); None: the rows are normalised as a softmax
    constant_norm: bool  # the keys of a head promise to have one norm


@dataclass(frozen=True)
class SoftmaxRequest(Request):
    """One call of `dot_product_attention`; x are its queries."""

    scale: float
