"""What reads a vision run: evaluation and export, of any kind of attention, and which class is which."""

import json
import re
import shutil

import pytest
import timm
import torch
from PIL import Image

import tiny
from deit_gka import evaluate
from deit_gka.data.sources.classes import in_order, numbers_in_model
from deit_gka.data.transforms import eval_transform
from deit_gka.model.attention import kind_of
from deit_gka.model.checkpoints import export, find_checkpoint, load_run
from deit_gka.recipe import Recipe
from deit_gka.training.distillation import load_teacher
from tiny import events
from tiny_images import write
from tiny_vision import MICRO, SHAPE, SIZE, call, encoded
from trainkit_gka.checkpoint import save as save_checkpoint
from trainkit_gka.cli import UserError, run
from trainkit_gka.exports import CONFIG, WEIGHTS
from trainkit_gka.progress import read_lines
from vision_runs import EVALUATE, EXPORT, STEPS, TRAIN, Code, checkpoint, evaluated, micro, save_run

METRICS = ("top1", "top5", "loss", "images")


def test_evaluate_finds_what_the_trainer_found(uninterrupted, pictures, tmp_path):
    """By the command on three processes, and here; also with the best checkpoint."""
    last, path = events(uninterrupted, "eval")[-1], uninterrupted / "run"
    wanted = {"model": {key: last[key] for key in METRICS}}
    wanted["ema"] = {key: last[key if key == "images" else f"ema_{key}"] for key in METRICS}
    flags = ["--data", pictures, "--device-type", "cpu", "--num-workers", 0, "--results", tmp_path / "eval.jsonl"]
    call(EVALUATE, *flags, "--run", path, "--device-batch-size", 5, folder=tmp_path, ranks=3)
    on_three = json.loads((tmp_path / "eval.jsonl").read_text())["metrics"]
    metrics = evaluated(tmp_path, "--data", pictures, "--run", path, "--device-batch-size", 8)["metrics"]
    for weights in ("model", "ema"):
        assert {key: metrics[weights][key] for key in METRICS} == wanted[weights]
        loss = pytest.approx(metrics[weights]["loss"], rel=1e-6)
        assert {key: on_three[weights][key] for key in METRICS} == {**wanted[weights], "loss": loss}
    assert metrics["ema"]["preprocessing"] == "resize 18, centre crop 16, bicubic"
    best = evaluated(tmp_path, "--data", pictures, "--run", path, "--best", "--weights", "ema")["metrics"]
    assert best.keys() == {"ema"}
    assert best["ema"]["top1"] == max(record["ema_top1"] for record in events(uninterrupted, "eval"))


def test_the_rate_of_loading_is_that_of_all_workers(tmp_path, monkeypatch):
    """600 images took 12 seconds of three workers."""
    model, settings = torch.nn.Identity(), {"input_size": (SIZE, SIZE), "crop_pct": 1.0}
    model.num_classes = 10
    counts = {"top1": 50.0, "top5": 90.0, "loss": 1.0, "images": 600, "broken": 0}
    counts |= {"images_per_second": 80.0, "loading": 12.0}
    monkeypatch.setattr(evaluate, "load_models", lambda *_: ({"model": model}, settings, ()))
    monkeypatch.setattr(evaluate, "evaluation_batches", lambda *_: (batch for batch in ()))
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: {"model": counts})
    monkeypatch.setattr(evaluate.workers, "worker_context", lambda *_: None)
    flags = ["--model", "x", "--pretrained", "--data", "digits", "--device-type", "cpu", "--num-workers", "3"]
    run(evaluate.main, evaluate.EvaluateConfig, [*flags, "--results", str(tmp_path / "eval.jsonl")])
    [line] = read_lines(tmp_path / "eval.jsonl")
    assert line["metrics"]["model"]["loader_images_per_second"] == 600 / (12 / 3)


