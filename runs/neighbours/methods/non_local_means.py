"""Non-local means: Buades, Coll and Morel, "A Non-Local Algorithm for Image Denoising", CVPR 2005, section 3.

y_i = sum_j w_ij x_j with w_ij = exp(-|v(N_i) - v(N_j)|^2 / h^2) / Z_i. A token is the neighbourhood N_i, its channels
are the pixels, equally weighted (the weights of the norm sum to 1, so |.|^2 is a mean over all C channels), and h = 1
is one standard deviation of normalised tokens. Nothing is learned: it is GKA with one head and a fixed
sigma^2 = C h^2 / 2, and runs on its operator. The causal form sums over j <= i; its authors denoise images without one.
"""

import math

import torch

from gka import gaussian_attention
from runs.neighbours.mixing import About, Mixing, normalised

H = 1.0


class NonLocalMeans(Mixing, name="non-local-means"):
    about = About("Non-Local Means", "CVPR 2005", "", causal=True, complexity="N² D")

    def forward(self, q, k, v):
        x = v.transpose(1, 2).flatten(2)[:, :, None]  # (B, N, 1, C): all channels are one head
        sigma_dtype = torch.promote_types(x.dtype, torch.float32)
        log_sigma = torch.full((1,), 0.5 * math.log(x.shape[-1] * H**2 / 2), device=x.device, dtype=sigma_dtype)
        y = gaussian_attention(x, log_sigma, causal=self.causal, eps=0.0)
        return y[:, :, 0].unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def exact(self, q, k, v):
        x = v.transpose(1, 2).flatten(2)
        affinity = (-(x[:, :, None] - x[:, None]).square().mean(-1) / H**2).exp()
        affinity = affinity.masked_fill(self.hidden(x.shape[1], x.device), 0)
        return normalised(affinity, x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
