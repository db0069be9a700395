"""An approximation in the place of a layer's operator, with landmarks that are learned."""

import torch
import torch.nn.functional as F
from torch import nn

from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.forms import FORMS, WINDOW, attend, nystrom


class Approximation(nn.Module):
    """y of one layer: exact on a block of tokens and those beside it, elsewhere through so many landmarks; 0: nothing.

    Landmarks start at normalised normal vectors, (H, m, D), and belong to the layer: those of a sequence would tell of
    its future.
    """

    def __init__(self, heads: int, head_dim: int, block: int, landmarks: int):
        super().__init__()
        self.block = block
        drawn = F.rms_norm(torch.randn(heads, landmarks, head_dim), (head_dim,))
        self.landmarks = nn.Parameter(drawn) if landmarks else None

    def forward(self, queries, keys, values, log_sigma: torch.Tensor, causal: bool) -> torch.Tensor:
        """y, (B, N, H, D), of tensors of that shape; log_sigma (H,)."""
        batch = len(queries)
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (queries, keys, values))  # (B H, N, D)
        case = Case(q, k, v, log_sigma.exp().repeat(batch), causal, bank=k[:, :0])
        if self.landmarks is None:
            features = FORMS[WINDOW].features(case, size=0, seed=0)
        else:
            features = nystrom(case, self.landmarks.repeat(batch, 1, 1))
        y = attend(case, features, near=True, block=self.block).output
        return y.unflatten(0, (batch, -1)).transpose(1, 2)
