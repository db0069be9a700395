"""What reads a vision run: evaluation and export, of any kind of attention."""

import json
import shutil

import pytest
import timm
import torch

import tiny_vision
from deit_gka import evaluate
from deit_gka import train as training
from deit_gka.model import candidates
from deit_gka.model.attention import kind_of
from deit_gka.model.checkpoints import find_checkpoint, load_run
from deit_gka.training.config import TrainConfig
from image_files import write
from tiny_vision import MICRO, SHAPE, SIZE
from trainkit_gka.checkpoint import save as save_checkpoint
from trainkit_gka.cli import UserError, run
from vision_runs import EVALUATE, EXPORT, STEPS, TRAIN, Code, checkpoint, flags, in_process, micro, records

NUMBERS = ("top1", "top5", "loss", "images")


def call(command, *argv, out, **options):
    return tiny_vision.call(command, *argv, folder=out / "output", **options)


def last_line(path):
    return json.loads(path.read_text().splitlines()[-1])["metrics"]


def places(data, out):
    """Flags of an evaluation."""
    where = ["--data", data] if data else []
    return [*where, "--device-type", "cpu", "--num-workers", 0, "--results", out / "eval.jsonl"]


def evaluated(data, out, *more):
    """The numbers of an evaluation in this process, by candidate."""
    run(evaluate.main, evaluate.EvaluateConfig, [str(word) for word in [*places(data, out), *more]])
    return last_line(out / "eval.jsonl")


def test_evaluate_finds_what_the_trainer_found(uninterrupted, pictures, tmp_path, capsys):
    """By the command on three processes, and here; also with the best checkpoint, and a file that is not used."""
    last, path = records(uninterrupted, "eval")[-1], uninterrupted / "run"
    wanted = {"model": {key: last[key] for key in NUMBERS}}
    wanted["ema"] = {key: last[key if key == "images" else f"ema_{key}"] for key in NUMBERS}
    call(EVALUATE, *places(pictures, tmp_path), "--run", path, "--device-batch-size", 5, out=tmp_path, ranks=3)
    on_three = last_line(tmp_path / "eval.jsonl")
    shutil.copytree(pictures, tmp_path / "data")
    write(tmp_path / "data/val/IMG_1.HEIC")
    found = evaluated(tmp_path / "data", tmp_path, "--run", path, "--device-batch-size", 8)
    assert "warning: val: not used: 1 .heic; convert .heic" in capsys.readouterr().err
    for weights in ("model", "ema"):
        assert {key: found[weights][key] for key in NUMBERS} == wanted[weights]
        loss = pytest.approx(found[weights]["loss"], rel=1e-6)
        assert {key: on_three[weights][key] for key in NUMBERS} == {**wanted[weights], "loss": loss}
    assert found["ema"]["preprocessing"] == "resize 18, centre crop 16, bicubic"
    assert found["ema"]["crop_pct"] == 0.875 and found["ema"]["images_per_second"] > 0
    best = evaluated(pictures, tmp_path, "--run", path, "--best", "--weights", "ema")
    assert best.keys() == {"ema"}
    assert best["ema"]["top1"] == max(record["ema_top1"] for record in records(uninterrupted, "eval"))


@pytest.mark.parametrize("name, more", [
    ("deit_tiny_gka_patch16_224", ["spatial_offsets=LU"]), ("deit_tiny_patch16_224", [])
], ids=["ours", "timm's"])  # fmt: skip
def test_a_hybrid_trains_resumes_exports_and_evaluates(name, more, tmp_path, capsys):
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
    exported = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(exported(images), model(images))
    assert evaluated("", tmp_path, "--run", folder)["model"]["images"] == 599
    for attention in ("", "AG"):
        argv = [*words, "--model-tag", folder.name, "--attention", attention]
        assert f"--attention is {attention}" in in_process(training.main, TrainConfig, *argv, capsys=capsys)


