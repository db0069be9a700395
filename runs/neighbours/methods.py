"""The methods of the paper's Table 1, each as its own paper has it: a mixing of tokens, (q, k, v) -> y.

Legend: B batch, H heads, N tokens, D head_dim, C = H * D, m features or landmarks. A mixing has (B, H, N, D) tensors.
A method has `forward`, as one computes it, and `exact`, its equation with every weight built.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from gka import gaussian_attention

CHUNK = 128  # tokens whose products are built at once in the causal form of feature maps
ITERATIONS = 6  # of the inverse of Nyströmformer and Skyformer, four products each
WINDOW, REACH = 64, 2  # Krause: tokens in reach of causal text, and rows and columns to each side in a grid of patches


@dataclass(frozen=True)
class About:
    """What tables say of a method.

    label: its row in the paper's Table 1. projections: letters of the W_Q, W_K, W_V that it learns; all have W_O.
    causal: whether its definition has a causal form. complexity: of the mixing.
    """

    label: str
    projections: str
    causal: bool
    complexity: str


class Mixing(nn.Module, ABC):
    """A method, for sequences of `tokens`; shorter inputs use a part of its parameters.

    size: m of a method that has one; None takes its own default. Raises ValueError if a causal form is asked of a
    method without.
    """

    about: ClassVar[About]

    def __init__(self, heads: int, head_dim: int, tokens: int, causal: bool = False, size: int | None = None):
        super().__init__()
        if causal and not self.about.causal:
            raise ValueError(f"{self.about.label} has no causal form")
        self.heads, self.head_dim, self.tokens, self.causal = heads, head_dim, tokens, causal
        self.size = self.default_size() if size is None else size

    def default_size(self) -> int:
        """m of the method; 0 where it has none."""
        return 0

    def other_flops(self, tokens: int) -> int:
        """FLOPs of one sequence, forward, that are no matrix products, where these are not all of the work."""
        return 0

    @abstractmethod
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """y, (B, H, N, D), of three tensors of that shape."""

    @abstractmethod
    def exact(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The same, from the N x N weights of the paper's equation."""

    def normalised(self, affinity: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """affinity @ v with every row of the affinities, (B, H, N, N), divided by its sum; over j <= i where causal."""
        affinity = affinity.tril() if self.causal else affinity
        return affinity / affinity.sum(-1, keepdim=True) @ v


class MixingLayer(nn.Module):
    """(B, N, C) -> (B, N, C): the method's input projections as one linear map, mixing, W_O. Biases as in DeiT.

    timm initialises the linear maps as those of its own attention.
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


class NonLocalMeans(Mixing):
    """Buades, Coll and Morel, "A Non-Local Algorithm for Image Denoising", CVPR 2005, section 3.

    y_i = sum_j w_ij x_j with w_ij = exp(-|v(N_i) - v(N_j)|^2 / h^2) / Z_i. A token is the neighbourhood N_i, its
    channels are the pixels, equally weighted (the weights of the norm sum to 1, so |.|^2 is a mean over all C
    channels), and h = 1 is one standard deviation of normalised tokens. Nothing is learned: it is GKA with one head and
    a fixed sigma^2 = C h^2 / 2, and runs on its operator. Its authors denoise images without a causal form.
    """

    about = About("Non-Local Means", "", causal=True, complexity="N² D")
    H = 1.0

    def forward(self, q, k, v):
        x = v.transpose(1, 2).flatten(2)[:, :, None]  # (B, N, 1, C): all channels are one head
        sigma_dtype = torch.promote_types(x.dtype, torch.float32)
        log_sigma = torch.full((1,), 0.5 * math.log(x.shape[-1] * self.H**2 / 2), device=x.device, dtype=sigma_dtype)
        y = gaussian_attention(x, log_sigma, causal=self.causal, eps=0.0)
        return y[:, :, 0].unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)

    def exact(self, q, k, v):
        x = v.transpose(1, 2).flatten(2)
        affinity = (-(x[:, :, None] - x[:, None]).square().mean(-1) / self.H**2).exp()
        return self.normalised(affinity, x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)


# Feature maps: phi(q).phi(k) in place of exp(q.k)


def feature_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> torch.Tensor:
    """y_i = phi(q_i) (sum_j phi(k_j) v_j^T) / phi(q_i) (sum_j phi(k_j)), over j <= i where causal.

    queries, keys: phi of them, (B, H, N, m). values: (B, H, N, D). The causal form keeps the sums of whole chunks and
    builds products inside a chunk alone. Linear in N.
    """
    values = torch.cat([values, torch.ones_like(values[..., :1])], dim=-1)  # the last channel sums the weights
    if causal:
        tokens = queries.shape[2]
        padded = (F.pad(t, (0, 0, 0, -tokens % CHUNK)).unflatten(2, (-1, CHUNK)) for t in (queries, keys, values))
        q, k, v = padded  # (B, H, chunks, CHUNK, ...)
        of_chunks = k.mT @ v
        before = of_chunks.cumsum(2).roll(1, 2)
        before = torch.cat([torch.zeros_like(before[:, :, :1]), before[:, :, 1:]], dim=2)
        mixed = ((q @ k.mT).tril() @ v + q @ before).flatten(2, 3)[:, :, :tokens]
    else:
        mixed = queries @ (keys.mT @ values)
    return mixed[..., :-1] / mixed[..., -1:]


def orthogonal_features(features: int, head_dim: int) -> torch.Tensor:
    """omega, (m, D): rows orthogonal in blocks of D, with the lengths of Gaussian vectors (Performer, section 2.4).

    As its authors' code: the signs of a plain QR are not random, so that many features keep a small bias.
    """
    blocks = [torch.linalg.qr(torch.randn(head_dim, head_dim))[0] for _ in range(-(-features // head_dim))]
    lengths = torch.randn(features, head_dim).norm(dim=-1, keepdim=True)
    return torch.cat(blocks)[:features] * lengths


def positive_exponents(x: torch.Tensor, omega: torch.Tensor) -> torch.Tensor:
    """omega.x - |x|^2 / 2, (..., m): exp of it is the positive random feature map of exp(x.y) (Performer, lemma 1)."""
    return x @ omega.mT.to(x.dtype) - x.square().sum(-1, keepdim=True) / 2


class LinearTransformer(Mixing):
    """Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", ICML 2020,
    arXiv 2006.16236.

    y_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j), with phi(x) = elu(x) + 1.
    """

    about = About("Linear Transformer", "QKV", causal=True, complexity="N D²")

    def forward(self, q, k, v):
        return feature_attention(F.elu(q) + 1, F.elu(k) + 1, v, self.causal)

    def exact(self, q, k, v):
        return self.normalised((F.elu(q) + 1) @ (F.elu(k) + 1).mT, v)


class Performer(Mixing):
    """Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, arXiv 2009.14794, FAVOR+.

    exp(q.k / sqrt(D)) is the mean over omega of phi(q) phi(k) with phi(x) = exp(omega.x - |x|^2 / 2) / sqrt(m), x
    scaled by D^(-1/4) (lemma 1), omega orthogonal in blocks (section 2.4). m = D ln D features, as its authors use.
    omega is drawn once. Exponents are shifted, per query and over all keys, which cancels; causal keys are not shifted.
    """

    about = About("Performer", "QKV", causal=True, complexity="N m D")

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
        return self.normalised(self._exponents(q).exp() @ self._exponents(k).exp().mT / self.size, v)


def transform_length(tokens: int) -> int:
    """A power of two at which what wraps around a convolution of all distances stays in front of what is read."""
    return 2 ** math.ceil(math.log2(2 * tokens - 1))


class KernelizedRPE(Mixing):
    """Luo et al., "Stable, Fast and Accurate: Kernelized Attention with Relative Positional Encoding", NeurIPS 2021,
    arXiv 2106.12566.

    y_i = sum_j e^(b_(j-i)) phi(q_i).phi(k_j) v_j / sum_j e^(b_(j-i)) phi(q_i).phi(k_j): Performer's positive features
    of unit queries and keys (normalised PRF), and a learned b of each head and distance. The sums over j are products
    with a Toeplitz matrix, by the Fourier transform. Causal: e^b = 0 for j > i; the transform's rounding still carries
    later tokens.
    """

    about = About("Kernelized RPE", "QKV", causal=True, complexity="N log N m D")

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.register_buffer("omega", orthogonal_features(self.size, self.head_dim))
        self.bias = nn.Parameter(torch.zeros(self.heads, 2 * self.tokens - 1))  # of distances j - i, 1 - N to N - 1

    def default_size(self):
        return 32

    def other_flops(self, tokens):
        """Fourier transforms: phi(k) v^T, 5 L log2 L for each complex transform of length L and half for a real one,
        there and back, and 6 for each complex product of spectra, which are half as long.
        """
        length, rows = transform_length(tokens), self.size * (self.head_dim + 1)
        transform = 5 * length * math.ceil(math.log2(length)) // 2
        return self.heads * ((2 * rows + 1) * transform + rows * (tokens + 6 * (length // 2 + 1)))

    def _features(self, x):
        return positive_exponents(F.normalize(x, dim=-1), self.omega).exp()

    def _weights(self, tokens):
        """e^b of the distances of N tokens, (H, 2 N - 1); 0 for later ones where causal."""
        weights = self.bias[:, self.tokens - tokens : self.tokens + tokens - 1].exp()
        if not self.causal:
            return weights
        return weights * (torch.arange(1 - tokens, tokens, device=weights.device) <= 0)

    def forward(self, q, k, v):
        tokens, length = q.shape[2], transform_length(q.shape[2])
        queries, keys = self._features(q), self._features(k)
        values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        outer = (keys[..., None] * values[..., None, :]).transpose(2, 4)  # (B, H, D + 1, m, N)
        # sum_j w_(j-i) outer_j is a convolution with w reversed: its distance i - j runs from 1 - N to N - 1.
        spectrum = torch.fft.rfft(self._weights(tokens).flip(-1), length)[:, None, None]
        summed = torch.fft.irfft(torch.fft.rfft(outer, length) * spectrum, length)[..., tokens - 1 : 2 * tokens - 1]
        mixed = torch.einsum("bhnm,bhemn->bhne", queries, summed)
        return mixed[..., :-1] / mixed[..., -1:]

    def exact(self, q, k, v):
        token = torch.arange(q.shape[2], device=q.device)
        relative = self.bias[:, token - token[:, None] + self.tokens - 1].exp()  # (H, N, N)
        return self.normalised(relative * (self._features(q) @ self._features(k).mT), v)


# Low rank: a few compressed tokens or landmarks. Each holds later tokens, so that there is no causal form.


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The scaled dot products q.k / sqrt(D), (B, H, N, M)."""
    return q @ k.mT / q.shape[-1] ** 0.5


