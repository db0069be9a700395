"""What travels with weights: names of classes and preprocessing, from a folder of JPEGs to exports and to new runs."""

import json
import re
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file

import deit_gka.evaluate
import tiny_vision
from deit_gka.data.sources import decode
from deit_gka.model.checkpoints import about_images
from deit_gka.model.origin import Origin, read_origin
from deit_gka.model.warm_start import read_weights, warm_start
from deit_gka.recipe import Recipe
from digit_runs import micro
from vision_runs import EXPORT, in_process, train

OWN = ["--mean", 0.5, 0.4, 0.3, "--std", 0.25, 0.5, 0.2]
SHORT = ["--epochs", 1, "--num-workers", 0, "--eval-every", "-1", "--save-every", "-1"]
NAMES = ["class_0", "class_1", "class_2"]


@pytest.fixture(scope="module")
def out(pictures, tmp_path_factory):
    """A run on JPEGs in class folders with a mean and a deviation of its own, and what it exports."""
    out = tmp_path_factory.mktemp("origin")
    train(pictures, out, *SHORT, *OWN)
    tiny_vision.call(EXPORT, "--run", out / "run", "--out", out / "exported", "--weights", "model", folder=out / "said")
    return out


def test_a_run_and_its_export_say_how_images_were_prepared(out):
    (saved,) = (out / "run/checkpoints").iterdir()
    recipe = json.loads((saved / "state.json").read_text())["train_config"]
    assert recipe["mean"] == [0.5, 0.4, 0.3] and recipe["std"] == [0.25, 0.5, 0.2]
    config = json.loads((out / "exported/config.json").read_text())
    assert config["label_names"] == NAMES
    images = config["pretrained_cfg"]
    assert images["mean"] == recipe["mean"] and images["std"] == recipe["std"]
    assert (images["interpolation"], images["crop_pct"], images["input_size"]) == ("bicubic", 0.875, [3, 16, 16])


