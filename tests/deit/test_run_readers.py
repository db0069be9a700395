"""What reads a vision run: evaluation and export, of any kind of attention."""

import json
import shutil

import pytest
import timm
import torch

import tiny_vision
from deit_gka import evaluate
from deit_gka.model.attention import kind_of
from deit_gka.model.checkpoints import find_checkpoint, load_run
from image_files import write
from tiny_vision import MICRO, SHAPE, SIZE
from trainkit_gka.checkpoint import save as save_checkpoint
from trainkit_gka.cli import UserError
from vision_runs import EVALUATE, EXPORT, STEPS, TRAIN, Code, checkpoint, evaluated, in_process, micro, records

NUMBERS = ("top1", "top5", "loss", "images")


def call(command, *argv, out, **options):
    return tiny_vision.call(command, *argv, folder=out / "output", **options)


def test_evaluate_finds_what_the_trainer_found(uninterrupted, pictures, tmp_path):
    """By the command on three processes, and here; also with the best checkpoint."""
    last, path = records(uninterrupted, "eval")[-1], uninterrupted / "run"
    wanted = {"model": {key: last[key] for key in NUMBERS}}
    wanted["ema"] = {key: last[key if key == "images" else f"ema_{key}"] for key in NUMBERS}
    flags = ["--data", pictures, "--device-type", "cpu", "--num-workers", 0, "--results", tmp_path / "eval.jsonl"]
    call(EVALUATE, *flags, "--run", path, "--device-batch-size", 5, out=tmp_path, ranks=3)
    on_three = json.loads((tmp_path / "eval.jsonl").read_text())["metrics"]
    found = evaluated(tmp_path, "--data", pictures, "--run", path, "--device-batch-size", 8)["metrics"]
    for weights in ("model", "ema"):
        assert {key: found[weights][key] for key in NUMBERS} == wanted[weights]
        loss = pytest.approx(found[weights]["loss"], rel=1e-6)
        assert {key: on_three[weights][key] for key in NUMBERS} == {**wanted[weights], "loss": loss}
    assert found["ema"]["preprocessing"] == "resize 18, centre crop 16, bicubic"
    best = evaluated(tmp_path, "--data", pictures, "--run", path, "--best", "--weights", "ema")["metrics"]
    assert best.keys() == {"ema"}
    assert best["ema"]["top1"] == max(record["ema_top1"] for record in records(uninterrupted, "eval"))


@pytest.mark.parametrize("name, more", [
    ("deit_tiny_gka_patch16_224", ["spatial_offsets=LU"]), ("deit_tiny_patch16_224", [])
], ids=["ours", "timm's"])  # fmt: skip
def test_a_hybrid_trains_resumes_exports_and_evaluates(name, more, tmp_path):
    words = ["--data", "digits", "--out", tmp_path, "--results", tmp_path / "results.jsonl", "--model", name]
    words += [*MICRO[:-4], *more, *MICRO[-4:], "--attention", "GA", "--epochs", 1, "--warmup-epochs", 0]
    words += ["--batch-size", 64, "--repeated-aug", 1, "--num-workers", 0]
    call(TRAIN, *words, "--stop-after", 2, out=tmp_path)
    assert "resuming at update 2" in call(TRAIN, *words, "--stop-after", 3, out=tmp_path).stdout
    folder = tmp_path / f"{name}-GA"
    model = load_run(find_checkpoint(folder), "model", "cpu")
    assert [kind_of(block.attn) for block in model.blocks] == ["gka", "softmax"]
    assert [block.attn.offsets.pattern for block in model.blocks if more] == ["LU", "LU"] * bool(more)
    call(EXPORT, "--run", folder, "--out", tmp_path / "exported", "--weights", "model", out=tmp_path)
    modes = {file.stat().st_mode for file in (*(tmp_path / "exported").iterdir(), tmp_path / "output/stdout")}
    assert len(modes) == 1  # what any new file has
    exported = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(exported(images), model(images))
    assert evaluated(tmp_path, "--run", folder)["metrics"]["model"]["images"] == 599


# What they refuse

