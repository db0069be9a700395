"""Starting from weights, and learning from a teacher: what is taken, that losses are the formulas, and both end to end on digits."""

import argparse
import json
import math
import pickle
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import tyro
from PIL import Image
from safetensors.torch import load_file, save_file

import tiny_vision
from deit_gka import train as training
from deit_gka.data.loader import seed_everything, train_transform
from deit_gka.model import checkpoints as model_io
from deit_gka.model.registry import SIZES
from deit_gka.model.warm_start import fingerprint, read_weights, shortened, warm_start
from deit_gka.recipe import Recipe
from deit_gka.training.config import TrainConfig
from deit_gka.training.distillation import Objective, Teacher, load_teacher
from trainkit.cli import UserError
from vision_runs import Code, in_process

GKA, VLT, SOFTMAX = "deit_tiny_gka_patch16_224", "deit_tiny_vlt_patch16_224", "deit_tiny_patch16_224"
SHAPE = dict(patch_size=8, embed_dim=64, depth=2, num_heads=2)
SHALLOW = ["--model-kwargs", "patch_size=16", "embed_dim=64", "depth=1", "num_heads=2"]
# A small model learns digits in seconds without the recipe's augmentation.
EASY = [*SHALLOW, "--data", "digits", "--device-type", "cpu", "--batch-size", 16,
        "--group-size", 16, "--repeated-aug", 1, "--scale", 0.8, 1, "--hflip", 0, "--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0,
        "--drop-path", 0, "--warmup-epochs", 0, "--eval-every", "-1", "--save-every", "-1", "--log-every", 20, "--num-workers", 0]  # fmt: skip


def flags(out, *more):
    return ["--out", out, "--results", out / "results.jsonl", "--model-tag", "run", "--input-size", 32, *EASY, *more]


def train(out, *more, **options):
    return tiny_vision.call("deit_gka.train", *flags(out, *more), folder=out / "output", **options)


def accuracy(out, tag="run"):
    lines = map(json.loads, (out / tag / "log.jsonl").read_text().splitlines())
    return [record for record in lines if record["event"] == "eval"][-1]["top1"]


def newest(out, name="model", tag="run"):
    return load_file(sorted((out / tag / "checkpoints").iterdir())[-1] / f"{name}.safetensors")


