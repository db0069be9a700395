"""Nyströmformer: Xiong et al., AAAI 2021, arXiv 2102.03902.

softmax(q k^T) is replaced by softmax(q k~^T) Z softmax(q~ k^T), scores divided by sqrt(D), where q~ and k~ are means of
m segments of the sequence and Z is the iterative inverse of softmax(q~ k~^T). Segments may differ in length by one.
The depthwise convolution of the values that its authors add beside it is left out. The weights may be negative. A
landmark holds later tokens, so that it has no causal form.
"""

import torch
import torch.nn.functional as F

from runs.neighbours.mixing import About, Mixing, scores
from runs.neighbours.newton import iterative_inverse


class Nystromformer(Mixing, name="nystromformer"):
    about = About("Nyströmformer", "arXiv 2102.03902", "QKV", causal=False, complexity="N m D + m³")

    def default_size(self):
        return min(64, self.tokens)

    def landmarks(self, x):
        """Means of the segments, (B, H, m, D)."""
        return F.adaptive_avg_pool1d(x.flatten(0, 1).mT, min(self.size, x.shape[2])).mT.unflatten(0, x.shape[:2])

    def forward(self, q, k, v):
        queries, keys = self.landmarks(q), self.landmarks(k)
        inverse = iterative_inverse(scores(queries, keys).softmax(-1))
        read = scores(queries, k).softmax(-1) @ v
        return scores(q, keys).softmax(-1) @ (inverse @ read)

    def exact(self, q, k, v):
        tokens, segments = q.shape[2], min(self.size, q.shape[2])
        bounds = [(s * tokens // segments, -(-(s + 1) * tokens // segments)) for s in range(segments)]
        queries, keys = (torch.stack([x[:, :, a:b].mean(2) for a, b in bounds], dim=2) for x in (q, k))
        inner = iterative_inverse(scores(queries, keys).softmax(-1))
        weights = scores(q, keys).softmax(-1) @ inner @ scores(queries, k).softmax(-1)  # N x N
        return weights @ v