@pytest.mark.parametrize("name, more", [
    ("deit_tiny_gka_patch16_224", ["spatial_offsets=LU"]), ("deit_tiny_patch16_224", [])
], ids=["ours", "timm's"])  # fmt: skip
def test_a_hybrid_trains_resumes_exports_and_evaluates(name, more, tmp_path):
    words = ["--data", "digits", "--out", tmp_path, "--results", tmp_path / "results.jsonl", "--model", name]
    words += [*MICRO[:-4], *more, *MICRO[-4:], "--attention", "GA", "--epochs", 1, "--warmup-epochs", 0]
    words += ["--batch-size", 64, "--repeated-aug", 1, "--num-workers", 0]
    call(TRAIN, *words, "--stop-after", 2, folder=tmp_path)
    assert "resuming at update 2" in call(TRAIN, *words, "--stop-after", 3, folder=tmp_path).stdout
    folder = tmp_path / f"{name}-GA"
    model = load_run(find_checkpoint(folder), "model")
    assert [kind_of(block.attn) for block in model.blocks] == ["gka", "softmax"]
    assert [block.attn.offsets.pattern for block in model.blocks if more] == ["LU", "LU"] * bool(more)
    call(EXPORT, "--run", folder, "--out", tmp_path / "exported", "--weights", "model", folder=tmp_path)
    modes = {file.stat().st_mode for file in (*(tmp_path / "exported").iterdir(), tmp_path / "stdout")}
    assert len(modes) == 1  # what any new file has
    exported = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(exported(images), model(images))
    assert evaluated(tmp_path, "--run", folder)["metrics"]["model"]["images"] == 599
    assert "--data" in tiny.refused(evaluate.main, evaluate.EvaluateConfig, "--run", tmp_path / "exported")


# What they refuse

TIMM = ["--model", "deit_tiny_gka_patch16_224", "--model-kwargs", f"img_size={SIZE}"]
TIMM += [f"{key}={value}" for key, value in SHAPE.items()]


def test_a_timm_model_takes_a_file_of_deits_layout_and_refuses_others(uninterrupted, pictures, tmp_path):
    """A file of code is refused without being run."""
    weights = checkpoint(uninterrupted, STEPS, "model")
    Code.MARKER.unlink(missing_ok=True)
    for name, content in (
        ("three", {"model": weights}),
        ("four", {"model": micro(classes=4, size=SIZE, **SHAPE).state_dict()}),
        ("code", {"model": weights, "args": Code()}),
    ):
        torch.save(content, tmp_path / f"{name}.pth")
    three, four = ([*TIMM, f"num_classes={n}", "--crop-pct", 0.875, "--checkpoint"] for n in (3, 4))
    for flags, word in (
        ((*three, tmp_path / "four.pth"), "four.pth"),
        ((*three, tmp_path / "code.pth"), "code.pth"),
        ((*four, tmp_path / "four.pth"), "4 classes"),
        (TIMM, "--checkpoint"),
        ((), "--run"),
        (("--run", uninterrupted / "run", "--data", "digits"), "digits has 10"),
    ):
        argv = ["--data", pictures, *flags]
        assert word in tiny.refused(evaluate.main, evaluate.EvaluateConfig, *argv)
    assert not Code.MARKER.exists()
    (metrics,) = evaluated(tmp_path, "--data", pictures, *three, tmp_path / "three.pth")["metrics"].values()
    last = events(uninterrupted, "eval")[-1]
    assert metrics["top1"] == last["top1"] and metrics["loss"] == pytest.approx(last["loss"], rel=1e-6)
    # A run finds its data alone.
    assert evaluated(tmp_path, "--run", uninterrupted / "run")["metrics"]["ema"]["images"] == 27


def test_folders_that_are_not_vision_runs_are_refused(tmp_path):
    language = save_checkpoint(tmp_path / "run/checkpoints", 1, {"model": {"w": torch.zeros(1)}}, {"train_config": {}})
    write(tmp_path / "other/model.safetensors")
    write(tmp_path / "other/config.json", b'{"model_type": "x"}')
    for folder in (language, tmp_path / "other", tmp_path / "empty"):
        with pytest.raises(UserError, match=str(folder)):
            find_checkpoint(folder)


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