def micro(name=GKA, classes=10, size=32, **more):
    torch.manual_seed(len(name) + classes + size)
    return model_io.build(name, classes, size, **{**SHAPE, **more})


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A softmax ViT that knows digits at 32 pixels: a run."""
    out = tmp_path_factory.mktemp("digits")
    train(out, "--model", SOFTMAX, "--epochs", 5, "--lr", 0.2)
    assert accuracy(out) > 65
    return out


def small_command():
    """The words of README's small vision command, which the Makefile suggests too."""
    text, makefile = ((Path(__file__).parents[2] / name).read_text() for name in ("README.md", "Makefile"))
    words = (
        re.search(r'^make train-deit-ti DATA=digits BASE=out/small ARGS="([^"]*)"', text, re.MULTILINE)[1]
        .replace("\\", "")
        .split()
    )
    assert words == re.search(r"^SMALL_RUN  := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)[1].replace("\\", "").split()
    return words


def test_the_small_command_of_the_readme_is_the_makefiles_and_can_start():
    config = tyro.cli(TrainConfig, args=["--data", "digits", *small_command()])
    config.check()
    assert config.epochs * (1198 // config.batch_size) > 1000 and config.scaled_lr > 1e-3  # it was 18 updates at 6e-5


@pytest.mark.slow
def test_the_small_command_of_the_readme_learns(tmp_path):
    tiny_vision.call("deit_gka.train", "--data", "digits", "--out", tmp_path, "--results", tmp_path / "results.jsonl", "--model-tag", "run", *small_command(),
                     folder=tmp_path / "output")  # fmt: skip
    assert accuracy(tmp_path) > 80


# --- What is taken ---


def test_softmax_weights_give_gka_everything_but_the_bandwidths():
    model, weights = micro(GKA), micro(SOFTMAX).state_dict()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    done = warm_start(model, weights, "x")
    assert done.new == ["blocks.0.attn.log_sigma", "blocks.1.attn.log_sigma"] and not done.resized
    assert set(done.taken) == model.state_dict().keys() - set(done.new)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name in done.new else weights[name]), name
    assert done.unused == [f"blocks.{block}.attn.qkv.{kind}" for block in (0, 1) for kind in ("weight", "bias")]
    total = sum(parameter.numel() for parameter in model.parameters())
    assert done.share == pytest.approx((total - 4) / total) and f"{len(done.taken)} tensors as they are (99.9%" in str(
        done
    )
    assert (
        "left at their initialisation: blocks.*.attn.log_sigma (2); not used: blocks.*.attn.qkv.weight (2), blocks.*.attn.qkv.bias (2)"
        in str(done)
    )


def test_vlt_takes_softmaxs_queries_and_keys():
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
def test_positions_and_patches_are_resized_as_timm_does(change, tmp_path):
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


def test_positions_of_patches_alone_are_resized():
    """CaiT's class token comes in later and has none."""
    model, weights = (
        model_io.build("cait_xxs24_224", 10, size, depth=1, embed_dim=48, num_heads=4) for size in (64, 32)
    )
    torch.nn.init.ones_(weights.pos_embed)
    assert warm_start(model, weights.state_dict(), "x").resized == ["pos_embed"]
    torch.testing.assert_close(model.pos_embed, torch.ones(1, 16, 48))


def test_another_number_of_classes_starts_a_new_head():
    model = micro(classes=3)
    before = model.head.weight.clone()
    done = warm_start(model, micro(classes=10).state_dict(), "x")
    assert (
        done.new == ["head.weight", "head.bias"]
        and torch.equal(model.head.weight, before)
        and "head.weight, head.bias" in str(done)
    )


def test_a_distillation_token_that_the_weights_lack_keeps_its_start():
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


def test_weights_that_do_not_fit_are_refused():
    wide = micro(embed_dim=128).state_dict()
    with pytest.raises(
        UserError,
        match=r"^x has only 1 of this model's \d+ tensors, 0% of its parameters; cls_token is \(1, 1, 128\) there and \(1, 1, 64\) here",
    ):
        warm_start(micro(depth=4), {name: value for name, value in wide.items() if "log_sigma" not in name}, "x")
    with pytest.raises(UserError, match=r"^x has only 0 of .*give weights of a model of the same width and kind"):
        warm_start(micro(), timm.create_model("resnet10t", num_classes=7).state_dict(), "x")
    broken = micro().state_dict()
    broken["norm.bias"][0] = torch.nan
    with pytest.raises(UserError, match=r"x holds weights that are not finite, norm.bias is the first"):
        warm_start(micro(), broken, "x")


def test_names_are_shortened():
    assert shortened(["blocks.0.x", "blocks.11.x", "head"]) == "blocks.*.x (2), head"
    assert shortened(map(str, range(20))).endswith("7 and 12 more")


# --- Where weights come from ---


def test_files_runs_and_exported_folders(digits, tmp_path):
    weights, average = newest(digits), newest(digits, "ema")
    torch.save(
        {"model": weights, "epoch": 3, "args": argparse.Namespace(lr=5e-4, gpu=0)}, tmp_path / "deit.pth"
    )  # as DeiT's trainer leaves it
    torch.save({"state_dict": {f"module.{name}": value for name, value in weights.items()}}, tmp_path / "timm.pth.tar")
    save_file(weights, tmp_path / "plain.safetensors")
    for name in ("deit.pth", "timm.pth.tar", "plain.safetensors"):
        assert fingerprint(read_weights(str(tmp_path / name))) == fingerprint(weights)
        model = model_io.load_file(
            tmp_path / name, model_io.build(SOFTMAX, 10, 32, patch_size=16, embed_dim=64, depth=1, num_heads=2)
        )
        assert fingerprint(model.state_dict()) == fingerprint(weights)
    tiny_vision.call(
        "deit_gka.export", "--run", digits / "run", "--out", tmp_path / "exported", folder=tmp_path / "output"
    )
    for folder in (digits / "run", sorted((digits / "run/checkpoints").iterdir())[-1], tmp_path / "exported"):
        assert fingerprint(read_weights(str(folder))) == fingerprint(average) != fingerprint(weights)


def test_what_is_not_weights_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.save({"model": Code()}, tmp_path / "code.pth")
    (tmp_path / "text.pth").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pth")
    for source, message in (
        (tmp_path / "code.pth", "does not hold weights"), (tmp_path / "text.pth", "does not hold weights"), (tmp_path / "list.pth", "does not hold weights"),
        ("/nowhere.pth", "/nowhere.pth is not there; it is a file of weights, a run or exported folder"), (tmp_path, "no checkpoint in"),
        (GKA, f"--initial-weights {GKA}: timm has no weights of it here"), (SOFTMAX, "give a file instead"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            read_weights(str(source))
        assert "\n" not in str(caught.value)


# --- End to end ---


def test_fine_tuning_at_another_size_starts_from_what_was_learned(digits, tmp_path):
    """32 -> 48 pixels. At a rate that teaches nothing in an epoch, larger patches know what smaller ones did; more patches learn on."""
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


def test_a_resumed_run_keeps_the_weights_it_started_from(digits, tmp_path, capsys):
    save_file(newest(digits), tmp_path / "weights.safetensors")
    common = ["--model", GKA, "--epochs", 1, "--lr", 0.01, "--initial-weights"]
    train(tmp_path / "whole", *common, tmp_path / "weights.safetensors", "--stop-after", 4)
    done = train(tmp_path, *common, tmp_path / "weights.safetensors", "--stop-after", 2)
    assert "left at their initialisation: blocks.*.attn.log_sigma;" in done.stdout
    for others in (digits / "run", ""):
        message = in_process(training.main, TrainConfig, *flags(tmp_path, *common, others), capsys=capsys)
        assert re.search(
            r"--initial-weights is .* but the run in .* started from .*weights.safetensors as it was then; give the same",
            message,
        )
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


# --- A teacher ---


def log_softmax(values):
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))


def test_the_losses_are_the_papers_formulas():
    """DeiT's equations 2 and 3 in numpy, float64; soft distillation is a mean over images and classes, as upstream has it."""
    rng = np.random.default_rng(0)
    label, distilled, answers = rng.normal(size=(3, 6, 5)) * 2
    targets = rng.dirichlet(np.ones(5), size=6)
    images, tensors = torch.zeros(6, 3, 4, 4), [torch.tensor(values) for values in (label, distilled, targets)]
    teacher = Teacher(torch.nn.Module())
    teacher.model.forward = lambda images: torch.tensor(answers)
    cross_entropy = -(targets * log_softmax(label)).sum(axis=1).mean()
    for alpha, tau in ((0.5, 1.0), (0.2, 3.0), (1.0, 2.0)):
        p, q = log_softmax(answers / tau), log_softmax(distilled / tau)
        expected = {
            "hard": -log_softmax(distilled)[np.arange(6), answers.argmax(axis=1)].mean(),
            "soft": tau**2 * (np.exp(p) * (p - q)).mean(),
        }
        for kind, value in expected.items():
            recipe = Recipe(distillation_type=kind, distillation_alpha=alpha, distillation_tau=tau)
            loss = Objective(recipe, teacher)(images, (tensors[0], tensors[1]), tensors[2])
            assert float(loss) == pytest.approx((1 - alpha) * cross_entropy + alpha * value, rel=1e-6)
    assert float(Objective(Recipe())(images, tensors[0], tensors[2])) == pytest.approx(cross_entropy, rel=1e-6)


def test_binary_cross_entropy_counts_every_class_of_a_mixed_image():
    logits = torch.randn(4, 5, dtype=torch.float64)
    targets = torch.tensor(
        [[0.3, 0, 0.7, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0.5, 0.5], [0.9, 0.1, 0, 0, 0]], dtype=torch.float64
    )
    probability, present = 1 / (1 + np.exp(-logits.numpy())), targets.numpy() > 0
    expected = -np.where(present, np.log(probability), np.log(1 - probability)).mean()
    assert float(Objective(Recipe(bce_loss=True, smoothing=0.0))(None, logits, targets)) == pytest.approx(
        expected, rel=1e-9
    )


def test_a_teacher_sees_its_own_images_and_is_never_trained():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten())
    teacher = Teacher(model, (0.5, 0.5, 0.5), (0.25, 0.5, 1.0), (8, 8))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    raw = torch.rand(2, 3, 8, 8)
    expected = model.eval()((raw - 0.5) / torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1))
    answers = teacher.train()((raw - mean) / std)
    torch.testing.assert_close(answers, expected.detach(), rtol=1e-4, atol=1e-5)
    assert (
        not answers.requires_grad
        and not model.training
        and not any(parameter.requires_grad for parameter in teacher.parameters())
    )
    assert teacher(torch.rand(2, 3, 32, 32)).shape == answers.shape


