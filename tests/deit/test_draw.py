"""The command that draws the figures: which files, what the captions say, which mistakes it names."""

import json

import pytest
from PIL import Image

from deit_gka.data.sources import open_source
from deit_gka.draw import DrawConfig, demo_run, main
from deit_gka.figures.families import FAMILIES, NEED_SIGMA
from deit_gka.figures.subjects import of_timm, photographs
from figure_runs import GKA, SOFTMAX, TINY, tiny_subjects, vision_run, words
from runs.report.attention import first_of_classes
from trainkit_gka.cli import UserError, run
from vision_runs import in_process

SMALLEST = (*TINY, "depth=1", "num_heads=1")
PER_IMAGE = ("cls_maps", "patch_to_patch", "patch_to_patch_heads", "evolution", "matrices", "operator")


def drawn(*flags):
    run(main, DrawConfig, [str(flag) for flag in flags])


def test_every_family_is_written_as_png_and_pdf(tmp_path, photo):
    drawn("--model", GKA, *SMALLEST, "--image", photo, "--out", tmp_path / "out", "--tokens", 9)
    (folder,) = (tmp_path / "out").iterdir()
    names = {f"{family}-stripes" if family in PER_IMAGE else family for family in FAMILIES}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{form}" for name in names for form in ("png", "pdf")}
    for name in names:
        assert min(Image.open(folder / f"{name}.png").size) > 300
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_untrained_models_and_the_two_photographs_are_named(figures, tmp_path):
    drawn("--model", GKA, *SMALLEST, "--out", tmp_path, "--family", "rollout", "cls_maps")
    assert {name for name in figures if name.endswith("png")} == {
        "rollout.png", "cls_maps-china.png", "cls_maps-flower.png",
    }  # fmt: skip
    assert {"china", "flower"} < {axis.get_xlabel() for axis in figures["rollout.png"].axes}
    assert all(f"Image {name}" in words(figures[f"cls_maps-{name}.png"]) for name in ("china", "flower"))
    assert all("random initialisation" in words(figure) for figure in figures.values())


def test_a_page_has_the_words_and_numbers_of_every_figure(figures, tmp_path):
    subjects = tiny_subjects(GKA, "attention=GA", "num_heads=1")
    for name, draw in FAMILIES.items():
        for figure in draw(subjects, tmp_path):
            assert figure.path.parent == tmp_path and figure.path.stem.startswith(name) and figure.path.name in figures
            assert "".join(words(figures[figure.path.name]).split()) == "".join((figure.title + figure.caption).split())
            assert figure.rows and len({tuple(row) for row in figure.rows}) == 1 and figure.alt.startswith(figure.title)
            assert "NaN" not in json.dumps(figure.rows)
            assert "random initialisation" in figure.caption
            assert "\n" not in figure.alt


def test_models_without_bandwidth_skip_what_needs_one(figures, tmp_path, photo, capsys):
    drawn("--model", SOFTMAX, *SMALLEST, "--image", photo, "--out", tmp_path, "--family", *NEED_SIGMA, "distance")
    assert figures.keys() == {"distance.png", "distance.pdf"}
    said = capsys.readouterr().out
    assert all(f"{family}: not drawn" in said for family in NEED_SIGMA)


@pytest.mark.parametrize(
    "name, settings",
    [
        (GKA, ["img_size=[16,24]"]),
        (GKA, ["reg_tokens=2"]),
        ("deit_tiny_gka_distilled_patch16_224", []),
        ("vit_tiny_patch16_224", ["attn_layer=gka", "class_token=false", "global_pool=avg"]),
        ("vit_tiny_patch16_224", ["attn_layer=AG", "depth=2", "class_token=false", "global_pool=avg", "reg_tokens=2"]),
    ],
    ids=str,
)
def test_other_layouts_of_tokens_are_drawn(name, settings, figures, tmp_path, photo):
    drawn("--model", name, *SMALLEST, *settings, "--image", photo, "--out", tmp_path, "--tokens", 5)
    assert len(figures) == 2 * len(FAMILIES)
    no_class = "class_token=false" in settings
    assert ("no class token" in words(figures["cls_maps-stripes.png"])) == no_class
    assert ("mean patch" in words(figures["rollout.png"])) == no_class


