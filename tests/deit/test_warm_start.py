"""Starting from weights: where they come from, what is taken of them, and training that starts so."""

import argparse
import re
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file

import tiny_vision
from deit_gka import train as training
from deit_gka.model.checkpoints import build
from deit_gka.model.checkpoints import load_file as load_weights
from deit_gka.model.warm_start import fingerprint, read_weights, warm_start
from deit_gka.training.config import TrainConfig
from digit_runs import GKA, SHALLOW, SOFTMAX, VLT, accuracy, flags, micro, newest, train
from trainkit_gka.cli import UserError
from vision_runs import Code, in_process


def test_softmax_gives_gka_all_but_bandwidths():
    model, weights = micro(GKA), micro(SOFTMAX).state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = warm_start(model, weights, "x")
    assert done.new == ["blocks.0.attn.log_sigma", "blocks.1.attn.log_sigma"] and not done.resized
    assert set(done.taken) == model.state_dict().keys() - set(done.new)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name in done.new else weights[name]), name
    assert done.unused == [f"blocks.{block}.attn.qkv.{kind}" for block in (0, 1) for kind in ("weight", "bias")]
    total = sum(parameter.numel() for parameter in model.parameters())
    assert done.share == pytest.approx((total - 4) / total)
    assert str(done).startswith(f"{len(done.taken)} tensors as they are (99.9%")
    unused = "not used: blocks.*.attn.qkv.weight (2), blocks.*.attn.qkv.bias (2)"
    assert f"left at their initialisation: blocks.*.attn.log_sigma (2); {unused}" in str(done)


def test_vlt_takes_queries_and_keys_of_softmax():
    """With values and output of softmax made the identity, both models compute the same."""
    vlt, softmax = micro(VLT), micro(SOFTMAX)
    for block in softmax.blocks:
        with torch.no_grad():
            block.attn.qkv.weight[128:] = torch.eye(64)
            block.attn.qkv.bias.normal_()
            block.attn.qkv.bias[128:] = 0
    done = warm_start(vlt, softmax.state_dict(), "x")
    assert done.new == ["blocks.0.attn.value_bias", "blocks.1.attn.value_bias"]
    assert "not used: blocks.*.attn.qkv[values].weight (2), blocks.*.attn.qkv[values].bias (2)" in str(done)
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(vlt.eval()(images), softmax.eval()(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change", [dict(size=48), dict(patch_size=16), dict(size=48, patch_size=4), dict(size=24)], ids=str
)
def test_positions_and_patches_are_resized_as_in_timm(change, tmp_path):
    weights, model, timms = micro(SOFTMAX).state_dict(), micro(SOFTMAX, **change), micro(SOFTMAX, **change)
    torch.nn.init.normal_(weights["pos_embed"])
    torch.save({"model": weights}, tmp_path / "weights.pth")
    done = warm_start(model, read_weights(str(tmp_path / "weights.pth")), "x")
    timm.models.load_checkpoint(
        timms, str(tmp_path / "weights.pth"), filter_fn=timm.models.vision_transformer.checkpoint_filter_fn
    )
    assert done.resized == ["pos_embed"] * ("size" in change or "patch_size" in change) + [
        "patch_embed.proj.weight"
    ] * ("patch_size" in change)
    assert not done.new and not done.unused
    for name, value in timms.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_positions_without_class_token_are_resized():
    """CaiT's class token comes in later and has none."""
    model, weights = (build("cait_xxs24_224", 10, size, depth=1, embed_dim=48, num_heads=4) for size in (64, 32))
    torch.nn.init.ones_(weights.pos_embed)
    assert warm_start(model, weights.state_dict(), "x").resized == ["pos_embed"]
    torch.testing.assert_close(model.pos_embed, torch.ones(1, 16, 48))


def test_other_classes_start_a_new_head():
    model = micro(classes=3)
    before = model.head.weight.clone()
    done = warm_start(model, micro(classes=10).state_dict(), "x")
    assert (
        done.new == ["head.weight", "head.bias"]
        and torch.equal(model.head.weight, before)
        and "head.weight, head.bias" in str(done)
    )


def test_missing_distillation_token_keeps_its_start():
    model, weights = micro("deit_tiny_distilled_patch16_224"), micro(SOFTMAX, size=48).state_dict()
    token = model.pos_embed[:, 1].clone()
    done = warm_start(model, weights, "x")
    assert set(done.new) == {"dist_token", "head_dist.weight", "head_dist.bias"} and done.resized == ["pos_embed"]
    assert torch.equal(model.pos_embed[:, 0], weights["pos_embed"][:, 0]) and torch.equal(model.pos_embed[:, 1], token)
    back = micro(SOFTMAX)
    warm_start(back, model.state_dict(), "x")
    assert torch.equal(back.pos_embed[:, 0], model.pos_embed[:, 0]) and torch.equal(
        back.pos_embed[:, 1:], model.pos_embed[:, 2:]
    )


def test_unfitting_weights_are_refused():
    wide = micro(embed_dim=128).state_dict()
    shapes = r"cls_token is \(1, 1, 128\) there and \(1, 1, 64\) here"
    with pytest.raises(UserError, match=rf"^x has only 1 of this model's \d+ tensors, 0% of its parameters; {shapes}"):
        warm_start(micro(depth=4), {name: value for name, value in wide.items() if "log_sigma" not in name}, "x")
    with pytest.raises(UserError, match=r"^x has only 0 of .*give weights of a model of the same width and kind"):
        warm_start(micro(), timm.create_model("resnet10t", num_classes=7).state_dict(), "x")
    broken = micro().state_dict()
    broken["norm.bias"][0] = torch.nan
    with pytest.raises(UserError, match=r"x holds weights that are not finite, norm.bias is the first"):
        warm_start(micro(), broken, "x")


def test_weights_come_from_files_runs_and_exports(digits, tmp_path):
    weights, average = newest(digits), newest(digits, "ema")
    torch.save(
        {"model": weights, "epoch": 3, "args": argparse.Namespace(lr=5e-4, gpu=0)}, tmp_path / "deit.pth"
    )  # as DeiT's trainer leaves it
    torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, tmp_path / "timm.pth.tar")
    save_file(weights, tmp_path / "plain.safetensors")
    for name in ("deit.pth", "timm.pth.tar", "plain.safetensors"):
        assert fingerprint(read_weights(str(tmp_path / name))) == fingerprint(weights)
        model = load_weights(tmp_path / name, build(SOFTMAX, 10, 32, patch_size=16, embed_dim=64, depth=1, num_heads=2))
        assert fingerprint(model.state_dict()) == fingerprint(weights)
    tiny_vision.call(
        "deit_gka.export", "--run", digits / "run", "--out", tmp_path / "exported", folder=tmp_path / "output"
    )
    for folder in (digits / "run", sorted((digits / "run/checkpoints").iterdir())[-1], tmp_path / "exported"):
        assert fingerprint(read_weights(str(folder))) == fingerprint(average) != fingerprint(weights)


