"""Pictures of runs: forms have the colours of the trainers' figures, and those of the mathematics show the truth."""

import pytest

from deit_gka.figures.subjects import HYBRID
from gka.kinds import KINDS
from runs import looks, mathematics


def test_pictures_of_models_have_the_forms_colours():
    assert all(looks.look(kind.label).colour == kind.colour for kind in KINDS.values())
    assert looks.look("GGGA").colour == HYBRID and len(set(looks.LOOKS.values())) == len(looks.LOOKS)


def test_pictures_of_the_mathematics_show_what_the_page_proves(tmp_path):
    drawn = {
        draw.__name__: draw(tmp_path) for draw in (mathematics.kernel, mathematics.softmax, mathematics.translation)
    }
    assert all(0 < figure.path.stat().st_size < 150_000 for figure in drawn.values())
    for sigma in {row["sigma"] for row in drawn["kernel"].rows}:
        row = [one["W_ij"] for one in drawn["kernel"].rows if one["sigma"] == sigma]
        assert sum(row) == pytest.approx(1) and max(row) == row[mathematics.QUERY]
    for row in drawn["softmax"].rows:
        assert row["W_ij"] == pytest.approx(row["softmax"], rel=1e-12)
    moved = {row["weights"]: [] for row in drawn["translation"].rows}
    for row in drawn["translation"].rows:
        moved[row["weights"]].append(abs(row["before"] - row["after"]))
    assert max(moved["Gaussian kernel"]) < 1e-12 and max(moved["softmax of dot products"]) > 0.1
