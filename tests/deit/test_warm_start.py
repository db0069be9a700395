"""Starting from weights: where they come from, what is taken of them, and training that starts so.

And what travels with weights: names of classes and preprocessing, from a folder of JPEGs to exports and to new runs.
"""

import argparse
import re
import shutil

import pytest
import timm
import torch
from safetensors.torch import save_file

import tiny
import tiny_vision
from deit_gka import train as training
from deit_gka.data.sources import decode
from deit_gka.data.transforms import eval_transform
from deit_gka.model.checkpoints import export, find_checkpoint, find_model
from deit_gka.model.warm_start import FLAG, warm_start, warnings_of
from deit_gka.recipe import Recipe
from deit_gka.training.config import TrainConfig
from tiny import one_line_error
from trainkit_gka.checkpoint import fingerprint
from vision_runs import GKA, KNOWS_DIGITS, SOFTMAX, VLT, Code, digit_flags, micro, newest, train_digits
from vision_runs import train as train_on

# What is taken


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
    assert done.share == pytest.approx((total - 4) / total) and "blocks.*.attn.log_sigma (2)" in str(done)


def test_vlt_takes_queries_and_keys_of_softmax():
    """With values and output of softmax made the identity, both models compute the same."""
    vlt, softmax = micro(VLT).double(), micro(SOFTMAX).double()
    for block in softmax.blocks:
        with torch.no_grad():
            block.attn.qkv.weight[128:] = torch.eye(64)
            block.attn.qkv.bias.normal_()
            block.attn.qkv.bias[128:] = 0
    done = warm_start(vlt, softmax.state_dict(), "x")
    assert done.new == ["blocks.0.attn.value_bias", "blocks.1.attn.value_bias"]
    images = torch.randn(3, 3, 32, 32).double()
    torch.testing.assert_close(vlt.eval()(images), softmax.eval()(images))


@pytest.mark.parametrize(
    "change", [dict(size=48), dict(patch_size=16), dict(size=48, patch_size=4), dict(size=24)], ids=str
)
def test_positions_and_patches_are_resized_as_in_timm(change, tmp_path):
    weights, model, timms = micro(SOFTMAX).state_dict(), micro(SOFTMAX, **change), micro(SOFTMAX, **change)
    torch.nn.init.normal_(weights["pos_embed"])
    path = str(tmp_path / "weights.pth")
    torch.save({"model": weights}, path)
    done = warm_start(model, find_model(path, FLAG).tensors, "x")
    timm.models.load_checkpoint(timms, path, filter_fn=timm.models.vision_transformer.checkpoint_filter_fn)
    assert done.resized == ["pos_embed", *["patch_embed.proj.weight"] * ("patch_size" in change)]
    assert not done.new and not done.unused
    assert fingerprint(model.state_dict()) == fingerprint(timms.state_dict())


def test_tokens_without_a_counterpart_keep_their_start():
    """A distillation token is new or left out."""
    model, weights = micro("deit_tiny_distilled_patch16_224"), micro(SOFTMAX, size=48).state_dict()
    token = model.pos_embed[:, 1].clone()
    done = warm_start(model, weights, "x")
    assert set(done.new) == {"dist_token", "head_dist.weight", "head_dist.bias"} and done.resized == ["pos_embed"]
    assert torch.equal(model.pos_embed[:, 0], weights["pos_embed"][:, 0]) and torch.equal(model.pos_embed[:, 1], token)
    back = micro(SOFTMAX)
    warm_start(back, model.state_dict(), "x")
    assert torch.equal(back.pos_embed, model.pos_embed[:, [0, *range(2, 18)]])


def test_rows_of_a_head_move_with_their_classes():
    weights, model = micro(classes=4).state_dict(), micro(classes=3)
    start = model.head.weight.clone()
    done = warm_start(model, weights, "x", ["a", "b", "c", "d"], ["d", "new", "a"])
    assert done.known_classes and not done.new
    assert torch.equal(model.head.weight, torch.stack([weights["head.weight"][3], start[1], weights["head.weight"][0]]))
    assert torch.equal(model.head.bias[[0, 2]], weights["head.bias"][[3, 0]])
    same = micro(classes=4)
    for theirs, ours in (("abcd", "abcd"), ("abcd", "wxyz"), ("", "abcd")):  # the same, unrelated and unknown names
        assert not warm_start(same, weights, "x", list(theirs), list(ours)).known_classes
        assert torch.equal(same.head.weight, weights["head.weight"])
    other = micro(classes=3)  # another number of unnamed classes starts a new head
    assert warm_start(other, weights, "x").new == ["head.weight", "head.bias"]


def test_unfitting_weights_are_refused():
    wide, broken = micro(embed_dim=128).state_dict(), micro().state_dict()
    wide = {name: value for name, value in wide.items() if "log_sigma" not in name}
    broken["norm.bias"][0] = torch.nan
    for model, weights, message in (
        (micro(depth=4), wide, r"cls_token is \(1, 1, 128\) there and \(1, 1, 64\) here"),
        (micro(), timm.create_model("resnet10t").state_dict(), "^x has only 0 of"),
        (micro(), broken, "norm.bias"),
    ):
        with one_line_error(message):
            warm_start(model, weights, "x")


# Where weights come from