def test_a_run_and_its_twin(figures, tmp_path, photo, capsys):
    gka, softmax = (vision_run(tmp_path / name, model) for name, model in (("ours", GKA), ("twin", SOFTMAX)))
    drawn("--run", gka, "--twin", softmax, "--image", photo, "--out", tmp_path / "out", "--family", "rollout", "sigma")
    about = f"ours ({GKA}), raw weights after 3 epochs of digits"
    assert about in words(figures["sigma.png"]) and f"twin ({SOFTMAX})" in words(figures["rollout.png"])
    assert [axis.get_ylabel() for axis in figures["rollout.png"].axes if axis.get_ylabel()][:2] == ["ours", "twin"]
    said = capsys.readouterr().out
    assert said.count("relative error") == 2 and str(tmp_path / "out" / "ours" / "rollout.png") in said
    drawn("--run", gka / "checkpoints" / "step_00000007", "--image", photo, "--family", "distance", "--out", tmp_path)
    assert about in words(figures["distance.png"])


def test_the_demos_model_is_the_default(figures, tmp_path, photo):
    demo = tmp_path / "demo"
    assert demo_run(demo) is None
    with pytest.raises(UserError, match=f"there is no folder {demo}; name one with the outputs of make demo"):
        main(DrawConfig(demo=demo, image=photo))
    vision_run(demo / "runs" / "digits-gka-50-seed1")
    first = vision_run(demo / "runs" / "digits-gka-50-seed0")
    assert demo_run(demo) == first
    drawn("--demo", demo, "--image", photo, "--family", "distance", "--out", tmp_path)
    assert "digits-gka-50-seed0" in words(figures["distance.png"])
    assert of_timm(GKA).about == f"{GKA}, random initialisation (seed 0)"


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--run", "x", "--model", GKA), "give either --run"),
        (("--pretrained",), "go with --model"),
        (("--model", GKA, "--image-size", 0), "--image-size is one side or height and width"),
        (("--model", GKA, *TINY, "--image-size", 18), "multiples of the patch, 4 × 4"),
        (("--model", GKA, *TINY, "--image-size", 100000), "more than 4,096 patches"),
        (("--model", "resnet18"), "is not a vision transformer"),
        (("--run", "no/such/run"), "no checkpoint in no/such/run"),
        (("--model", GKA, *TINY, "--tokens", 0), "--tokens must be at least 1"),
        (("--model", GKA, *TINY, "--seeds", "no/such/run"), "no checkpoint in no/such/run"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert message in in_process(main, DrawConfig, *flags, capsys=capsys)


def test_mistakes_about_images_are_one_line(tmp_path, photo, capsys):
    text, flags = tmp_path / "text.png", ("--model", GKA, *TINY)
    text.write_text("not an image")
    cut, empty = tmp_path / "cut.png", tmp_path / "empty.png"
    cut.write_bytes(photo.read_bytes()[:-200])
    empty.touch()
    for path, reason in ((text, "not a JPEG, PNG"), (cut, "image file is truncated"), (empty, "the file is empty")):
        message = in_process(main, DrawConfig, *flags, "--image", path, capsys=capsys)
        assert f"{path} cannot be drawn: {reason}" in message
    missing = in_process(main, DrawConfig, *flags, "--image", tmp_path / "none.png", capsys=capsys)
    assert "none.png: No such file" in missing
    twice = in_process(main, DrawConfig, *flags, "--image", photo, photo, capsys=capsys)
    assert "two images are called stripes" in twice


def test_images_of_other_modes_are_drawn_as_they_look(tmp_path):
    """Pillow alone would clip 16 bits at 255, which is white."""
    Image.new("I;16", (4, 3), 32768).save(tmp_path / "deep.png")
    Image.new("CMYK", (4, 3), (0, 255, 255, 0)).save(tmp_path / "print.jpg")
    images = photographs([tmp_path / "deep.png", tmp_path / "print.jpg"])
    assert images["deep"].getpixel((0, 0)) == (128, 128, 128)
    red, green, blue = images["print"].getpixel((0, 0))
    assert red > 200 and max(green, blue) < 60


def test_a_phones_photo_stands_upright(tmp_path):
    """In figures and in the report; red lies at the left of what is stored, which is the top."""
    stored = Image.new("RGB", (32, 24))
    stored.paste((255, 0, 0), (0, 0, 8, 24))
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "val/a/phone.png"
    path.parent.mkdir(parents=True)
    stored.save(path, exif=exif)
    (shown,), (in_report,) = photographs([path]).values(), first_of_classes(open_source(str(tmp_path), "val")).values()
    for image in (shown, in_report):
        assert image.size == (24, 32) and image.getpixel((20, 2)) == (255, 0, 0)


def test_dollars_in_names_are_not_mathematics(tmp_path, photo):
    image = photo.rename(tmp_path / r"$\5$.png")
    run_of_it = vision_run(tmp_path / r"$\model$")
    families = ["--family", "rollout", "deletion", "distance"]
    drawn("--run", run_of_it, "--twin", vision_run(tmp_path / "twin"), "--image", image, *families, "--out", tmp_path)
    assert len(list((tmp_path / run_of_it.name).glob("*.pdf"))) == 3
