"""What reads a vision run: evaluation and export."""

import json
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch

import tiny_vision
from deit_gka import evaluate
from deit_gka import train as training
from deit_gka.model import candidates
from deit_gka.model import checkpoints as model_io
from deit_gka.training.config import TrainConfig
from tiny_vision import SHAPE, SIZE
from trainkit_gka.checkpoint import save as save_checkpoint
from trainkit_gka.cli import UserError, run
from vision_runs import EVALUATE, EXPORT, STEPS, Code, checkpoint, flags, in_process, micro, records


def test_a_checkpoint_of_another_kind_is_refused_in_one_line(tmp_path):
    folder = save_checkpoint(tmp_path / "run/checkpoints", 1, {"model": {"w": torch.zeros(1)}}, {"train_config": {}})
    for path in (tmp_path / "run", folder):
        with pytest.raises(UserError, match="is not of a vision run; nanochat_gka's commands take language models"):
            model_io.find_checkpoint(path)


def test_an_exported_folder_is_not_a_run_and_a_language_model_is_named(tmp_path):
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"architecture": "deit_tiny_gka_patch16_224"}')
    advice = r"give the run that it was exported from, or.* --model NAME --checkpoint .*/model\.safetensors"
    with pytest.raises(UserError, match=advice):
        model_io.find_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gka-gpt"}')
    readers = (model_io.find_checkpoint, lambda folder: candidates.of_export(folder, "cpu"))
    for read in readers:
        with pytest.raises(UserError, match="not an exported vision model; nanochat_gka's commands take language"):
            read(tmp_path)


def test_data_that_are_gone_are_named(uninterrupted, pictures, tmp_path, capsys):
    """Evaluating and resuming say what the run needs; evaluating finds it alone."""
    argv = [
        "--run",
        uninterrupted / "run",
        "--device-type",
        "cpu",
        "--num-workers",
        0,
        "--results",
        tmp_path / "eval.jsonl",
    ]
    run(evaluate.main, evaluate.EvaluateConfig, [str(flag) for flag in argv])
    assert json.loads((tmp_path / "eval.jsonl").read_text())["metrics"]["ema"]["images"] == 27
    shutil.copytree(uninterrupted / "run", tmp_path / "run")
    (newest,) = (path for path in (tmp_path / "run/checkpoints").iterdir() if path.name.endswith(f"{STEPS}"))
    needs = f"/run was trained on {pictures} (78 training and 27 validation images in 3 classes)"
    message = in_process(evaluate.main, evaluate.EvaluateConfig, *argv, "--data", "/nowhere", capsys=capsys)
    assert "/nowhere does not exist" in message and needs in message
    message = in_process(training.main, TrainConfig, *flags("/nowhere", tmp_path), capsys=capsys)
    assert "/nowhere does not exist" in message and needs in message
    state = json.loads((newest / "state.json").read_text())
    del state["trained_on"]  # as runs were that did not write it down
    folder = save_checkpoint(
        tmp_path / "old/checkpoints", STEPS, {"model": checkpoint(uninterrupted, STEPS, "model")}, state
    )
    message = in_process(evaluate.main, evaluate.EvaluateConfig, *argv, "--run", folder, capsys=capsys)
    assert "--data is missing" in message and "78 training and 27 validation images in 3 classes" in message


def evaluation(data, out, *more, **options):
    """The numbers of the evaluate command, by candidate."""
    argv = ["--data", data, "--device-type", "cpu", "--num-workers", 1, "--results", out / "eval.jsonl", *more]
    done = tiny_vision.call(EVALUATE, *argv, folder=out / "output", **options)
    return json.loads((out / "eval.jsonl").read_text().splitlines()[-1])["metrics"] if not done.returncode else done


NUMBERS = ("top1", "top5", "loss", "images")


def test_evaluate_finds_what_the_trainer_found(uninterrupted, pictures, tmp_path):
    last = records(uninterrupted, "eval")[-1]
    found = evaluation(pictures, tmp_path, "--run", uninterrupted / "run", "--device-batch-size", 8)
    assert {key: found["model"][key] for key in NUMBERS} == {key: last[key] for key in NUMBERS}
    assert {key: found["ema"][key] for key in NUMBERS} == {
        key: last[key if key == "images" else f"ema_{key}"] for key in NUMBERS
    }
    assert found["ema"]["crop_pct"] == 0.875 and found["ema"]["images_per_second"] > 0
    best = evaluation(pictures, tmp_path, "--run", uninterrupted / "run", "--best", "--weights", "ema")
    assert set(best) == {"ema"} and best["ema"]["top1"] == max(
        record["ema_top1"] for record in records(uninterrupted, "eval")
    )
    for ranks in (2, 3):
        parts = evaluation(pictures, tmp_path, "--run", uninterrupted / "run", "--device-batch-size", 5, ranks=ranks)
        for weights in ("model", "ema"):
            assert {key: parts[weights][key] for key in NUMBERS if key != "loss"} == {
                key: found[weights][key] for key in NUMBERS if key != "loss"
            }
            assert parts[weights]["loss"] == pytest.approx(found[weights]["loss"], rel=1e-6)


