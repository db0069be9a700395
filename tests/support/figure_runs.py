"""Vision models and runs to draw: tiny, and never trained."""

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from deit_gka.figures.subjects import of_timm, subjects_of
from deit_gka.model.checkpoints import build
from tiny_vision import SHAPE, SIZE, photo
from trainkit_gka import checkpoint

GKA, SOFTMAX = "deit_tiny_gka_patch16_224", "deit_tiny_patch16_224"
TINY = ["--model-kwargs", f"img_size={SIZE}", *(f"{key}={value}" for key, value in SHAPE.items())]


def vision_run(folder, name=GKA, seed=0, widen=0.0, trained_on="digits", **recipe):
    """A run's folder with one checkpoint and no training behind it. widen: how far log σ is spread."""
    about = {"name": name, "num_classes": 10, "input_size": SIZE, "kwargs": SHAPE}
    torch.manual_seed(seed)
    model = build(name, 10, SIZE, **SHAPE)
    if widen:
        for block in model.blocks:
            block.attn.log_sigma.data += widen * torch.rand(len(block.attn.log_sigma))
    colours = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    recipe = {"crop_pct": 1.0, "input_size": SIZE, **colours, "model": name, "seed": seed, "lr": 0.1, **recipe}
    state = {
        "classes": list("0123456789"),
        "model": about,
        "train_config": recipe,
        "epoch": 3,
        "trained_on": trained_on,
        "parts": {},
    }
    checkpoint.save(folder / "checkpoints", 7, {"model": dict(model.state_dict())}, state)
    return folder


def tiny_subjects(name=GKA, *kwargs, images=("stripes",)):
    """What a tiny untrained model does with pictures of stripes. kwargs: KEY=VALUE."""
    pictures = {image: photo(seed) for seed, image in enumerate(images)}
    return subjects_of(of_timm(name, [*TINY[1:], *kwargs]), pictures)


def words(figure):
    """Title and caption in one line."""
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())