def test_transformers_answers_with_the_names_of_the_folders(out, pictures):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(out / "exported")
    assert config.id2label == dict(enumerate(NAMES)) and config.label2id["class_2"] == 2
    classify = transformers.pipeline("image-classification", model=str(out / "exported"))
    path = pictures / "val/class_1/003.jpg"
    answers = {answer["label"]: answer["score"] for answer in classify(str(path), top_k=3)}
    model = timm.create_model(f"local-dir:{out / 'exported'}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pixels = transform(decode(path.read_bytes()))
    assert pixels.mean() > 0.01 + transform_of_imagenet(path).mean()  # its own normalisation, which differs
    with torch.no_grad():
        expected = model(pixels[None]).softmax(-1)[0].tolist()
    assert answers == pytest.approx(dict(zip(NAMES, expected)), rel=1e-4)


def transform_of_imagenet(path):
    return timm.data.create_transform((3, 16, 16), crop_pct=0.875)(decode(path.read_bytes()))


def test_an_export_is_evaluated_as_its_run(out, pictures, capsys):
    said = []
    for folder in ("run", "exported"):
        results = out / f"{folder}.jsonl"
        config = deit_gka.evaluate.EvaluateConfig(
            run=out / folder, weights=["model"], data=str(pictures), device_type="cpu", num_workers=0, results=results
        )
        deit_gka.evaluate.main(config)
        said.append(capsys.readouterr().out.splitlines()[0])
        assert re.match(r"(model|exported): top-1 \S+ top-5 100.000 loss \S+ on 27 images", said[-1])
    assert said[0].partition(": ")[2] == said[1].partition(": ")[2]
    argv = ["--run", out / "exported", "--device-type", "cpu"]
    message = in_process(deit_gka.evaluate.main, deit_gka.evaluate.EvaluateConfig, *argv, capsys=capsys)
    assert "exported is an exported model, which does not say where its images are" in message
    argv += ["--data", "digits"]
    message = in_process(deit_gka.evaluate.main, deit_gka.evaluate.EvaluateConfig, *argv, capsys=capsys)
    assert "was trained on 3 classes but digits has 10" in message


def test_a_new_run_takes_the_head_by_class_name_and_is_told_of_another_normalisation(out, tmp_path):
    pictures = tiny_vision.write_pictures(tmp_path / "pictures", train=6, val=2)
    for split in ("train", "val"):
        (pictures / split / "class_0").rename(pictures / split / "zebra")
    start = [*SHORT, "--initial-weights", out / "exported", "--stop-after", 1]
    said = train(pictures, tmp_path, *start).stdout
    assert re.search(r"starting from .*/exported: .*; head by class name: 2 of 3 classes\n", said), said
    keeps = r"warning: .*/exported saw images with another {} than this run's .*; --{} {} keeps it\n"
    assert re.search(keeps.format("mean", "mean", "0.5 0.4 0.3"), said), said
    assert re.search(keeps.format("std", "std", "0.25 0.5 0.2"), said), said
    said = train(pictures, tmp_path / "own", *start, *OWN).stdout
    assert "warning" not in said and "2 of 3 classes" in said


def test_rows_of_a_head_move_with_their_classes():
    weights, model = micro(classes=4).state_dict(), micro(classes=3)
    start = model.head.weight.clone()
    done = warm_start(model, weights, "x", ["a", "b", "c", "d"], ["d", "new", "a"])
    assert done.known_classes == "2 of 3 classes" and not done.new and "head by class name" in str(done)
    assert torch.equal(model.head.weight, torch.stack([weights["head.weight"][3], start[1], weights["head.weight"][0]]))
    assert torch.equal(model.head.bias[[0, 2]], weights["head.bias"][[3, 0]])
    same = micro(classes=4)
    for theirs, ours in (("abcd", "abcd"), ("abcd", "wxyz"), ("", "abcd")):  # the same, unrelated and unknown names
        assert not warm_start(same, weights, "x", list(theirs), list(ours)).known_classes
        assert torch.equal(same.head.weight, weights["head.weight"])


def test_origins_are_read_from_runs_exports_and_timm(out, tmp_path):
    known = Origin(tuple(NAMES), (0.5, 0.4, 0.3), (0.25, 0.5, 0.2))
    (checkpoint,) = (out / "run/checkpoints").iterdir()
    for place in (out / "run", checkpoint, out / "exported", out / "exported/model.safetensors"):
        assert read_origin(str(place)) == known, place
    assert read_origin("vit_base_patch16_224") == Origin((), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    save_file(read_weights(str(out / "run")), tmp_path / "bare.safetensors")
    assert read_origin(str(tmp_path / "bare.safetensors")) == Origin()


@pytest.mark.parametrize("manifest", ['{"name": "app"}', "[1]", "{"])
def test_another_programs_manifest_makes_no_checkpoint(manifest, out, tmp_path):
    save_file(read_weights(str(out / "run")), tmp_path / "bare.safetensors")
    shutil.copytree(out / "exported", tmp_path / "app/exported")
    for folder in (tmp_path, tmp_path / "app", tmp_path / "app/exported"):
        (folder / "manifest.json").write_text(manifest)
    assert read_origin(str(tmp_path / "bare.safetensors")) == Origin()
    known = Origin(tuple(NAMES), (0.5, 0.4, 0.3), (0.25, 0.5, 0.2))
    for place in ("app/exported", "app/exported/model.safetensors"):
        assert read_origin(str(tmp_path / place)) == known
    assert read_weights(str(tmp_path / "app/exported")).keys() == read_weights(str(out / "exported")).keys()


def test_warnings_are_of_what_differs():
    recipe = Recipe()
    assert not Origin().warnings("x", ["a"], recipe)
    assert not Origin(("a", "b"), recipe.mean, recipe.std).warnings("x", ["b", "a"], recipe)
    (names,) = Origin(("n01", "n02"), recipe.mean, recipe.std).warnings("x", ["cat", "dog"], recipe)
    assert names == "x has other names for its classes ('cat' for 'n01'); its head is taken in their order"
    (mean,) = Origin((), (0.5, 0.5, 0.5), recipe.std).warnings("x", ["cat"], recipe)
    assert mean.endswith("; --mean 0.5 0.5 0.5 keeps it")


def test_older_runs_were_normalised_as_imagenet():
    about = about_images({"train_config": {"input_size": 32, "crop_pct": 0.9}})
    assert about["mean"] == Recipe().mean and about["std"] == Recipe().std
