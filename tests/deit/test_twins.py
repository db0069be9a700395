"""Several models in one figure: twins beside the model, seeds as a mean and a range."""

import itertools

import numpy as np
import pytest

from deit_gka.draw import DrawConfig, main
from deit_gka.figures import groups
from deit_gka.figures.bandwidths import ranked
from deit_gka.figures.families import FAMILIES
from deit_gka.figures.subjects import of_run, of_timm, subjects_of
from figure_runs import GKA, SOFTMAX, TINY, tiny_subjects, vision_run, words
from tiny_vision import photo as stripes
from trainkit_gka.cli import run
from vision_runs import in_process

COMPARED = [name for name in FAMILIES if name not in ("sigma", "block", "operator")]
FIRST_ALONE = ["sigma", "block", "operator"]


def overlapping(figure):
    """Pairs of visible axes that share a part of the page, and axes that leave the page."""
    boxes = [axis.get_position() for axis in figure.axes if axis.get_visible()]
    slack = 1e-6
    pairs = [
        (a, b)
        for a, b in itertools.combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > slack and min(a.y1, b.y1) - max(a.y0, b.y0) > slack
    ]
    return pairs, [box for box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > 1 or box.y1 > 1]


def test_twins_of_another_shape_have_rows_and_pictures_of_their_own(figures, tmp_path, monkeypatch):
    ours = tiny_subjects(GKA, images=("stripes", "bars"))
    twin = tiny_subjects(SOFTMAX, "depth=1", "num_heads=1", "img_size=[16,24]", images=("stripes", "bars"))
    for family in COMPARED:
        alone = [FAMILIES[family](subjects, tmp_path) for subjects in (ours, twin)]
        together = FAMILIES[family](ours + twin, tmp_path)
        assert [figure.path for figure in together] == [figure.path for figure in alone[0]]
        for both, first, second in zip(together, *alone):
            assert all(row in both.rows for row in [*first.rows, *second.rows])
            assert len(both.rows) == len(first.rows) + len(second.rows)
            assert all(subject.about in both.caption for subject in (ours[0], twin[0]))
            assert overlapping(figures[both.path.name]) == ([], []), family
    beside = figures["evolution-bars.png"].get_size_inches()
    monkeypatch.setattr(groups, "MOST_COLUMNS", 2)
    FAMILIES["evolution"](ours + twin, tmp_path)
    below = figures["evolution-bars.png"]
    assert overlapping(below) == ([], [])
    assert below.get_size_inches()[0] < beside[0] and below.get_size_inches()[1] > beside[1]


@pytest.mark.parametrize("family", FIRST_ALONE)
def test_what_is_about_one_model_is_drawn_of_the_first(family, figures, tmp_path):
    ours, twin = tiny_subjects(GKA), tiny_subjects(GKA, "sigma_squared=2.0")
    alone, together = (FAMILIES[family](some, tmp_path) for some in (ours, ours + twin))
    assert [figure.rows for figure in together] == [figure.rows for figure in alone]
    assert ours[0].about in together[0].caption and twin[0].about not in together[0].caption


def test_layouts_that_differ_are_both_in_the_caption():
    ours, twin = tiny_subjects(GKA), tiny_subjects(GKA, "reg_tokens=2")
    assert "17 tokens" in groups.caption(ours + twin) and "19 tokens: 4 × 4 patches and 3" in groups.caption(
        ours + twin
    )
    assert groups.caption([*ours, *tiny_subjects(SOFTMAX)], "End.").count("17 tokens") == 1


# Seeds


@pytest.fixture
def seeds(tmp_path):
    return [vision_run(tmp_path / f"seed{seed}", seed=seed, widen=0.5) for seed in range(3)]


def test_the_band_is_the_range_over_seeds(seeds, figures, tmp_path, photo, capsys):
    flags = ["--run", seeds[0], "--seeds", *seeds[1:], "--image", photo, "--out", tmp_path, "--family"]
    run(main, DrawConfig, [str(flag) for flag in [*flags, "sigma", "cls_maps"]])
    sigma = figures["sigma.png"]
    drawn = [subjects_of(of_run(path), {"stripes": stripes(0)}) for path in seeds]
    expected = np.sort([subjects[0].sigmas for subjects in drawn], axis=-1)
    above, below = sigma.axes[2], sigma.axes[3]
    assert "σ over depth" in above.get_title() and "effective" in below.get_title()
    for rank in range(2):
        np.testing.assert_allclose(above.lines[rank].get_ydata(), expected.mean(0)[:, rank])
        edges = above.collections[rank].get_paths()[0].vertices
        for layer in range(2):
            at = edges[edges[:, 0] == layer + 1, 1]
            assert at.min() == pytest.approx(expected.min(0)[layer, rank])
            assert at.max() == pytest.approx(expected.max(0)[layer, rank])
    assert len(below.collections) == 2 and "means over these 3 runs" in words(sigma)
    assert all(f"seed{seed} (" in words(sigma) for seed in range(3))
    assert "seed1" not in words(figures["cls_maps-stripes.png"])
    assert capsys.readouterr().out.count("relative error") == 3


def test_one_run_is_drawn_by_head_without_a_band(figures, tmp_path):
    subjects = tiny_subjects(GKA)
    (figure,) = FAMILIES["sigma"](subjects, tmp_path)
    assert not figures["sigma.png"].axes[2].collections and figure.rows[0]["head"] == 1
    repeated = tiny_subjects(GKA, "sigma_squared=2.0", repeats=subjects[0].about)
    (figure,) = FAMILIES["sigma"](subjects + repeated, tmp_path)
    assert figure.rows[0]["least sigma"] == pytest.approx(2**0.5) and figure.rows[0]["rank"] == 1
    assert figure.rows[0]["largest sigma"] > figure.rows[0]["sigma"] > figure.rows[0]["least sigma"]


def test_heads_are_ranked_by_sigma_and_keep_their_other_numbers():
    numbers = np.array([[[3.0, 1.0, 2.0], [np.nan] * 3], [[30, 10, 20], [np.nan] * 3], [[5, 6, 7], [9, 7, 8]]])
    expected = [[[1, 2, 3], [np.nan] * 3], [[10, 20, 30], [np.nan] * 3], [[6, 7, 5], [7, 8, 9]]]
    np.testing.assert_array_equal(ranked(numbers), expected)


def test_mistakes_about_seeds_and_twins_are_one_line(seeds, tmp_path, photo, capsys):
    other = vision_run(tmp_path / "other", lr=0.2, seed=5)
    flags = ("--image", photo, "--out", tmp_path)

    def message(*more):
        return in_process(main, DrawConfig, *more, *flags, capsys=capsys)

    assert "seed0 differ in lr" in message("--run", seeds[0], "--seeds", other)
    assert "a model without a run has no recipe" in message("--model", GKA, *TINY, "--seeds", other)
    assert "is given twice" in message("--run", seeds[0], "--seeds", seeds[0])
    assert "is given twice" in message("--run", seeds[0], "--twin", seeds[0])
    assert of_timm(GKA, TINY[1:]).recipe == {}