def iterative_inverse(matrix: torch.Tensor, iterations: int = ITERATIONS) -> torch.Tensor:
    """An approximate inverse of (..., m, m) matrices (Razavi et al., as in Nyströmformer): from
    Z = A^T / (|A|_1 |A|_inf), Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    size = matrix.abs()
    norms = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    inverse = matrix.mT / norms[..., None, None]
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product))) / 4
    return inverse


class Linformer(Mixing):
    """Wang et al., "Linformer: Self-Attention with Linear Complexity", arXiv 2006.04768.

    y = softmax(q (E k)^T / sqrt(D)) F v, with learned E and F of shape (m, N), the same for all heads of a layer
    (headwise sharing). They start with variance 1 / m, as in its theorem.
    """

    about = About("Linformer", "QKV", causal=False, complexity="N m D")

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.compress_keys, self.compress_values = (
            nn.Parameter(torch.randn(self.size, self.tokens) * self.size**-0.5) for _ in "EF"
        )

    def default_size(self):
        return min(64, self.tokens)

    def forward(self, q, k, v):
        tokens = k.shape[2]
        keys, values = self.compress_keys[:, :tokens] @ k, self.compress_values[:, :tokens] @ v
        return scores(q, keys).softmax(-1) @ values

    def exact(self, q, k, v):
        keys = torch.einsum("mn,bhnd->bhmd", self.compress_keys[:, : k.shape[2]], k)
        weights = scores(q, keys).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return (weights @ self.compress_values[:, : k.shape[2]]) @ v  # N x N weights of the tokens


class Nystromformer(Mixing):
    """Xiong et al., "Nyströmformer", AAAI 2021, arXiv 2102.03902.

    softmax(q k^T) is replaced by softmax(q k~^T) Z softmax(q~ k^T), scores divided by sqrt(D), where q~ and k~ are
    means of m segments of the sequence and Z is the iterative inverse of softmax(q~ k~^T). Segments may differ in
    length by one. The depthwise convolution of the values that its authors add beside it is left out. The weights may
    be negative.
    """

    about = About("Nyströmformer", "QKV", causal=False, complexity="N m D + m³")

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


class Skyformer(Mixing):
    """Chen et al., "Skyformer: Remodel Self-Attention with Gaussian Kernel and Nyström Method", NeurIPS 2021,
    arXiv 2111.00035.

    y = C v with C_ij = kappa(q_i, k_j) = exp(-|q_i - k_j|^2 / (2 sqrt(D))), not normalised, and C replaced by
    kappa(q, z) (kappa(z, z) + gamma I)^-1 kappa(z, k) with m landmarks z of the queries and keys together: those are
    the rows of a positive definite matrix, as C alone is not. The inverse is iterative, of the matrix with its row sums
    divided out on both sides. Landmarks are evenly spaced here, not drawn; gamma is its authors' 0.1.
    """

    about = About("Skyformer", "QKV", causal=False, complexity="N m D + m³")
    GAMMA = 0.1

    def default_size(self):
        return min(128, 2 * self.tokens)

    def landmarks(self, q, k):
        """Every so many-th row of the queries above the keys, (B, H, m, D)."""
        rows = torch.cat([q, k], dim=2)
        count = min(self.size, rows.shape[2])
        return rows[:, :, (torch.arange(count, device=q.device) * rows.shape[2]) // count]

    @staticmethod
    def kernel(a, b):
        """exp(-|a_i - b_j|^2 / (2 sqrt(D))), (B, H, N, M), by |a|^2 + |b|^2 - 2 a.b."""
        squared = a.square().sum(-1, keepdim=True) + b.square().sum(-1, keepdim=True).mT - 2 * a @ b.mT
        return (-squared / (2 * a.shape[-1] ** 0.5)).exp()

    def forward(self, q, k, v):
        z, kernel = self.landmarks(q, k), self.kernel
        inner = kernel(z, z) + self.GAMMA * torch.eye(z.shape[2], dtype=q.dtype, device=q.device)
        scale = inner.sum(-1).rsqrt()[..., None]
        read = scale * (iterative_inverse(scale * inner * scale.mT) @ (scale * (kernel(z, k) @ v)))
        return kernel(q, z) @ read

    def exact(self, q, k, v):
        z = self.landmarks(q, k)

        def kappa(a, b):
            return (-(a[..., :, None, :] - b[..., None, :, :]).square().sum(-1) / (2 * q.shape[-1] ** 0.5)).exp()

        inner = kappa(z, z) + self.GAMMA * torch.eye(z.shape[2], dtype=q.dtype, device=q.device)
        root = torch.diag_embed(inner.sum(-1).rsqrt())
        return kappa(q, z) @ root @ iterative_inverse(root @ inner @ root) @ root @ kappa(z, k) @ v


# Bounded confidence


def neighbours(tokens: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of every token's neighbours, (N, W), and which of them exist; the CLS token of a grid has only itself."""
    token = torch.arange(tokens)[:, None]
    if causal:
        index = token - torch.arange(min(WINDOW, tokens))
        return index.clamp(min=0), index >= 0
    side = math.isqrt(max(0, tokens - 2)) + 1  # of the grid that tokens 1, 2, ... fill row by row
    steps = torch.arange(-REACH, REACH + 1)
    row = (token - 1) // side + steps.repeat_interleave(len(steps))
    column = (token - 1) % side + steps.repeat(len(steps))
    index = 1 + row * side + column
    exists = (row >= 0) & (column >= 0) & (column < side) & (index < tokens) & (token > 0)
    index = torch.cat([torch.zeros_like(token), index.clamp(0, tokens - 1)], dim=1)
    return index, torch.cat([torch.ones_like(token, dtype=torch.bool), exists], dim=1)


