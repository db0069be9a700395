"""The command that draws the figures: which files, of which models, beside twins and over seeds; what it refuses."""

import itertools
import json

import numpy as np
import pytest
from PIL import Image

from deit_gka.data.sources import open_source
from deit_gka.draw import DrawConfig, main
from deit_gka.figures import groups
from deit_gka.figures.families import FAMILIES, NEED_SIGMA
from deit_gka.figures.subjects import first_of_classes, images_for, of_run, of_timm, photographs, subjects_of
from figure_runs import GKA, SOFTMAX, TINY, tiny_subjects, vision_run, words
from tiny_vision import photo as stripes
from tiny_vision import write_pictures
from trainkit_gka.cli import UserError, run
from vision_runs import in_process

SMALLEST = (*TINY, "depth=1", "num_heads=1")
HEADS = tuple(f"patch_to_patch_heads-{query}" for query in (1, 2, 3, 4))
PER_IMAGE = ("cls_maps", "patch_to_patch", *HEADS, "evolution", "matrices", "operator")
BESIDE = FAMILIES.keys() - {"sigma", "block", "operator"}  # of several models


def drawn(*flags):
    run(main, DrawConfig, [str(flag) for flag in flags])


def test_every_family_is_written_as_png_and_pdf(tmp_path, photo):
    """Also of a picture and a model whose names have dollars, which are not mathematics."""
    image, model = photo.rename(tmp_path / r"$\5$.png"), vision_run(tmp_path / r"$\model$")
    drawn("--run", model, "--image", image, "--out", tmp_path / "out", "--tokens", 9)
    folder = tmp_path / "out" / model.name
    families = {*FAMILIES, *HEADS} - {"patch_to_patch_heads"}
    names = {rf"{family}-$\5$" if family in PER_IMAGE else family for family in families}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{form}" for name in names for form in ("png", "pdf")}
    for name in names:
        assert min(Image.open(folder / f"{name}.png").size) > 300
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_page_has_the_words_and_numbers_of_every_figure(figures, tmp_path):
    subjects = tiny_subjects(GKA, "attention=GA", "num_heads=1")
    for name, draw in FAMILIES.items():
        for figure in draw(subjects, tmp_path):
            assert figure.path.parent == tmp_path and figure.path.stem.startswith(name) and figure.path.name in figures
            assert "".join(words(figures[figure.path.name]).split()) == "".join((figure.title + figure.caption).split())
            assert figure.rows and len({tuple(row) for row in figure.rows}) == 1
            assert "NaN" not in json.dumps(figure.rows) and "random initialisation" in figure.caption


def test_models_without_bandwidth_skip_what_needs_one(figures, tmp_path, photo, capsys):
    drawn("--model", SOFTMAX, *SMALLEST, "--image", photo, "--out", tmp_path, "--family", *NEED_SIGMA, "distance")
    assert figures.keys() == {"distance.png", "distance.pdf"}
    said = capsys.readouterr().out
    assert all(f"{family}: not drawn" in said for family in NEED_SIGMA)


@pytest.mark.parametrize(
    "name, settings",
    [
        (GKA, ["img_size=[16,24]", "reg_tokens=2"]),
        ("deit_tiny_gka_distilled_patch16_224", []),
        ("vit_tiny_patch16_224", ["attn_layer=AG", "depth=2", "class_token=false", "global_pool=avg", "reg_tokens=2"]),
    ],
    ids=["registers, not square", "distilled", "no class token"],
)
def test_other_layouts_of_tokens_are_drawn(name, settings, figures, tmp_path, photo):
    drawn("--model", name, *SMALLEST, *settings, "--image", photo, "--out", tmp_path, "--tokens", 5)
    assert len(figures) == 2 * (len(FAMILIES) + len(HEADS) - 1)
    assert ("no class token" in words(figures["cls_maps-stripes.png"])) == ("class_token=false" in settings)


def test_a_run_its_twin_and_the_images_that_the_run_knows(figures, tmp_path):
    gka, softmax = (vision_run(tmp_path / name, model) for name, model in (("ours", GKA), ("twin", SOFTMAX)))
    checkpoint = gka / "checkpoints/step_00000007"
    drawn("--run", checkpoint, "--twin", softmax, "--out", tmp_path / "out", "--family", "rollout")
    said = words(figures["rollout.png"])
    assert f"ours ({GKA}), raw weights after 3 epochs of digits" in said and f"twin ({SOFTMAX})" in said
    shown = {axis.get_xlabel() for axis in figures["rollout.png"].axes}
    assert len([name for name in shown if name.startswith("digits ")]) == 4 and not {"china", "flower"} & shown


def test_photographs_are_for_models_that_see_them(tmp_path, capsys):
    """A run whose images are gone, and an untrained model of small images, are not shown photographs."""
    assert images_for(of_timm(GKA, ["depth=1"]), None).keys() == {"china", "flower"}
    message = in_process(main, DrawConfig, "--model", GKA, *TINY, capsys=capsys)
    assert "sees small images, and photographs would tell it nothing" in message
    gone = vision_run(tmp_path / "gone", trained_on=str(tmp_path / "nowhere"))
    message = in_process(main, DrawConfig, "--run", gone, capsys=capsys)
    assert f"cannot be read ({tmp_path / 'nowhere'} does not exist" in message
    write_pictures(tmp_path / "images", train=1, val=2)
    run = vision_run(tmp_path / "here", trained_on=str(tmp_path / "images"))
    assert list(images_for(of_run(run), run)) == [f"images class_{label}" for label in range(3)]