def run_and_export(folder, classes):
    """A run whose model is right about every colour, and calls the k-th of them classes[k]; and an export of it."""
    model = micro(classes=COUNT, size=SIZE, **SHAPE).eval()
    pixels = torch.stack([eval_transform(SIZE, 1.0)(picture(place)) for place in range(COUNT)])
    with torch.no_grad():
        features = model.forward_head(model.forward_features(pixels), pre_logits=True)
        model.head.weight.copy_((torch.linalg.pinv(features.double()) @ torch.eye(COUNT).double()).T)
        model.head.bias.zero_()
    export(find_checkpoint(save_run(folder, model, classes)), "model", folder.with_name(f"exported-{folder.name}"))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Data in named and in numbered folders, a run with either, one of when numbers were sorted as text, an export."""
    root = tmp_path_factory.mktemp("classes")
    for name, classes in (("named", NAMES), ("numbered", NUMBERS)):
        write_classes(root / name, classes)
    for name, classes in (("run", NAMES), ("old", AS_TEXT)):
        run_and_export(root / name, classes)
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


TWELVE = (*TIMM, f"num_classes={COUNT}", "--crop-pct", 1, "--checkpoint")
MODELS = {
    "a run": ("--run", "run"),
    "an export": ("--run", "exported-run"),
    "a run's file": (*TWELVE, "run/checkpoints/step_00000001/model.safetensors"),
    "bare weights": (*TWELVE, "bare.safetensors"),
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


def test_a_teacher_whose_classes_are_in_another_order_teaches_by_name(places):
    """Of its answers in its own order, the student gets those to its classes."""
    images, recipe = torch.randn(3, 3, SIZE, SIZE), Recipe(teacher_model=str(places / "exported-old"))
    as_text, by_number = (load_teacher(recipe, classes)(images) for classes in (AS_TEXT, NUMBERS))
    assert torch.equal(by_number, torch.stack([as_text[:, AS_TEXT.index(name)] for name in NUMBERS], dim=1))
    with pytest.raises(UserError, match="--teacher-model"):
        load_teacher(recipe, ["zebra", *NUMBERS[1:]])


DAMAGES = {  # a flipped bit, and a setting that has changed
    WEIGHTS: lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    CONFIG: lambda content: content.replace(b'"crop_pct": 1.0', b'"crop_pct": 0.5'),
}


@pytest.mark.parametrize("named", DAMAGES)
def test_damaged_exports_are_one_line(named, places, tmp_path):
    """The folder or the file in it, wherever it may be named."""
    folder = shutil.copytree(places / "exported-run", tmp_path / "exported")
    write(folder / named, DAMAGES[named]((folder / named).read_bytes()))
    for model in (["--run", folder], [*TWELVE, folder / WEIGHTS]):
        argv = ["--data", places / "named", *model, "--device-type", "cpu"]
        assert str(folder / named) in tiny.refused(evaluate.main, evaluate.EvaluateConfig, *argv)
    with tiny.one_line_error(re.escape(str(folder / named))):
        load_teacher(Recipe(teacher_model=str(folder)), NAMES)


def test_names_that_a_model_does_not_know_are_refused(places, tmp_path):
    shutil.copytree(places / "named", tmp_path / "data")
    (tmp_path / "data/val/n03").rename(tmp_path / "data/val/zebra")
    flags = ["--run", places / "run", "--data", tmp_path / "data", "--device-type", "cpu"]
    assert "'zebra'" in tiny.refused(evaluate.main, evaluate.EvaluateConfig, *flags)
    with pytest.raises(UserError, match="class 'crane'"):  # twice: it cannot be told which is which
        numbers_in_model(["crane", "crane", "x"], "data", ["x", "crane", "crane"], "model")
