"""Pictures of runs: forms have the colours of the trainers' figures, and those of the mathematics show the truth."""

import torch

from deit_gka.figures.subjects import HYBRID
from gka.kinds import KINDS
from runs import looks, mathematics


def test_pictures_of_models_have_the_forms_colours():
    assert all(looks.look(kind.label).colour == kind.colour for kind in KINDS.values())
    assert looks.look("GGGA").colour == HYBRID and len(set(looks.LOOKS.values())) == len(looks.LOOKS)


def test_pictures_of_the_mathematics_show_what_the_page_proves(tmp_path):
    """Rows of W add up to 1; the kernel is a softmax of dot products and norms; a common shift leaves W as it is."""
    for draw in (mathematics.kernel, mathematics.softmax, mathematics.translation):
        assert 0 < draw(tmp_path).stat().st_size < 150_000
    x, sigma = mathematics.features(), mathematics.SIGMA
    moved = x + torch.tensor(mathematics.SHIFT, dtype=x.dtype)
    weights, y = mathematics.operator(x, sigma)
    scores = x @ x.T / sigma**2 - x.square().sum(1) / (2 * sigma**2)
    torch.testing.assert_close(weights, torch.softmax(scores, dim=-1), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(y, weights @ x)
    torch.testing.assert_close(mathematics.operator(moved, sigma)[0], weights, rtol=1e-10, atol=1e-12)
    products = [mathematics.dot_product_weights(place, sigma) for place in (x, moved)]
    assert (products[0] - products[1]).abs().max() > 0.1
