"""Performer: Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, arXiv 2009.14794, FAVOR+.

exp(q.k / sqrt(D)) is the mean over omega of phi(q) phi(k) with phi(x) = exp(omega.x - |x|^2 / 2) / sqrt(m), x scaled by
D^(-1/4) (lemma 1), omega orthogonal in blocks (section 2.4). m = D ln D features, as its authors use. omega is drawn
once. Exponents are shifted, per query and over all keys, which cancels; causal keys are not shifted.
"""

import math

from runs.neighbours.feature_maps import feature_attention, orthogonal_features, positive_exponents
from runs.neighbours.mixing import About, Mixing, normalised


class Performer(Mixing, name="performer"):
    about = About("Performer", "arXiv 2009.14794", "QKV", causal=True, complexity="N m D")

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.register_buffer("omega", orthogonal_features(self.size, self.head_dim))

    def default_size(self):
        return int(self.head_dim * math.log(self.head_dim))

    def _exponents(self, x):
        return positive_exponents(x * self.head_dim**-0.25, self.omega)

    def forward(self, q, k, v):
        queries, keys = self._exponents(q), self._exponents(k)
        queries = queries - queries.detach().amax(-1, keepdim=True)
        if not self.causal:
            keys = keys - keys.detach().amax((-2, -1), keepdim=True)
        return feature_attention(queries.exp(), keys.exp(), v, self.causal)

    def exact(self, q, k, v):
        affinity = self._exponents(q).exp() @ self._exponents(k).exp().mT / self.size
        return normalised(affinity.masked_fill(self.hidden(q.shape[2], q.device), 0), v)