def test_the_demos_model_is_the_default(figures, tmp_path, photo):
    demo = tmp_path / "demo"
    with pytest.raises(UserError, match=f"there is no folder {demo}; name one with the outputs of make demo"):
        main(DrawConfig(demo=demo, image=photo))
    for seed in (1, 0):
        vision_run(demo / "runs" / f"digits-gka-50-seed{seed}")
    drawn("--demo", demo, "--image", photo, "--family", "distance", "--out", tmp_path)
    assert "digits-gka-50-seed0" in words(figures["distance.png"])


# Twins


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
    for family in FAMILIES:
        alone = [FAMILIES[family](subjects, tmp_path) for subjects in ((ours, twin) if family in BESIDE else (ours,))]
        together = FAMILIES[family](ours + twin, tmp_path)
        if family not in BESIDE:  # it is about one model, the first
            assert [figure.rows for figure in together] == [figure.rows for figure in alone[0]]
            assert twin[0].about not in together[0].caption
            continue
        assert [figure.path for figure in together] == [figure.path for figure in alone[0]]
        for both, first, second in zip(together, *alone):
            assert all(row in both.rows for row in [*first.rows, *second.rows])
            assert len(both.rows) == len(first.rows) + len(second.rows)
            assert all(subject.about in both.caption for subject in (ours[0], twin[0]))
            assert overlapping(figures[both.path.name]) == ([], []), family
    monkeypatch.setattr(groups, "MOST_COLUMNS", 2)  # one below the other
    FAMILIES["evolution"](ours + twin, tmp_path)
    assert overlapping(figures["evolution-bars.png"]) == ([], [])


# Seeds


@pytest.fixture
def seeds(tmp_path):
    return [vision_run(tmp_path / f"seed{seed}", seed=seed, widen=0.5) for seed in range(3)]


def test_the_band_is_the_range_over_seeds(seeds, figures, tmp_path, photo):
    drawn(
        *("--run", seeds[0], "--seeds", *seeds[1:], "--image", photo, "--out", tmp_path),
        *("--family", "sigma", "cls_maps"),
    )
    expected = np.sort([subjects_of(of_run(path), {"stripes": stripes(0)})[0].sigmas for path in seeds], axis=-1)
    sigma = figures["sigma.png"]
    above = sigma.axes[2]
    assert "σ over depth" in above.get_title()
    for rank in range(2):
        np.testing.assert_allclose(above.lines[rank].get_ydata(), expected.mean(0)[:, rank])
        edges = above.collections[rank].get_paths()[0].vertices
        for layer in range(2):
            at = edges[edges[:, 0] == layer + 1, 1]
            assert at.min() == pytest.approx(expected.min(0)[layer, rank])
            assert at.max() == pytest.approx(expected.max(0)[layer, rank])
    assert all(f"seed{seed} (" in words(sigma) for seed in range(3))
    assert "seed1" not in words(figures["cls_maps-stripes.png"])


def test_one_run_is_drawn_by_head_without_a_band(figures, tmp_path):
    (figure,) = FAMILIES["sigma"](tiny_subjects(GKA), tmp_path)
    assert not figures["sigma.png"].axes[2].collections and figure.rows[0]["head"] == 1


# Mistakes


def test_mistakes_are_one_line(seeds, tmp_path, photo, capsys):
    def message(*flags):
        return in_process(main, DrawConfig, *flags, "--out", tmp_path, capsys=capsys)

    model, run = ("--model", GKA, *TINY), ("--image", photo, "--run", seeds[0])
    assert "give either --run" in message(*model, "--run", seeds[0])
    assert "is not a vision transformer" in message("--model", "resnet18")
    assert "no checkpoint in no/such/run" in message("--run", "no/such/run")
    assert "multiples of the patch, 4 × 4" in message(*model, "--image-size", 18)
    assert "more than 4,096 patches" in message(*model, "--image-size", 100000)
    (tmp_path / "cut.png").write_bytes(photo.read_bytes()[:-200])
    assert "cut.png cannot be drawn: image file is truncated" in message(*model, "--image", tmp_path / "cut.png")
    assert "none.png: No such file" in message(*model, "--image", tmp_path / "none.png")
    assert "two images are called stripes" in message(*model, "--image", photo, photo)
    other = vision_run(tmp_path / "other", lr=0.2, seed=5)
    assert "seed0 differ in lr" in message(*run, "--seeds", other)
    assert "is given twice" in message(*run, "--twin", seeds[0])
    assert "a model without a run has no recipe" in message(*model, "--image", photo, "--seeds", other)


def test_images_are_drawn_upright(tmp_path):
    """As a phone stores a photo, it lies on its side in the file."""
    stored, exif = Image.new("RGB", (32, 24)), Image.Exif()
    stored.paste((255, 0, 0), (0, 0, 8, 24))
    exif[0x0112] = 6
    (tmp_path / "val/a").mkdir(parents=True)
    stored.save(tmp_path / "val/a/phone.png", exif=exif)
    source = open_source(str(tmp_path), "val")
    (held_out,) = first_of_classes(source, map(source.read, range(len(source)))).values()
    for image in (photographs([tmp_path / "val/a/phone.png"])["phone"], held_out):
        assert image.size == (24, 32) and image.getpixel((20, 2)) == (255, 0, 0)
