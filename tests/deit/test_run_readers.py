"""What reads a vision run: evaluation and export, of any kind of attention."""

import json

import pytest
import timm
import torch

from deit_gka import evaluate
from deit_gka.model.attention import kind_of
from deit_gka.model.checkpoints import find_checkpoint, load_run
from image_files import write
from tiny_vision import MICRO, SHAPE, SIZE, call
from trainkit_gka.checkpoint import save as save_checkpoint
from trainkit_gka.cli import UserError
from vision_runs import EVALUATE, EXPORT, STEPS, TRAIN, Code, checkpoint, evaluated, in_process, micro, records

NUMBERS = ("top1", "top5", "loss", "images")


def test_evaluate_finds_what_the_trainer_found(uninterrupted, pictures, tmp_path):
    """By the command on three processes, and here; also with the best checkpoint."""
    last, path = records(uninterrupted, "eval")[-1], uninterrupted / "run"
    wanted = {"model": {key: last[key] for key in NUMBERS}}
    wanted["ema"] = {key: last[key if key == "images" else f"ema_{key}"] for key in NUMBERS}
    flags = ["--data", pictures, "--device-type", "cpu", "--num-workers", 0, "--results", tmp_path / "eval.jsonl"]
    call(EVALUATE, *flags, "--run", path, "--device-batch-size", 5, folder=tmp_path, ranks=3)
    on_three = json.loads((tmp_path / "eval.jsonl").read_text())["metrics"]
    metrics = evaluated(tmp_path, "--data", pictures, "--run", path, "--device-batch-size", 8)["metrics"]
    for weights in ("model", "ema"):
        assert {key: metrics[weights][key] for key in NUMBERS} == wanted[weights]
        loss = pytest.approx(metrics[weights]["loss"], rel=1e-6)
        assert {key: on_three[weights][key] for key in NUMBERS} == {**wanted[weights], "loss": loss}
    assert metrics["ema"]["preprocessing"] == "resize 18, centre crop 16, bicubic"
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
    call(TRAIN, *words, "--stop-after", 2, folder=tmp_path)
    assert "resuming at update 2" in call(TRAIN, *words, "--stop-after", 3, folder=tmp_path).stdout
    folder = tmp_path / f"{name}-GA"
    model = load_run(find_checkpoint(folder), "model", "cpu")
    assert [kind_of(block.attn) for block in model.blocks] == ["gka", "softmax"]
    assert [block.attn.offsets.pattern for block in model.blocks if more] == ["LU", "LU"] * bool(more)
    call(EXPORT, "--run", folder, "--out", tmp_path / "exported", "--weights", "model", folder=tmp_path)
    modes = {file.stat().st_mode for file in (*(tmp_path / "exported").iterdir(), tmp_path / "stdout")}
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
    three, four = [*TIMM, "num_classes=3", "--checkpoint"], [*TIMM, "num_classes=4", "--checkpoint"]
    for flags, word in (
        ((*three, tmp_path / "four.pth"), "four.pth"),
        ((*three, tmp_path / "code.pth"), "code.pth"),
        ((*four, tmp_path / "four.pth"), "4 classes"),
        (TIMM, "--checkpoint"),
        ((), "--run"),
        (("--run", uninterrupted / "run", "--data", "digits"), "digits has 10"),
        (("--run", uninterrupted / "run", "--data", "/nowhere"), str(pictures)),
    ):
        argv = ["--data", pictures, *flags]
        assert word in in_process(evaluate.main, evaluate.EvaluateConfig, *argv, capsys=capsys)
    assert not Code.MARKER.exists()
    (metrics,) = evaluated(tmp_path, "--data", pictures, *three, tmp_path / "three.pth")["metrics"].values()
    last = records(uninterrupted, "eval")[-1]
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