class Krause(Mixing):
    """Liu et al., "Krause Synchronization Transformers", 2026, arXiv 2602.11534.

    Affinities s_ij = exp(-|q_i - k_j|^2 / (2 sigma_h^2)) with a learned sigma of each head, kept for the `size` keys
    nearest to q_i among the neighbours of token i (bounded confidence) and normalised over them. Neighbours: in a
    causal sequence the last WINDOW tokens; else tokens are a CLS token and patches of a grid row by row, whose
    neighbours are the 5 x 5 around them and the CLS token, and the CLS token sees all (as its authors' vision models
    do). Sigma^2 starts at sqrt(D), as GKA's.
    """

    about = About("Krause", "QKV", causal=True, complexity="N W D")

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.log_sigma = nn.Parameter(torch.full((self.heads,), 0.25 * math.log(self.head_dim)))

    def default_size(self):
        return 32 if self.causal else 16

    def other_flops(self, tokens):
        """Difference, square and sum of every pair of neighbours."""
        of_grid = (2 * REACH + 1) ** 2 + 2  # 5 x 5, the CLS token, and what the CLS token sees
        in_reach = min(WINDOW, tokens) if self.causal else of_grid
        return 3 * self.heads * tokens * in_reach * self.head_dim

    def _weights(self, squared, exists=None):
        """Weights of the `size` nearest keys of each row, 0 for the others. squared: distances, (B, H, N, W)."""
        logits = -squared / (2 * (2 * self.log_sigma).exp()[:, None, None])
        logits = logits if exists is None else logits.masked_fill(~exists, -math.inf)
        if self.size < logits.shape[-1]:
            least = logits.topk(self.size, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        return logits.softmax(-1)

    def forward(self, q, k, v):
        index, exists = (t.to(q.device) for t in neighbours(q.shape[2], self.causal))
        near_k, near_v = (t.index_select(2, index.flatten()).unflatten(2, index.shape) for t in (k, v))
        weights = self._weights((q[..., None, :] - near_k).square().sum(-1), exists)
        y = torch.einsum("bhnw,bhnwd->bhnd", weights, near_v)
        if self.causal:
            return y
        cls = self._weights((q[:, :, :1, None] - k[:, :, None]).square().sum(-1)) @ v
        return torch.cat([cls, y[:, :, 1:]], dim=2)

    def exact(self, q, k, v):
        tokens = q.shape[2]
        i, j = torch.arange(tokens, device=q.device)[:, None], torch.arange(tokens, device=q.device)
        if self.causal:
            near = (j <= i) & (i - j < WINDOW)
        else:
            side = math.ceil(math.sqrt(tokens - 1)) if tokens > 1 else 1
            rows, columns = (i - 1) // side - (j - 1) // side, (i - 1) % side - (j - 1) % side
            near = ((rows.abs() <= REACH) & (columns.abs() <= REACH)) | (i == 0) | (j == 0)
        sigma = self.log_sigma.exp()[:, None, None]
        affinity = (-(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / (2 * sigma**2)).exp() * near
        order = affinity.masked_fill(~near, -1).argsort(dim=-1, descending=True).argsort(dim=-1)
        return self.normalised(affinity * (order < self.size), v)


METHODS: dict[str, type[Mixing]] = {  # in the order of the paper's table
    "non-local-means": NonLocalMeans,
    "linear-transformer": LinearTransformer,
    "performer": Performer,
    "linformer": Linformer,
    "nystromformer": Nystromformer,
    "kernelized-rpe": KernelizedRPE,
    "skyformer": Skyformer,
    "krause": Krause,
}
