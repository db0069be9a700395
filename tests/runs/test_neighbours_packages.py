"""The methods against packages that others wrote, with equal weights and features. Skipped without the packages:

pip install linformer==0.2.3 nystrom-attention==0.0.14 performer-pytorch==1.1.4
"""

import pytest
import torch

from gka.testing import error
from runs.neighbours import methods
from runs.neighbours.methods import METHODS

B, H, N, D, M = 2, 3, 64, 16, 16
ROUNDING = 1e-12


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(name, **settings):
    return METHODS[name](H, D, N, size=M, **settings).double()


def by_heads(x):
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def test_linformer_is_the_packages():
    theirs = pytest.importorskip("linformer").LinformerSelfAttention(H * D, N, k=M, heads=H)
    theirs.to_out, ours, x = torch.nn.Identity(), build("linformer"), torch.randn(B, N - 7, H * D)
    with torch.no_grad():
        ours.compress_keys.copy_(theirs.proj_k.T)
        ours.compress_values.copy_(theirs.proj_v.T)
    y = ours(*(by_heads(projection(x)) for projection in (theirs.to_q, theirs.to_k, theirs.to_v)))
    assert error(y, by_heads(theirs(x))) < ROUNDING


def test_nystromformer_is_the_packages_where_its_inverse_has_converged(monkeypatch):
    """After 30 rounds; before, the package's result for a head depends on the others, whose largest norm it takes."""
    package, rounds = pytest.importorskip("nystrom_attention"), 30
    theirs = package.NystromAttention(H * D, D, H, num_landmarks=M, pinv_iterations=rounds, residual=False)
    theirs.to_out, x = torch.nn.Identity(), torch.randn(B, N, H * D)
    inverse = methods.iterative_inverse
    monkeypatch.setattr(methods, "iterative_inverse", lambda matrix: inverse(matrix, rounds))
    y = build("nystromformer")(*map(by_heads, theirs.to_qkv(x).chunk(3, dim=-1)))
    assert error(y, by_heads(theirs(x))) < 100 * ROUNDING


@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_the_packages_without_what_it_adds_to_features(causal):
    theirs = pytest.importorskip("performer_pytorch.performer_pytorch")
    ours, (q, k, v) = build("performer", causal=causal), torch.randn(3, B, H, N, D)
    given = dict(projection_matrix=ours.omega, eps=0)
    features = theirs.softmax_kernel(q, is_query=True, **given), theirs.softmax_kernel(k, is_query=False, **given)
    attend, exact = (theirs.causal_linear_attention_noncuda, dict(eps=0)) if causal else (theirs.linear_attention, {})
    assert error(ours(q, k, v), attend(*features, v, **exact)) < ROUNDING
