"""Which class is which: numbered folders, and data whose order is not the model's."""

import shutil

import pytest
import torch
from PIL import Image

from deit_gka import evaluate
from deit_gka.data.sources.classes import in_order, numbers_in_model
from deit_gka.data.transforms import eval_transform
from deit_gka.model.checkpoints import export, find_checkpoint
from deit_gka.recipe import Recipe
from deit_gka.training.distillation import load_teacher
from image_files import write
from tiny_vision import SHAPE, SIZE, encoded
from trainkit_gka.checkpoint import save as save_checkpoint
from trainkit_gka.cli import UserError
from vision_runs import evaluated, in_process, micro

COUNT = 12
NAMES = [f"n{number:02d}" for number in range(COUNT)]
NUMBERS = [str(number) for number in range(COUNT)]
AS_TEXT = sorted(NUMBERS)  # 0, 1, 10, 11, 2, ...


def picture(place):
    colour = (place % 3 * 120, place // 3 % 2 * 240, place // 6 * 240)
    return Image.new("RGB", (SIZE, SIZE), colour)


def write_classes(root, names):
    """A colour for each class, the same ones whatever the classes are called."""
    for place, name in enumerate(names):
        write(root / "val" / name / "0.png", encoded(picture(place), "PNG"))
    return root


def save_run(folder, classes):
    """A run whose model is right about every colour, and calls the k-th of them classes[k]; and an export of it."""
    torch.manual_seed(0)
    model = micro(COUNT).eval()
    pixels = torch.stack([eval_transform(SIZE, 1.0)(picture(place)) for place in range(COUNT)])
    with torch.no_grad():
        features = model.forward_head(model.forward_features(pixels), pre_logits=True)
        model.head.weight.copy_((torch.linalg.pinv(features.double()) @ torch.eye(COUNT).double()).T)
        model.head.bias.zero_()
    about = {"name": "deit_tiny_gka_patch16_224", "num_classes": COUNT, "input_size": SIZE, "kwargs": SHAPE}
    recipe = {"crop_pct": 1.0, "input_size": SIZE, "mean": Recipe().mean, "std": Recipe().std}
    state = {"classes": classes, "model": about, "train_config": recipe, "epoch": 1}
    state |= {"trained_on": "digits", "parts": {}}
    save_checkpoint(folder / "checkpoints", 1, {"model": model.state_dict()}, state)
    export(find_checkpoint(folder), "model", folder.with_name(f"exported-{folder.name}"))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Data in named and in numbered folders, a run with either, one of when numbers were sorted as text, an export."""
    root = tmp_path_factory.mktemp("classes")
    for name, classes in (("named", NAMES), ("numbered", NUMBERS)):
        write_classes(root / name, classes)
    for name, classes in (("run", NAMES), ("old", AS_TEXT)):
        save_run(root / name, classes)
    shutil.copy(root / "run/checkpoints/step_00000001/model.safetensors", root / "bare.safetensors")
    return root


@pytest.fixture
def accuracy(tmp_path, capsys):
    """Top-1 of a model on data, and the command's output."""

    def measured(data, *model):
        (values,) = evaluated(tmp_path, "--data", data, *model)["metrics"].values()
        output = capsys.readouterr()
        return values["top1"], output.err + output.out

    return measured


def test_whole_numbers_are_sorted_as_numbers():
    for names in (["0", "9", "10"], ["10", "9", "x"], ["-1", "10", "9.5"]):
        assert in_order(reversed(names)) == names


SHAPE_WORDS = [f"{key}={value}" for key, value in {**SHAPE, "img_size": SIZE, "num_classes": COUNT}.items()]
TIMM = ("--model", "deit_tiny_gka_patch16_224", "--model-kwargs", *SHAPE_WORDS, "--crop-pct", 1)
MODELS = {
    "a run": ("--run", "run"),
    "an export": ("--run", "exported-run"),
    "a run's file": (*TIMM, "--checkpoint", "run/checkpoints/step_00000001/model.safetensors"),
    "bare weights": (*TIMM, "--checkpoint", "bare.safetensors"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_numbered_folders_are_scored_as_named_ones(kind, places, accuracy):
    model = [places / word if (places / str(word)).exists() else word for word in MODELS[kind]]
    (top1, output), (by_number, warned) = accuracy(places / "named", *model), accuracy(places / "numbered", *model)
    assert top1 == by_number == 100
    assert ("'n00'" in output) == (kind == "bare weights")  # the order that is taken
    assert ("'0' for 'n00'" in warned) == (kind != "bare weights")


def test_a_run_whose_classes_are_in_another_order_is_scored_by_name(places, tmp_path, accuracy):
    data = write_classes(tmp_path / "data", AS_TEXT)  # the colour that the model calls 2 is in the folder 10
    top1, output = accuracy(data, "--run", places / "old")
    assert top1 == 100 and "'2' is 4, not 2" in output


@pytest.mark.parametrize("teacher", ["old", "exported-old"])
def test_a_teacher_whose_classes_are_in_another_order_teaches_by_name(teacher, places):
    """Of its answers in its own order, the student gets those to its classes."""
    images, recipe = torch.randn(3, 3, SIZE, SIZE), Recipe(teacher_model=str(places / teacher))
    as_text, by_number = (load_teacher(recipe, classes)(images) for classes in (AS_TEXT, NUMBERS))
    assert torch.equal(by_number, torch.stack([as_text[:, AS_TEXT.index(name)] for name in NUMBERS], dim=1))
    with pytest.raises(UserError, match="--teacher-model"):
        load_teacher(recipe, ["zebra", *NUMBERS[1:]])


def test_names_that_a_model_does_not_know_are_refused(places, tmp_path, capsys):
    shutil.copytree(places / "named", tmp_path / "data")
    (tmp_path / "data/val/n03").rename(tmp_path / "data/val/zebra")
    flags = ["--run", places / "run", "--data", tmp_path / "data", "--device-type", "cpu"]
    assert "'zebra'" in in_process(evaluate.main, evaluate.EvaluateConfig, *flags, capsys=capsys)
    with pytest.raises(UserError, match="class 'crane'"):  # twice: it cannot be told which is which
        numbers_in_model(["crane", "crane", "x"], "data", ["x", "crane", "crane"], "model")
