"""The figures: their numbers; the command that draws them, beside twins and over seeds, and what it refuses."""

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from deit_gka.draw import DrawConfig, main
from deit_gka.figures.explanation import choose_tokens, few_weights
from deit_gka.figures.families import FAMILIES, NEED_SIGMA
from deit_gka.figures.maps import Tokens, attended_distances, place_name
from deit_gka.figures.rollout import LEAST_SHARE, largest_ratio, on_patches, rollout
from deit_gka.figures.rows import query_maps
from deit_gka.figures.subjects import images_for, of_run, of_timm, photographs, subjects_of
from tiny_vision import SHAPE, SIZE
from tiny_vision import photo as photo_of
from trainkit_gka.cli import run
from trainkit_gka.figures.measures import diagonal_mass, entropy
from vision_runs import GKA, SOFTMAX, micro, save_run

TINY = ["--model-kwargs", f"img_size={SIZE}", *(f"{key}={value}" for key, value in SHAPE.items())]


def vision_run(folder, name=GKA, seed=0, widen=0.0, **more):
    """A run's folder. widen: how far log σ is spread."""
    model = micro(name, size=SIZE, **SHAPE)
    torch.manual_seed(seed)
    for block in model.blocks if widen else ():
        block.attn.log_sigma.data += widen * torch.rand(len(block.attn.log_sigma))
    return save_run(folder, model, list("0123456789"), name, seed=seed, **{"lr": 0.1, **more})


def tiny_subjects(name=GKA, *kwargs, images=("stripes",)):
    """What a tiny untrained model does with pictures of stripes. kwargs: KEY=VALUE."""
    pictures = {image: photo_of(seed) for seed, image in enumerate(images)}
    return subjects_of(of_timm(name, [*TINY[1:], *kwargs]), pictures)


def words(figure):
    """Title and caption in one line."""
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


NO_CLASS = ("attn_layer=gka", "class_token=False", "global_pool=avg")
LAYOUTS = {  # a model, its arguments, the tokens before the patches, whether the first is a class token
    "class": (GKA, (), 1, True),
    "distilled": ("deit_tiny_gka_distilled_patch16_224", (), 2, True),
    "registers": (GKA, ("reg_tokens=4",), 5, True),
    "none": ("vit_tiny_patch16_224", NO_CLASS, 0, False),
    "registers alone": ("vit_tiny_patch16_224", (*NO_CLASS, "reg_tokens=2"), 2, False),
    "no bandwidth": (SOFTMAX, (), 1, True),
}


@pytest.mark.parametrize("name, settings, prefix, has_class", LAYOUTS.values(), ids=LAYOUTS)
def test_tokens_before_the_patches_are_counted(name, settings, prefix, has_class):
    (subject,) = tiny_subjects(name, "img_size=[8,12]", *settings)
    tokens, weights = subject.tokens, subject.layers[0].weights
    assert tokens == Tokens((2, 3), (4, 4), prefix, has_class) and tokens.count == weights.shape[-1]
    read = weights[:, 0] if has_class else weights[:, prefix:].mean(1)
    torch.testing.assert_close(tokens.read(weights), read)
    assert tokens.patches(read)[1, 1, 2] == read[1, prefix + 5]


def test_the_four_queries_are_the_papers():
    square, weights = Tokens((14, 14), (16, 16)), torch.rand(3, 197, 197)
    assert square.queries() == [(3, 3), (7, 7), (10, 10), (3, 10)]
    assert place_name(*square.queries()[3]) == "row 4, column 11"  # counted from 1
    maps, distances = query_maps(weights, square)
    assert maps.shape == (3, 4, 14, 14) and maps[1, 3, 5, 6] == weights[1, 53, 1 + 14 * 5 + 6]
    assert torch.equal(distances[:, 3], attended_distances(weights, square)[:, 52])


# Rollout


@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("has_class", [True, False])
def test_rollout_is_the_product_from_the_last_layer_to_the_first(discard, has_class):
    """A class token is never discarded; the first of the patches may be."""
    tokens = Tokens((2, 3), (4, 4)) if has_class else Tokens((1, 7), (4, 4), prefix=0, has_class=False)
    layers, expected = [(2 * torch.randn(2, 7, 7)).softmax(-1) for _ in range(3)], np.eye(7)
    for weights in layers:
        mean = weights.double().mean(0).numpy()
        threshold = np.quantile(mean, discard)
        augmented = np.zeros((7, 7))
        for i, j in np.ndindex(7, 7):
            weight = mean[i, j] if mean[i, j] >= threshold or (has_class and j == 0) else 0
            augmented[i, j] = 0.5 * weight + 0.5 * (i == j)
        expected = augmented / augmented.sum(1, keepdims=True) @ expected
    np.testing.assert_allclose(rollout(layers, tokens, discard).numpy(), expected)


def test_an_empty_rollout_has_the_largest_ratio_that_leaves_something():
    tokens, layers = Tokens((2, 3), (4, 4)), [(2 * torch.randn(1, 7, 7)).softmax(-1) for _ in range(2)]
    for layer in layers:
        layer[:, 0] = torch.tensor([0.94] + [0.01] * 6)  # its weights of patches are among the smallest
    shares = [on_patches(layers, tokens, ratio / 100)[1] for ratio in range(100)]
    expected = max(ratio for ratio, share in enumerate(shares) if share > LEAST_SHARE)
    assert largest_ratio(layers, tokens, 0.99) == expected / 100 < 0.99
    assert largest_ratio(layers, tokens, 0.1) == 0.1


