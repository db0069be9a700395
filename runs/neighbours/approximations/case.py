"""One call that is approximated, and its exact results.

Legend: H heads (of all layers, where there are several), N tokens, D head_dim, M tokens of the bank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gka import dot_product_attention, gaussian_attention
from gka.kernel import log_kernel


@dataclass(frozen=True, eq=False)
class Case:
    """What every form is given. All tensors have one dtype."""

    queries: torch.Tensor  # (H, N, D)
    keys: torch.Tensor  # (H, N, D); the queries themselves in the paper's form
    values: torch.Tensor  # (H, N, D); the keys themselves in the paper's form
    sigma: torch.Tensor  # (H,), float32
    causal: bool  # query i sees keys j <= i
    bank: torch.Tensor  # (H, M, D): keys of other texts, from which causal forms take landmarks, as these are fixed

    @property
    def landmark_pool(self) -> torch.Tensor:
        """(H, M or N, D) of which landmarks may be chosen: a landmark among a causal case's own keys tells the past of
        the future.
        """
        return self.bank if self.causal else self.keys

    def fused(self) -> torch.Tensor:
        """The operator's fastest implementation, exact: (H, N, D)."""
        keys = None if self.keys is self.queries else self._layout(self.keys)
        values = None if self.values is self.keys else self._layout(self.values)
        x, log_sigma = self._layout(self.queries), self.sigma.log().float()
        return gaussian_attention(x, log_sigma, keys=keys, values=values, causal=self.causal)[0].transpose(0, 1)

    def softmax(self) -> torch.Tensor:
        """torch's softmax attention of the same shape: what the fused operator is timed against. (H, N, D)."""
        tensors = (self._layout(tensor) for tensor in (self.queries, self.keys, self.values))
        return dot_product_attention(*tensors, causal=self.causal)[0].transpose(0, 1)

    def oracle(self, rows: torch.Tensor) -> torch.Tensor:
        """y of some query rows in float64, from the definition (paper eq. 3, 4 and 7, with eps = 0): (H, rows, D)."""
        queries, keys = (self._layout(tensor).double() for tensor in (self.queries, self.keys))
        log_sigma, places, parts = self.sigma.double().log(), torch.arange(self.keys.shape[1]), []
        for chosen in rows.split(64):
            exponent = log_kernel(queries[:, chosen], keys, log_sigma)[0]
            if self.causal:
                exponent = exponent.masked_fill(places > chosen[:, None], float("-inf"))
            parts.append(exponent.softmax(dim=-1) @ self.values.double())
        return torch.cat(parts, dim=1)

    @staticmethod
    def _layout(tensor: torch.Tensor) -> torch.Tensor:
        """(H, N, D) as the operator takes it: (1, N, H, D)."""
        return tensor.transpose(0, 1)[None].contiguous()


def random_case(tokens: int, causal: bool, seed: int, heads: int = 3, head_dim: int = 64) -> Case:
    """RMS-normalised normal features, sigma^2 from sqrt(D) to D over the heads."""
    generator = torch.Generator().manual_seed(seed)
    x, bank = (
        F.rms_norm(torch.randn(heads, count, head_dim, generator=generator), (head_dim,))
        for count in (tokens, min(tokens, 4096))
    )
    sigma = torch.linspace(head_dim**0.5, head_dim, heads).sqrt()
    return Case(x, x, x, sigma, causal, bank)