def test_weights_come_from_files_runs_and_exports(digits, tmp_path):
    weights, average = newest(digits), newest(digits, "ema")
    deits = {"model": weights, "epoch": 3, "args": argparse.Namespace(lr=5e-4, gpu=0)}  # as DeiT's trainer leaves it
    torch.save(deits, tmp_path / "deit.pth")
    torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, tmp_path / "timm.pth.tar")
    save_file(weights, tmp_path / "plain.safetensors")
    for name in ("deit.pth", "timm.pth.tar", "plain.safetensors"):
        assert fingerprint(find_model(tmp_path / name, FLAG).tensors) == fingerprint(weights)
    export(find_checkpoint(digits / "run"), "ema", tmp_path / "exported")
    for folder in (digits / "run", sorted((digits / "run/checkpoints").iterdir())[-1], tmp_path / "exported"):
        assert fingerprint(find_model(folder, FLAG).tensors) == fingerprint(average) != fingerprint(weights)


def test_sources_without_weights_are_one_line(tmp_path, monkeypatch):
    """Nor is code in a file ever run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Code.MARKER.unlink(missing_ok=True)
    torch.save({"model": Code()}, tmp_path / "code.pth")
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    files = [tmp_path / f"{name}.pth" for name in ("code", "text", "list")]
    for source in (*files, "/nowhere.pth", "~nobody-here/weights.pth", tmp_path, GKA):
        with one_line_error(re.escape(str(source))):
            find_model(source, FLAG).tensors  # noqa: B018
    assert not Code.MARKER.exists()


# Training that starts so


def test_resumed_run_keeps_its_initial_weights(digits, tmp_path):
    weights, moved = tmp_path / "weights.safetensors", tmp_path / "moved.safetensors"
    save_file(newest(digits), weights)
    common = ["--model", GKA, "--epochs", 1, "--lr", 0.01, "--initial-weights"]
    train_digits(tmp_path / "at_once", *common, weights, "--stop-after", 4)
    train_digits(tmp_path, *common, weights, "--stop-after", 2)
    shutil.move(weights, moved)
    for source, stop in ((weights, 3), (moved, 4)):  # gone, and under another name
        done = train_digits(tmp_path, *common, source, "--stop-after", stop)
        assert "resuming at update" in done.stdout and "starting from" not in done.stdout
    for name in ("model", "ema", "optimizer"):
        assert fingerprint(newest(tmp_path, name)) == fingerprint(newest(tmp_path / "at_once", name))
    save_file(newest(tmp_path), moved)  # other weights
    # Other weights than the run's, none, and some for a run that began without.
    refused = [(tmp_path, [*common, other]) for other in (digits / "run", "", moved)]
    began_without = [*KNOWS_DIGITS, "--initial-weights", moved]
    for out, argv in (*refused, (digits, began_without)):
        message = tiny.refused(training.main, TrainConfig, *digit_flags(out, *argv))
        assert message.startswith("error: --initial-weights") and str(out) in message


# What travels with weights

COLOURS = ["--mean", 0.5, 0.4, 0.3, "--std", 0.25, 0.5, 0.2]
SHORT = ["--epochs", 1, "--num-workers", 0, "--eval-every", "-1", "--save-every", "-1"]


@pytest.fixture(scope="module")
def out(pictures, tmp_path_factory):
    """A run on JPEGs in class folders with its own mean and deviation, and what it exports."""
    folder = tmp_path_factory.mktemp("travels")
    train_on(pictures, folder, *SHORT, *COLOURS)
    export(find_checkpoint(folder / "run"), "model", folder / "exported")
    return folder


def test_timm_and_transformers_prepare_images_and_name_classes_as_the_run(out, pictures):
    import transformers

    classify = transformers.pipeline("image-classification", model=str(out / "exported"))
    path = pictures / "val/class_1/003.jpg"
    answers = {answer["label"]: answer["score"] for answer in classify(str(path), top_k=3)}
    model = timm.create_model(f"local-dir:{out / 'exported'}", pretrained=True).eval()
    pixels = timm.data.create_transform(**timm.data.resolve_model_data_config(model))(decode(path.read_bytes()))
    ours = eval_transform(16, 0.875, mean=COLOURS[1:4], std=COLOURS[5:])(decode(path.read_bytes()))
    torch.testing.assert_close(pixels, ours)
    with torch.no_grad():
        expected = model(pixels[None]).softmax(-1)[0].tolist()
    assert answers == pytest.approx({f"class_{number}": p for number, p in enumerate(expected)}, rel=1e-4)


def test_a_new_run_takes_the_head_by_class_name_and_is_warned_of_another_normalisation(out, tmp_path):
    pictures = tiny_vision.write_pictures(tmp_path / "pictures", train=6, val=2)
    for split in ("train", "val"):
        (pictures / split / "class_0").rename(pictures / split / "zebra")
    start = [*SHORT, "--initial-weights", out / "exported", "--stop-after", 1]
    output = train_on(pictures, tmp_path, *start).stdout
    assert "2 of 3 classes" in output and "--mean 0.5 0.4 0.3" in output and "--std 0.25 0.5 0.2" in output
    initial, recipe = find_model(out / "exported", FLAG), Recipe(mean=tuple(COLOURS[1:4]), std=tuple(COLOURS[5:]))
    assert not warnings_of(initial, "x", ["class_1", "class_2", "zebra"], recipe)