@pytest.fixture
def deit_file(uninterrupted, tmp_path):
    """The run's raw weights as DeiT's own files hold theirs."""
    torch.save({"model": checkpoint(uninterrupted, STEPS, "model")}, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


TIMM = ["--model", "deit_tiny_gka_patch16_224", "--crop-pct", 0.875]


def kwargs(**more):
    return [
        "--model-kwargs",
        *(f"{key}={value}" for key, value in {**SHAPE, "img_size": SIZE, "num_classes": 3, **more}.items()),
    ]


def test_a_timm_model_with_a_file_of_deits_layout(uninterrupted, pictures, deit_file, tmp_path):
    last = records(uninterrupted, "eval")[-1]
    (found,) = evaluation(
        pictures, tmp_path, *TIMM, *kwargs(), "--checkpoint", deit_file, "--device-batch-size", 8
    ).values()
    assert {key: found[key] for key in NUMBERS} == {key: last[key] for key in NUMBERS}


def test_mistakes_of_evaluate_are_one_line(uninterrupted, pictures, deit_file, tmp_path, capsys):
    def message(*argv):
        argv = ["--data", pictures, "--device-type", "cpu", "--results", tmp_path / "eval.jsonl", *argv]
        return in_process(evaluate.main, evaluate.EvaluateConfig, *argv, capsys=capsys)

    torch.save({"model": micro(4).state_dict()}, tmp_path / "four.pth")
    assert re.search(
        r"was trained on 4 classes but .* has 3",
        message(*TIMM, *kwargs(num_classes=4), "--checkpoint", tmp_path / "four.pth"),
    )
    assert "does not hold weights of this model" in message(*TIMM, *kwargs(), "--checkpoint", tmp_path / "four.pth")
    marker = Path("/tmp/gka-was-here")
    marker.unlink(missing_ok=True)
    torch.save({"model": checkpoint(uninterrupted, STEPS, "model"), "args": Code()}, tmp_path / "code.pth")
    assert (
        "does not hold weights" in message(*TIMM, *kwargs(), "--checkpoint", tmp_path / "code.pth")
        and not marker.exists()
    )
    assert "weights not found" in message(*TIMM, *kwargs(), "--checkpoint", tmp_path / "none.pth")
    assert "give either --run" in message() and "give either --run" in message(*TIMM, "--run", uninterrupted / "run")
    assert "--model needs weights" in message(*TIMM)
    assert "no checkpoint in" in message("--run", tmp_path)
    assert "was trained on 3 classes but digits has 10" in message("--run", uninterrupted / "run", "--data", "digits")
    assert not (tmp_path / "eval.jsonl").exists()


@pytest.mark.parametrize("weights", ["ema", "model"])
def test_an_exported_run_is_timms(uninterrupted, tmp_path, weights):
    folder = tmp_path / "exported"
    done = tiny_vision.call(
        EXPORT, "--run", uninterrupted / "run", "--out", folder, "--weights", weights, folder=tmp_path / "output"
    )
    assert "epoch 5" in done.stdout and str(folder) in done.stdout
    images = torch.randn(4, 3, SIZE, SIZE)
    modes = {file.stat().st_mode for file in (*folder.iterdir(), tmp_path / "output/stdout")}
    assert len(modes) == 1  # what any new file has
    model = micro(3).eval()
    model.load_state_dict(checkpoint(uninterrupted, STEPS, weights))
    by_folder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    arguments = dict(SHAPE, num_classes=3, img_size=SIZE)
    by_file = timm.create_model(
        "deit_tiny_gka_patch16_224", checkpoint_path=str(folder / "model.safetensors"), **arguments
    ).eval()
    with torch.inference_mode():
        logits = model(images)
        assert torch.equal(by_folder(images), logits) and torch.equal(by_file(images), logits) and logits.std() > 0
    config = json.loads((folder / "config.json").read_text())
    about = config["pretrained_cfg"]
    assert about["crop_pct"] == 0.875 and about["input_size"] == [3, SIZE, SIZE] and about["interpolation"] == "bicubic"
    assert config["label_names"] == ["class_0", "class_1", "class_2"] and config["num_classes"] == 3
    assert config["architecture"] == "deit_tiny_gka_patch16_224"
    assert timm.data.resolve_model_data_config(by_folder)["crop_pct"] == 0.875


def test_export_of_what_is_not_there(uninterrupted, tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        model_io.find_checkpoint(tmp_path)
    found = model_io.find_checkpoint(uninterrupted / "run/checkpoints" / f"step_{STEPS:08d}")
    assert found.step == STEPS and model_io.find_checkpoint(uninterrupted / "run", best=True).path.parent.name == "best"
    (tmp_path / "raw").mkdir()
    shutil.copytree(found.path, tmp_path / "raw" / found.path.name)
    (tmp_path / "raw" / found.path.name / "ema.safetensors").unlink()
    found.path = tmp_path / "raw" / found.path.name
    with pytest.raises(UserError, match="has no ema weights; choose --weights model"):
        model_io.load_run(found, "ema", "cpu")