def test_sources_without_weights_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.save({"model": Code()}, tmp_path / "code.pth")
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    for source, message in (
        *((tmp_path / f"{name}.pth", "does not hold weights") for name in ("code", "text", "list")),
        ("/nowhere.pth", "/nowhere.pth does not exist; it is a file of weights, a run or exported folder"),
        (tmp_path, "no checkpoint in"),
        (GKA, f"--initial-weights {GKA}: timm has no weights of it here"),
        (SOFTMAX, "give a file instead"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            read_weights(str(source))
        assert "\n" not in str(caught.value)


def test_fine_tuning_at_another_size(digits, tmp_path):
    """32 -> 48 pixels.

    At a rate that teaches nothing in an epoch, larger patches know what smaller ones did; more patches learn on.
    """
    tuning = ["--model", SOFTMAX, "--input-size", 48, "--epochs", 1, "--initial-weights", digits / "run"]
    larger = ["--model-kwargs", "patch_size=24", *SHALLOW[2:], "--lr", 1e-3, "--min-lr", 1e-7, "--model-tag", "larger"]
    done = train(tmp_path, *tuning, *larger)
    assert re.search(
        r"starting from .*/run: 19 tensors as they are \(100.0% .*\); resized: patch_embed.proj.weight\n", done.stdout
    ), done.stdout
    assert accuracy(tmp_path, "larger") > 50
    done = train(tmp_path, *tuning, "--lr", 0.05)
    assert (
        "; resized: pos_embed\n" in done.stdout
        and accuracy(tmp_path) > 20
        and newest(tmp_path)["pos_embed"].shape == (1, 10, 64)
    )


def test_resumed_run_keeps_its_initial_weights(digits, tmp_path, capsys):
    save_file(newest(digits), tmp_path / "weights.safetensors")
    common = ["--model", GKA, "--epochs", 1, "--lr", 0.01, "--initial-weights"]
    train(tmp_path / "whole", *common, tmp_path / "weights.safetensors", "--stop-after", 4)
    done = train(tmp_path, *common, tmp_path / "weights.safetensors", "--stop-after", 2)
    assert "left at their initialisation: blocks.*.attn.log_sigma;" in done.stdout
    for others in (digits / "run", ""):
        message = in_process(training.main, TrainConfig, *flags(tmp_path, *common, others), capsys=capsys)
        start = r"the run in .* started from .*weights.safetensors as it was then; give the same"
        assert re.search(rf"--initial-weights is .* but {start}", message)
    shutil.move(tmp_path / "weights.safetensors", tmp_path / "moved.safetensors")
    for source in ("weights", "moved"):
        done = train(tmp_path, *common, tmp_path / f"{source}.safetensors", "--stop-after", 3 + (source == "moved"))
        assert "resuming at update" in done.stdout and "starting from" not in done.stdout
    for name in ("model", "ema", "optimizer"):
        assert fingerprint(newest(tmp_path, name)) == fingerprint(newest(tmp_path / "whole", name))
    save_file(newest(tmp_path), tmp_path / "moved.safetensors")
    message = in_process(
        training.main, TrainConfig, *flags(tmp_path, *common, tmp_path / "moved.safetensors"), capsys=capsys
    )
    assert "started from" in message
    message = in_process(
        training.main,
        TrainConfig,
        *flags(digits, "--model", SOFTMAX, "--epochs", 5, "--lr", 0.2, "--initial-weights", digits),
        capsys=capsys,
    )
    assert "started from no weights" in message