@pytest.mark.parametrize(
    "name,size", [("maxvit_rmlp_pico_rw_256", (256, 256)), (SOFTMAX, (224, 224)), ("resnet10t", None)]
)
def test_a_teacher_of_one_size_sees_that_size(tmp_path, name, size):
    save_file(model_io.build(name, 3).state_dict(), tmp_path / "teacher.safetensors")
    teacher = load_teacher(name, str(tmp_path / "teacher.safetensors"), ["a", "b", "c"])
    assert teacher.size == size and teacher(torch.rand(1, 3, 32, 32)).shape == (1, 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["gka", "vlt"])
def test_distilled_models_have_a_token_and_a_head_more(kind, size):
    with torch.device("meta"):
        plain, distilled = (timm.create_model(f"deit_{size}_{kind}{name}_patch16_224") for name in ("", "_distilled"))
    width = SIZES[size]["embed_dim"]
    more = sum(parameter.numel() for parameter in distilled.parameters()) - sum(
        parameter.numel() for parameter in plain.parameters()
    )
    assert more == 2 * width + 1000 * width + 1000 and "dist_token" in distilled.no_weight_decay()


def test_learning_from_a_teacher_alone(digits, tmp_path, capsys):
    """alpha 1: only the teacher's choices and only the distillation head; the class head stays as it began."""
    common = ["--model", "deit_tiny_gka_distilled_patch16_224", "--lr", 0.2, "--distillation-type", "hard", "--teacher-model", digits / "run",
              "--distillation-alpha", 1, "--epochs", 3, "--weight-decay", 0]  # fmt: skip
    train(tmp_path, *common)
    assert accuracy(tmp_path) > 30
    weights = newest(tmp_path)
    assert not weights["head.bias"].any() and weights["head_dist.bias"].abs().max() > 1e-3
    teacher = load_teacher(str(digits / "run"), "", [str(digit) for digit in range(10)])
    assert torch.equal(
        teacher.model.state_dict()["pos_embed"], newest(digits, "ema")["pos_embed"]
    ) and teacher.size == (32, 32)
    message = in_process(
        training.main, TrainConfig, *flags(tmp_path, *common, "--distillation-type", "soft"), capsys=capsys
    )
    assert "--distillation-type is soft but the run in" in message