TIMM = ["--model", "deit_tiny_gka_patch16_224", "--crop-pct", 0.875, "--model-kwargs", f"img_size={SIZE}"]
TIMM += [f"{key}={value}" for key, value in SHAPE.items()]


def test_a_timm_model_takes_a_file_of_deits_layout_and_refuses_others(uninterrupted, pictures, tmp_path, capsys):
    """A file of code is refused without being run."""
    weights = checkpoint(uninterrupted, STEPS, "model")
    Code.MARKER.unlink(missing_ok=True)
    for name, content in (
        ("three", {"model": weights}),
        ("four", {"model": micro(4).state_dict()}),
        ("code", {"model": weights, "args": Code()}),
    ):
        torch.save(content, tmp_path / f"{name}.pth")

    def message(*more):
        return in_process(evaluate.main, evaluate.EvaluateConfig, "--data", pictures, *more, capsys=capsys)

    three = [*TIMM, "num_classes=3"]
    for name in ("four", "code"):
        said = message(*three, "--checkpoint", tmp_path / f"{name}.pth")
        assert "does not hold weights of this model" in said
    assert not Code.MARKER.exists()
    said = message(*TIMM, "num_classes=4", "--checkpoint", tmp_path / "four.pth")
    assert "was trained on 4 classes but" in said and "has 3" in said
    assert "--model needs weights" in message(*TIMM)
    assert "give either --run" in message()
    assert "was trained on 3 classes but digits has 10" in message("--run", uninterrupted / "run", "--data", "digits")

    argv = ["--data", pictures, *three, "--checkpoint", tmp_path / "three.pth"]
    (found,) = evaluated(tmp_path, *argv)["metrics"].values()
    last = records(uninterrupted, "eval")[-1]
    assert found["top1"] == last["top1"] and found["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_data_that_are_gone_are_named(uninterrupted, pictures, tmp_path, capsys):
    """Evaluating says what the run needs, and finds it alone."""
    assert evaluated(tmp_path, "--run", uninterrupted / "run")["metrics"]["ema"]["images"] == 27

    def message(*flags):
        return in_process(evaluate.main, evaluate.EvaluateConfig, *flags, capsys=capsys)

    needs = f"/run was trained on {pictures} (78 training and 27 validation images in 3 classes)"
    said = message("--data", "/nowhere", "--run", uninterrupted / "run")
    assert "/nowhere does not exist" in said and needs in said
    state = json.loads((uninterrupted / f"run/checkpoints/step_{STEPS:08d}/state.json").read_text())
    del state["trained_on"]  # as runs were that did not write it down
    weights = {"model": checkpoint(uninterrupted, STEPS, "model")}
    said = message("--run", save_checkpoint(tmp_path / "old/checkpoints", STEPS, weights, state))
    assert "--data is missing" in said and "78 training and 27 validation images in 3 classes" in said


def test_folders_that_are_not_vision_runs_are_refused(uninterrupted, tmp_path):
    language = save_checkpoint(tmp_path / "run/checkpoints", 1, {"model": {"w": torch.zeros(1)}}, {"train_config": {}})
    exported, other, raw = tmp_path / "exported", tmp_path / "other", tmp_path / "raw/step_00000030"
    for folder, config in ((exported, '{"architecture": "deit_tiny_gka_patch16_224"}'), (other, '{"model_type": "x"}')):
        write(folder / "model.safetensors")
        write(folder / "config.json", config.encode())
    for folder, message in (
        (language, "is not of a vision run; nanochat"),
        (exported, r"give the run that it was exported from, or.*--checkpoint .*/model\.safetensors"),
        (other, "not an exported vision model; nanochat_gka's commands take language"),
        (tmp_path, "no checkpoint in"),
    ):
        with pytest.raises(UserError, match=message):
            find_checkpoint(folder)
    found = find_checkpoint(uninterrupted / "run/checkpoints" / f"step_{STEPS:08d}")
    shutil.copytree(found.path, raw)
    (raw / "ema.safetensors").unlink()
    found.path = raw
    with pytest.raises(UserError, match="has no ema weights; choose --weights model"):
        load_run(found, "ema", "cpu")
