"""The command that draws the figures: which files, of which models, beside twins and over seeds; what it refuses."""

import itertools
import json

import numpy as np
import pytest
from PIL import Image

from deit_gka.draw import DrawConfig, main
from deit_gka.figures.families import FAMILIES, NEED_SIGMA
from deit_gka.figures.subjects import images_for, of_run, of_timm, photographs, subjects_of
from figure_runs import GKA, SOFTMAX, TINY, tiny_subjects, vision_run, words
from tiny_vision import photo as stripes
from trainkit_gka.cli import run
from vision_runs import in_process

SMALLEST = (*TINY, "depth=1", "num_heads=1")
HEADS = tuple(f"patch_to_patch_heads-{query}" for query in (1, 2, 3, 4))
PER_IMAGE = ("cls_maps", "patch_to_patch", *HEADS, "evolution", "matrices", "operator")
BESIDE = FAMILIES.keys() - {"sigma", "block", "operator"}  # of several models


def draw(*flags):
    run(main, DrawConfig, [str(flag) for flag in flags])


def test_every_family_is_written_as_png_and_pdf(tmp_path, photo):
    """Also of a picture and a model whose names have dollars, which are not mathematics."""
    image, model = photo.rename(tmp_path / r"$\5$.png"), vision_run(tmp_path / r"$\model$")
    draw("--run", model, "--image", image, "--out", tmp_path / "out", "--tokens", 9)
    folder = tmp_path / "out" / model.name
    families = {*FAMILIES, *HEADS} - {"patch_to_patch_heads"}
    names = {rf"{family}-$\5$" if family in PER_IMAGE else family for family in families}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{form}" for name in names for form in ("png", "pdf")}
    for name in names:
        assert min(Image.open(folder / f"{name}.png").size) > 300
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")