def test_the_teacher_is_the_one_that_deit_published():
    """For the bare name timm has other weights, trained on ImageNet-12k."""
    address = timm.get_pretrained_cfg(Recipe().teacher_model).url
    assert (
        address.startswith("https://dl.fbaipublicfiles.com/deit/regnety_160-")
        and timm.get_pretrained_cfg("regnety_160").url != address
    )


def test_a_run_without_a_teacher_resumes_whatever_is_said_about_one(tmp_path):
    common = ["--epochs", 1, "--lr", 0.01]
    train(tmp_path, *common, "--stop-after", 2)
    done = train(tmp_path, *common, "--stop-after", 3, "--teacher-model", "regnety_160", "--distillation-tau", 3)
    assert "resuming at update 2" in done.stdout


def test_mistakes_with_teachers_and_losses_are_one_line(digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.save({"model": micro(SOFTMAX, 7).state_dict()}, tmp_path / "seven.pth")
    student = ["--model", "deit_tiny_gka_distilled_patch16_224", "--distillation-type", "hard"]
    tiny_vision.write_pictures(tmp_path / "pictures")
    for more, message in (
        (
            ["--distillation-type", "soft"],
            "--distillation-type soft needs a model with a distillation token, such as deit_tiny_gka_distilled",
        ),
        (student, "--teacher-model regnety_160.deit_in1k: timm has no weights of it here"),
        ([*student, "--teacher-model", "nonsense"], "--teacher-model nonsense: timm has no weights of it here"),
        ([*student, "--teacher-model", SOFTMAX, "--teacher-path", "/nowhere"], "weights not found: /nowhere"),
        (
            [*student, "--teacher-model", SOFTMAX, "--teacher-path", tmp_path / "seven.pth"],
            "does not hold weights of this model",
        ),
        (
            [*student, "--teacher-model", digits / "run", "--data", tmp_path / "pictures"],
            "tells 10 classes apart but the data has 3",
        ),
        (["--bce-loss"], "pass --smoothing 0; got 0.1"),
        (["--src"], "--src is the crop of --three-augment"),
    ):
        assert message in in_process(training.main, TrainConfig, *flags(tmp_path, "--epochs", 1, *more), capsys=capsys)


# --- 3-Augment ---


@pytest.mark.parametrize("src", [False, True])
def test_three_augment_is_governed_by_an_images_seed_and_can_be_sent_to_workers(src):
    transform = train_transform(Recipe(three_augment=True, src=src, input_size=32))
    transform = pickle.loads(pickle.dumps(transform))
    image, made = tiny_vision.photo(1, size=(50, 40)), []
    for seed in range(12):
        seed_everything(seed)
        made.append(transform(image))
        torch.rand(3), np.random.rand(seed + 1)
        seed_everything(seed)
        assert torch.equal(transform(image), made[-1]) and made[-1].shape == (3, 32, 32)
    assert len({pixels.sum().item() for pixels in made}) == 12


def test_three_augment_takes_one_of_the_three():
    """Of an image in one colour, without jitter: grey has equal channels, solarised has its bright channel turned dark, blurred is as it was."""
    transform = train_transform(Recipe(three_augment=True, color_jitter=0, input_size=16))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    found = Counter()
    for seed in range(60):
        seed_everything(seed)
        pixels = transform(Image.new("RGB", (20, 20), (200, 100, 50))) * std + mean
        found[tuple((pixels[:, 8, 8] * 255).round().int().tolist())] += 1
    grey = round((200 * 299 + 100 * 587 + 50 * 114) / 1000)
    assert set(found) == {(grey,) * 3, (55, 100, 50), (200, 100, 50)} and min(found.values()) > 60 / 3 - 4 * math.sqrt(
        60 * 2 / 9
    )


def test_three_augment_and_binary_cross_entropy_train(tmp_path):
    done = train(
        tmp_path,
        "--epochs",
        1,
        "--three-augment",
        "--src",
        "--bce-loss",
        "--smoothing",
        0,
        "--mixup",
        0.8,
        "--lr",
        0.1,
        "--num-workers",
        1,
    )
    first = next(
        json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines() if '"train"' in line
    )
    assert first["loss"] == pytest.approx(math.log(2), abs=0.1) and "finished" in done.stdout