# Distances, widths and the operator


def test_attended_distance_of_known_weights():
    """Of heads that look at the patch itself, at all tokens alike, and at the patch above or below and a token before
    the patches, which has no place."""
    tokens = Tokens((2, 3), (4, 8), 2)
    weights = torch.stack([torch.eye(8), torch.full((8, 8), 1 / 8), torch.zeros(8, 8)])
    weights[2, :, 0] = 0.75
    for row, column in np.ndindex(2, 3):
        weights[2, tokens.token(row, column), tokens.token(1 - row, column)] = 0.25
    centres = [(4 * row, 8 * column) for row, column in np.ndindex(2, 3)]
    uniform = [np.mean([np.hypot(a[0] - b[0], a[1] - b[1]) for b in centres]) for a in centres]
    expected = torch.stack([torch.zeros(6), torch.tensor(uniform).float(), torch.full((6,), 4.0)])
    torch.testing.assert_close(attended_distances(weights, tokens), expected)


def test_a_few_tokens_have_the_kernel_of_the_equations():
    features = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 1.0]])
    affinities, weights = few_weights(features, sigma=2.0)
    expected = torch.tensor([1.0, np.exp(-25 / 8), np.exp(-1 / 8)]).double()
    torch.testing.assert_close(affinities[0], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(weights[0], expected / expected.sum(), rtol=1e-6, atol=0)
    assert choose_tokens(torch.tensor([[9.0], [0.0], [5.0], [1.0], [2.0]]), query=3, first=1, count=3) == [3, 4, 2]
    both = torch.stack([torch.eye(5), torch.full((5, 5), 0.2)])
    torch.testing.assert_close(diagonal_mass(both), torch.tensor([1.0, 0.2]))
    torch.testing.assert_close(entropy(both)[:, 0], torch.tensor([0.0, np.log(5.0)]).float())


# What is drawn

SMALLEST = (*TINY, "depth=1", "num_heads=1")
PER_IMAGE = ("cls_maps", "patch_to_patch", "evolution", "matrices", "operator")
BESIDE = FAMILIES.keys() - {"sigma", "block", "operator"}  # of several models


def draw(*flags):
    run(main, DrawConfig, [str(flag) for flag in flags])


def test_every_family_is_written_as_png_and_pdf(tmp_path, photo):
    """Also of a picture and a model whose names have dollars, which are not mathematics."""
    image, model = photo.rename(tmp_path / r"$\5$.png"), vision_run(tmp_path / r"$\model$")
    draw("--run", model, "--image", image, "--out", tmp_path / "out", "--tokens", 9)
    folder = tmp_path / "out" / model.name
    names = {rf"{family}-$\5$" if family in PER_IMAGE else family for family in FAMILIES}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{form}" for name in names for form in ("png", "pdf")}
    for name in names:
        assert min(Image.open(folder / f"{name}.png").size) > 300
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_of_tokens_are_drawn(layout, figures, tmp_path, photo):
    """On images that are not square. Models without a bandwidth skip what needs one."""
    name, settings, *_ = LAYOUTS[layout]
    draw("--model", name, *SMALLEST, "img_size=[16,24]", *settings, "--image", photo, "--out", tmp_path, "--tokens", 5)
    skipped = len(NEED_SIGMA) if layout == "no bandwidth" else 0
    assert len(figures) == 2 * (len(FAMILIES) - skipped)


def test_a_model_is_drawn_on_images_that_it_knows(tmp_path):
    """Photographs are for models that see them: not for a run whose images are gone, nor for a model of small ones."""
    digits = of_run(vision_run(tmp_path / "digits"))
    assert [name.partition(" ")[0] for name in images_for(digits)] == 4 * ["digits"]
    assert images_for(of_timm(GKA, ["depth=1"])).keys() == {"china", "flower"}
    gone = vision_run(tmp_path / "gone", trained_on=str(tmp_path / "nowhere"))
    for model in (("--model", GKA, *TINY), ("--run", gone)):
        assert "--image" in tiny.refused(main, DrawConfig, *model)


def test_the_first_gka_run_on_digits_is_the_default(figures, tmp_path, photo):
    for seed in (1, 0):
        vision_run(tmp_path / "runs" / f"digits-gka-50-seed{seed}")
    draw("--demo", tmp_path, "--image", photo, "--family", "distance", "--out", tmp_path)
    assert "digits-gka-50-seed0" in words(figures["distance.png"]) and len(figures) == 2


def test_images_are_drawn_upright(tmp_path):
    """A phone stores a photo lying on its side. Of a run on a folder, a readable image of every class is drawn."""
    stored, exif = Image.new("RGB", (32, 24)), Image.Exif()
    stored.paste((255, 0, 0), (0, 0, 8, 24))
    exif[0x0112] = 6
    for split, label in itertools.product(("train", "val"), "ab"):
        (tmp_path / split / label).mkdir(parents=True)
        stored.save(tmp_path / split / label / "phone.png", exif=exif)
    (tmp_path / "val/a/broken.png").write_bytes(b"not an image")
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
    expected = np.sort([subjects_of(of_run(path), {"stripes": photo_of(0)})[0].sigmas for path in seeds], axis=-1)
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


def test_mistakes_are_one_line(seeds, tmp_path, photo):
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
        assert word in tiny.refused(main, DrawConfig, *flags, "--out", tmp_path)