def test_an_exported_run_is_timms(uninterrupted, tmp_path):
    folder = tmp_path / "exported"
    call(EXPORT, "--run", uninterrupted / "run", "--out", folder, out=tmp_path)
    modes = {file.stat().st_mode for file in (*folder.iterdir(), tmp_path / "output/stdout")}
    assert len(modes) == 1  # what any new file has
    model = micro(3).eval()
    model.load_state_dict(checkpoint(uninterrupted, STEPS, "ema"))
    by_folder = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    arguments = dict(SHAPE, num_classes=3, img_size=SIZE, checkpoint_path=str(folder / "model.safetensors"))
    by_file = timm.create_model("deit_tiny_gka_patch16_224", **arguments).eval()
    with torch.inference_mode():
        images = torch.randn(4, 3, SIZE, SIZE)
        logits = model(images)
        assert torch.equal(by_folder(images), logits) and torch.equal(by_file(images), logits) and logits.std() > 0
    config = json.loads((folder / "config.json").read_text())
    assert config["label_names"] == ["class_0", "class_1", "class_2"] and config["num_classes"] == 3
    assert config["architecture"] == "deit_tiny_gka_patch16_224"
    assert timm.data.resolve_model_data_config(by_folder)["crop_pct"] == 0.875


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
        return in_process(evaluate.main, evaluate.EvaluateConfig, *places(pictures, tmp_path), *more, capsys=capsys)

    three = [*TIMM, "num_classes=3"]
    for name in ("four", "code"):
        said = message(*three, "--checkpoint", tmp_path / f"{name}.pth")
        assert "does not hold weights of this model" in said
    assert not Code.MARKER.exists()
    said = message(*TIMM, "num_classes=4", "--checkpoint", tmp_path / "four.pth")
    assert "was trained on 4 classes but" in said and "has 3" in said
    assert "weights not found" in message(*three, "--checkpoint", tmp_path / "none.pth")
    assert "--model needs weights" in message(*TIMM)
    for both in ([], [*TIMM, "--run", uninterrupted / "run"]):
        assert "give either --run" in message(*both)
    assert "no checkpoint in" in message("--run", tmp_path)
    assert "was trained on 3 classes but digits has 10" in message("--run", uninterrupted / "run", "--data", "digits")
    assert not (tmp_path / "eval.jsonl").exists()

    (found,) = evaluated(pictures, tmp_path, *three, "--checkpoint", tmp_path / "three.pth").values()
    last = records(uninterrupted, "eval")[-1]
    assert found["top1"] == last["top1"] and found["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_data_that_are_gone_are_named(uninterrupted, pictures, tmp_path, capsys):
    """Evaluating and resuming say what the run needs; evaluating finds it alone."""
    assert evaluated("", tmp_path, "--run", uninterrupted / "run")["ema"]["images"] == 27
    shutil.copytree(uninterrupted / "run", tmp_path / "run")

    def message(data, run):
        argv = [*places(data, tmp_path), "--run", run]
        return in_process(evaluate.main, evaluate.EvaluateConfig, *argv, capsys=capsys)

    needs = f"/run was trained on {pictures} (78 training and 27 validation images in 3 classes)"
    gone = in_process(training.main, TrainConfig, *flags("/nowhere", tmp_path), capsys=capsys)
    for said in (message("/nowhere", uninterrupted / "run"), gone):
        assert "/nowhere does not exist" in said and needs in said
    state = json.loads((tmp_path / f"run/checkpoints/step_{STEPS:08d}/state.json").read_text())
    del state["trained_on"]  # as runs were that did not write it down
    weights = {"model": checkpoint(uninterrupted, STEPS, "model")}
    said = message("", save_checkpoint(tmp_path / "old/checkpoints", STEPS, weights, state))
    assert "--data is missing" in said and "78 training and 27 validation images in 3 classes" in said


def test_folders_that_are_not_vision_runs_are_refused(uninterrupted, tmp_path):
    language = save_checkpoint(tmp_path / "run/checkpoints", 1, {"model": {"w": torch.zeros(1)}}, {"train_config": {}})
    exported, other, raw = tmp_path / "exported", tmp_path / "other", tmp_path / "raw/step_00000030"
    for folder, config in ((exported, '{"architecture": "deit_tiny_gka_patch16_224"}'), (other, '{"model_type": "x"}')):
        write(folder / "model.safetensors")
        write(folder / "config.json", config.encode())
    no_vision = "not an exported vision model; nanochat_gka's commands take language"
    for read, folder, message in (
        *((find_checkpoint, folder, "is not of a vision run; nanochat") for folder in (tmp_path / "run", language)),
        (find_checkpoint, exported, r"give the run that it was exported from, or.*--checkpoint .*/model\.safetensors"),
        (find_checkpoint, other, no_vision),
        (lambda folder: candidates.of_export(folder, "cpu"), other, no_vision),
        (find_checkpoint, tmp_path, "no checkpoint in"),
    ):
        with pytest.raises(UserError, match=message):
            read(folder)
    found = find_checkpoint(uninterrupted / "run/checkpoints" / f"step_{STEPS:08d}")
    assert found.step == STEPS and find_checkpoint(uninterrupted / "run", best=True).path.parent.name == "best"
    shutil.copytree(found.path, raw)
    (raw / "ema.safetensors").unlink()
    found.path = raw
    with pytest.raises(UserError, match="has no ema weights; choose --weights model"):
        load_run(found, "ema", "cpu")
