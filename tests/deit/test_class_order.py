"""Which class is which: numbered folders, and data whose order is not the model's."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import tiny_vision
from deit_gka import evaluate
from deit_gka.data.sources import open_source
from deit_gka.data.sources.classes import in_order, numbers_in_model
from deit_gka.recipe import Recipe
from deit_gka.training.distillation import load_teacher
from image_files import write, write_tar
from tiny_vision import SHAPE, SIZE, encoded
from trainkit_gka.checkpoint import save as save_checkpoint
from trainkit_gka.cli import UserError, run
from vision_runs import EXPORT, in_process, train

COUNT = 12
AS_TEXT = sorted(map(str, range(COUNT)))  # 0, 1, 10, 11, 2, ...


def picture(place):
    colour = (place % 3 * 120, place // 3 % 2 * 240, place // 6 * 240)
    return encoded(Image.new("RGB", (SIZE, SIZE), colour), "PNG")


def write_classes(root, names, train=6, val=2):
    """A colour for each class, the same ones whatever the classes are called."""
    names = list(names)
    for split, count in (("train", train), ("val", val)):
        for place, name in enumerate(names):
            for number in range(count):
                write(root / split / name / f"{number}.png", picture(place))
    return root


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("numbered"), map(str, range(COUNT)))


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("named"), [f"n{number:02d}" for number in range(COUNT)])


LEARN = ["--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0, "--drop-path", 0, "--smoothing", 0, "--clip-grad", 0,
         "--repeated-aug", 1, "--batch-size", 24, "--epochs", 60, "--lr", 0.1, "--model-ema-decay", 0,
         "--eval-every", "-1", "--save-every", "-1", "--keep", 1, "--num-workers", 0, "--scale", 1, 1]  # fmt: skip


@pytest.fixture(scope="module")
def learned(named, tmp_path_factory):
    """A run that tells the named classes apart."""
    out = tmp_path_factory.mktemp("learned")
    train(named, out, *LEARN)
    return out / "run"


@pytest.fixture
def accuracy(tmp_path, capsys):
    """Top-1 of a model on data, and what the command said."""

    def measured(data, *model):
        results = tmp_path / "results.jsonl"
        flags = ["--data", data, *model, "--device-type", "cpu", "--num-workers", 0, "--results", results]
        run(evaluate.main, evaluate.EvaluateConfig, list(map(str, flags)))
        (values,) = json.loads(results.read_text().splitlines()[-1])["metrics"].values()
        said = capsys.readouterr()
        return values["top1"], said.err + said.out

    return measured


def test_whole_numbers_are_sorted_as_numbers(tmp_path):
    assert in_order(["10", "9", "0"]) == ["0", "9", "10"]
    assert in_order(["10", "9", "x"]) == ["10", "9", "x"] and in_order(["10", "9.5", "-1"]) == ["-1", "10", "9.5"]
    write_classes(tmp_path, map(str, range(COUNT)), train=1, val=1)
    source = open_source(str(tmp_path), "val")
    assert source.classes == [str(number) for number in range(COUNT)]
    assert {source.read(index)[2]: source.read(index)[1] for index in range(COUNT)} == {
        str(tmp_path / f"val/{number}/0.png"): number for number in range(COUNT)
    }


def model_of(folder):
    shape = (f"{key}={value}" for key, value in {**SHAPE, "img_size": SIZE, "num_classes": COUNT}.items())
    return ["--model", "deit_tiny_gka_patch16_224", "--model-kwargs", *shape, "--checkpoint", folder, "--crop-pct", 1]


def test_numbered_folders_are_scored_as_named_ones(learned, named, numbered, tmp_path, accuracy):
    """By a run, by an export, and by bare weights that know no names."""
    (checkpoint,) = (learned / "checkpoints").iterdir()
    shutil.copy(checkpoint / "model.safetensors", tmp_path / "bare.safetensors")
    tiny_vision.call(EXPORT, "--run", learned, "--out", tmp_path / "exported", "--weights", "model", folder=tmp_path)
    models = {
        "run": ["--run", learned],
        "export": ["--run", tmp_path / "exported"],
        "file of the run": model_of(checkpoint / "model.safetensors"),
        "bare": model_of(tmp_path / "bare.safetensors"),
    }
    for name, model in models.items():
        (top1, said), (by_number, warned) = accuracy(named, *model), accuracy(numbered, *model)
        assert top1 == by_number == 100, name
        assumed = "does not name its classes; taken in the data's order: 0 'n00', 1 'n01', 2 'n02'"
        assert (assumed in said) == (name == "bare")
        if name != "bare":
            assert "other names for its classes ('0' for 'n00')" in warned and "numbered" not in said


def sorted_as_text(checkpoint):
    """The checkpoint as it was written while numbers were sorted as text: the same weights, its classes renamed."""
    state = json.loads((checkpoint / "state.json").read_text())
    state["classes"] = AS_TEXT
    weights = {path.stem: load_file(path) for path in checkpoint.glob("*.safetensors")}
    shutil.rmtree(checkpoint)
    save_checkpoint(checkpoint.parent, state["progress"]["step"], weights, state)


def test_the_names_of_an_old_run_decide(learned, tmp_path, accuracy):
    """Its class 2 is '10': it is right about folders, numbered tars and a hub's order, none of which sort so."""
    shutil.copytree(learned, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    sorted_as_text(checkpoint)
    data = write_classes(tmp_path / "data", AS_TEXT)  # the colour that the model calls 2 is in the folder 10
    top1, said = accuracy(data, "--run", tmp_path / "run")
    assert top1 == 100 and f"classes are numbered as in {tmp_path / 'run'}, by name: '2' is 4, not 2" in said
    for split in ("train", "val"):
        members = [(f"{name}.png", picture(place)) for place, name in enumerate(AS_TEXT)]
        labels = [(f"{name}.cls", name.encode()) for name in AS_TEXT]
        write_tar(tmp_path / "tars" / f"{split}-0.tar", members + labels)
    assert accuracy(tmp_path / "tars", "--run", tmp_path / "run")[0] == 100
    for split in ("train", "val"):  # word k for number k
        for name in AS_TEXT:
            (data / split / name).rename(data / split / f"word{int(name):02d}")
    top1, said = accuracy(data, "--run", tmp_path / "run")
    assert top1 == 100 and "other names for its classes ('word00' for '0')" in said


@pytest.mark.parametrize("numbers", [range(12), range(1, 13), range(0, 120, 10)])
def test_numbers_sorted_as_text_are_matched_with_words_by_value(numbers):
    """From 0, from 1 (as Flowers-102's are) and with gaps."""
    known, words = sorted(map(str, numbers)), [f"word{place:02d}" for place in range(len(numbers))]
    places, said = numbers_in_model(words, "data", known, "model")
    assert [known[place] for place in places] == [str(number) for number in numbers]
    assert f"other names for its classes ('word00' for '{numbers[0]}')" in said
    assert numbers_in_model(words, "data", [f"n{name}" for name in known], "model")[0] == list(range(12))


def test_an_old_run_teaches_by_name(learned, tmp_path):
    """Of its answers in its own order, the student gets those to its classes."""
    shutil.copytree(learned, tmp_path / "run")
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    sorted_as_text(checkpoint)
    images, numbers = torch.randn(3, 3, SIZE, SIZE), [str(number) for number in range(COUNT)]
    tiny_vision.call(EXPORT, "--run", tmp_path / "run", "--out", tmp_path / "exported", "--weights", "model",
                     folder=tmp_path)  # fmt: skip
    for teacher in ("run", "exported"):
        recipe = Recipe(teacher_model=str(tmp_path / teacher))
        own, asked = (load_teacher(recipe, classes)(images) for classes in (AS_TEXT, numbers))
        assert torch.equal(asked, torch.stack([own[:, AS_TEXT.index(name)] for name in numbers], dim=1))
        with pytest.raises(UserError, match="other classes than the data's"):
            load_teacher(recipe, ["zebra", *numbers[1:]])


def test_an_old_run_goes_on_with_its_numbers(numbered, tmp_path):
    """What is trained before and after the change of the order is what is trained without it."""
    short = [*LEARN, "--epochs", 2, "--warmup-epochs", 0]
    for name, order in (("new", None), ("old", AS_TEXT)):
        train(numbered, tmp_path / name, *short, "--stop-after", 2)
        if order:
            sorted_as_text(tmp_path / name / "run/checkpoints/step_00000002")
    done = train(numbered, tmp_path / "old", *short)
    assert f"classes are numbered as in {tmp_path / 'old/run'}, by name: '2' is 4, not 2" in done.stdout
    assert "by name" not in train(numbered, tmp_path / "new", *short).stdout
    newest = sorted((tmp_path / "old/run/checkpoints").iterdir())[-1]
    assert json.loads((newest / "state.json").read_text())["classes"] == AS_TEXT
    heads = [load_file(tmp_path / name / "run/checkpoints" / newest.name / "model.safetensors")["head.weight"]
             for name in ("new", "old")]  # fmt: skip
    assert not heads[0].equal(heads[1])  # the labels of the last updates are the old run's own


def test_names_that_a_model_does_not_know_are_refused(learned, named, tmp_path, capsys):
    shutil.copytree(named, tmp_path / "data")
    (tmp_path / "data/val/n03").rename(tmp_path / "data/val/zebra")
    flags = ["--run", learned, "--data", tmp_path / "data", "--device-type", "cpu"]
    message = in_process(evaluate.main, evaluate.EvaluateConfig, *flags, capsys=capsys)
    assert "has a class 'zebra', which" in message and "does not know" in message
    with pytest.raises(UserError, match="class 'crane'"):  # twice: it cannot be told which is which
        numbers_in_model(["crane", "crane", "x"], "data", ["x", "crane", "crane"], "model")


def test_a_single_class_is_warned_of(tmp_path, accuracy):
    data = write_classes(tmp_path / "data", ["cat"], train=24)
    done = train(data, tmp_path, *LEARN, "--epochs", 1, "--warmup-epochs", 0)
    warning = "warning: all images are of one class, 'cat': any model is right about all of them\n"
    assert warning in done.stdout
    top1, said = accuracy(data, "--run", tmp_path / "run", "--weights", "model")
    assert top1 == 100 and said.count(warning) == 1