LAYOUTS = {
    "registers, not square": (GKA, ["img_size=[16,24]", "reg_tokens=2"]),
    "distilled": ("deit_tiny_gka_distilled_patch16_224", []),
    "no class token": (
        "vit_tiny_patch16_224",
        ["attn_layer=AG", "depth=2", "class_token=false", "global_pool=avg", "reg_tokens=2"],
    ),
    "no bandwidth": (SOFTMAX, []),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_of_tokens_are_drawn(layout, figures, tmp_path, photo):
    """Models without a bandwidth skip what needs one."""
    name, settings = LAYOUTS[layout]
    draw("--model", name, *SMALLEST, *settings, "--image", photo, "--out", tmp_path, "--tokens", 5)
    skipped = len(NEED_SIGMA) if layout == "no bandwidth" else 0
    assert len(figures) == 2 * (len(FAMILIES) + len(HEADS) - 1 - skipped)


def test_a_model_is_drawn_on_images_that_it_knows(tmp_path, capsys):
    """Photographs are for models that see them: not for a run whose images are gone, nor for a model of small ones."""
    digits = of_run(vision_run(tmp_path / "digits"))
    assert [name.partition(" ")[0] for name in images_for(digits)] == 4 * ["digits"]
    assert images_for(of_timm(GKA, ["depth=1"])).keys() == {"china", "flower"}
    gone = vision_run(tmp_path / "gone", trained_on=str(tmp_path / "nowhere"))
    for model in (("--model", GKA, *TINY), ("--run", gone)):
        assert "--image" in in_process(main, DrawConfig, *model, capsys=capsys)


def test_the_first_gka_run_on_digits_is_the_default(figures, tmp_path, photo):
    for seed in (1, 0):
        vision_run(tmp_path / "runs" / f"digits-gka-50-seed{seed}")
    draw("--demo", tmp_path, "--image", photo, "--family", "distance", "--out", tmp_path)
    assert "digits-gka-50-seed0" in words(figures["distance.png"]) and figures.keys() == {
        "distance.png",
        "distance.pdf",
    }


def test_images_are_drawn_upright(tmp_path):
    """A phone stores a photo lying on its side. Of a run on a folder, an image of every class is drawn."""
    stored, exif = Image.new("RGB", (32, 24)), Image.Exif()
    stored.paste((255, 0, 0), (0, 0, 8, 24))
    exif[0x0112] = 6
    for split, label in itertools.product(("train", "val"), "ab"):
        (tmp_path / split / label).mkdir(parents=True)
        stored.save(tmp_path / split / label / "phone.png", exif=exif)
    held_out = images_for(of_run(vision_run(tmp_path / "run", trained_on=str(tmp_path))))
    assert [name.split()[-1] for name in held_out] == ["a", "b"]
    for image in (*photographs([tmp_path / "val/a/phone.png"]).values(), *held_out.values()):
        assert image.size == (24, 32) and image.getpixel((20, 2)) == (255, 0, 0)


# Twins and seeds


def test_twins_of_another_shape_have_rows_and_numbers_of_their_own(figures, tmp_path):
    ours = tiny_subjects(GKA, "attention=GA", images=("stripes", "bars"))
    twin = tiny_subjects(SOFTMAX, "depth=1", "num_heads=1", "img_size=[16,24]", images=("stripes", "bars"))
    for family, draw_family in FAMILIES.items():
        alone = [draw_family(subjects, tmp_path) for subjects in ((ours, twin) if family in BESIDE else (ours,))]
        together = draw_family(ours + twin, tmp_path)
        assert [figure.path for figure in together] == [figure.path for figure in alone[0]]
        for both, *parts in zip(together, *alone):
            assert sorted(map(str, both.rows)) == sorted(str(row) for figure in parts for row in figure.rows)
            assert both.rows and len({tuple(row) for row in both.rows}) == 1 and "NaN" not in json.dumps(both.rows)
            assert ours[0].about in both.caption and (twin[0].about in both.caption) == (family in BESIDE)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeds")
    return [vision_run(folder / f"seed{seed}", seed=seed, widen=0.5) for seed in range(3)]


def test_the_band_is_the_range_over_seeds(seeds, figures, tmp_path, photo):
    draw("--run", seeds[0], "--seeds", *seeds[1:], "--image", photo, "--out", tmp_path, "--family", "sigma", "cls_maps")
    expected = np.sort([subjects_of(of_run(path), {"stripes": stripes(0)})[0].sigmas for path in seeds], axis=-1)
    axis = figures["sigma.png"].axes[2]
    for rank in range(2):
        np.testing.assert_allclose(axis.lines[rank].get_ydata(), expected.mean(0)[:, rank])
        edges = axis.collections[rank].get_paths()[0].vertices
        for layer in range(2):
            at = edges[edges[:, 0] == layer + 1, 1]
            assert (at.min(), at.max()) == pytest.approx((expected.min(0)[layer, rank], expected.max(0)[layer, rank]))
    assert "seed1" not in words(figures["cls_maps-stripes.png"])
    (figure,) = FAMILIES["sigma"](tiny_subjects(GKA), tmp_path)  # one run: by head, without a band
    assert not figures["sigma.png"].axes[2].collections and figure.rows[0]["head"] == 1


def test_mistakes_are_one_line(seeds, tmp_path, photo, capsys):
    model, run = ("--model", GKA, *TINY), ("--image", photo, "--run", seeds[0])
    (tmp_path / "cut.png").write_bytes(photo.read_bytes()[:-200])
    other = vision_run(tmp_path / "other", lr=0.2, seed=5)
    for flags, word in (
        ((*model, "--run", seeds[0]), "--run"),
        (("--model", "resnet18"), "resnet18"),
        (("--run", "no/such/run"), "no/such/run"),
        ((*model, "--image-size", 18), "--image-size"),
        ((*model, "--image", tmp_path / "cut.png"), "cut.png"),
        ((*model, "--image", tmp_path / "none.png"), "none.png"),
        ((*run, "--seeds", other), "lr"),
        ((*run, "--twin", seeds[0]), "seed0"),
        ((*model, "--image", photo, "--seeds", other), "--seeds"),
    ):
        assert word in in_process(main, DrawConfig, *flags, "--out", tmp_path, capsys=capsys)
