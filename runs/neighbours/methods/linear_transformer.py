"""Linear transformer: Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", ICML 2020, arXiv 2006.16236.

y_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j), with phi(x) = elu(x) + 1. The causal form sums over
j <= i.
"""

import torch.nn.functional as F

from runs.neighbours.feature_maps import feature_attention
from runs.neighbours.mixing import About, Mixing, normalised


class LinearTransformer(Mixing, name="linear-transformer"):
    about = About("Linear Transformer", "arXiv 2006.16236", "QKV", causal=True, complexity="N D²")

    def forward(self, q, k, v):
        return feature_attention(F.elu(q) + 1, F.elu(k) + 1, v, self.causal)

    def exact(self, q, k, v):
        affinity = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        return normalised(affinity.masked_fill(self.hidden(q.shape[2], q.device), 0), v)
