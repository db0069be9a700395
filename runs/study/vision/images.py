"""The images of question 7: scikit-learn's digits, CIFAR-10, or photographs as small copies; and each's recipe."""

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from sklearn.model_selection import train_test_split

from deit_gka.data.sources import Source, check_classes, decode, open_source
from runs.study.vision.trials import Setting, VisionTrial
from trainkit_gka.cli import UserError
from trainkit_gka.files import read_json, write_json
from trainkit_gka.progress import console

SPLITS = ("train", "val")
MANIFEST = "manifest.json"
SHORT_SIDE = 72  # pixels of the copies: an eighth more than the models see
UNMIXED = ("--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0, "--repeated-aug", 1, "--drop-path", 0)
PLAIN = (*UNMIXED, "--model-ema-decay", 0.99, "--warmup-epochs", 5)
SHORT_OF_CIFAR10 = ("--model-ema-decay", 0.998, "--warmup-epochs", 1)
CROPS_OF_CIFAR10 = ("--hflip", 0.5, "--scale", 0.6, 1, "--crop-pct", 1)
# The demo's model and recipe (runs/demo/vision.py).
DIGITS = Setting(
    model=("patch_size=4", "embed_dim=64", "depth=4", "num_heads=4"),
    flags=("--input-size", 16, *PLAIN, "--hflip", 0, "--scale", 1, 1, "--ratio", 1, 1, "--crop-pct", 1),
    lr=0.032,
    epochs=50,
    batch=32,
    images_per_second=1400,
)
# Six layers, so that one in six can be softmax; few photographs need crops and flips.
PHOTOS = Setting(
    model=("patch_size=8", "embed_dim=64", "depth=6", "num_heads=4"),
    flags=("--input-size", 64, *PLAIN, "--hflip", 0.5, "--scale", 0.3, 1, "--crop-pct", 0.9),
    lr=0.032,
    epochs=60,
    batch=32,
    images_per_second=250,
)
# Eight epochs of 50,000 images: what four hours of two cores allow. In bfloat16, with softmax attention that builds its
# weights, a thread trains 570 images/s of softmax and 740 of GKA (240 and 340 in float32; softmax by torch's fused
# attention 245 in either). Mixed images and RandAugment, meant for long trainings, are left out untried. The average is
# over about 500 of 3,100 updates. Four heads (of 24 channels) can have four offsets.
CIFAR10 = Setting(
    model=("patch_size=4", "embed_dim=96", "depth=6", "num_heads=4"),
    flags=("--input-size", 32, *UNMIXED, *SHORT_OF_CIFAR10, *CROPS_OF_CIFAR10, "--amp", "bfloat16"),
    lr=0.016,
    epochs=8,
    batch=128,
    images_per_second=570,
    later_seeds=3,
    tuning_epochs=3,
    built_weights=("softmax", "vlt"),
)
IMAGES = {"cifar10": "CIFAR-10", "images": "600 photographs"}  # names of sets for people
SETTINGS = {"digits": DIGITS, "cifar10": CIFAR10}  # by the images' name, which is their folder's
HELD_OUT = 0.1  # part of the training images that runs which choose a rate are judged by, of every class alike


def setting_of(name: str) -> Setting:
    """The model and recipe for images of that name: photographs, unless SETTINGS knows it."""
    return SETTINGS.get(name, PHOTOS)


@dataclass(frozen=True)
class Images:
    """name: in results. data: for the trainer's --data. identity: what the same images have in common everywhere.

    tuning_data: as `data`, the training images alone, with some of them held out to judge by.
    """

    name: str
    data: str
    identity: dict[str, Any]
    tuning_data: str = ""

    @property
    def setting(self) -> Setting:
        return setting_of(self.name)

    def folder_of(self, trial: VisionTrial) -> str:
        """What the trial trains on and is judged by."""
        return self.tuning_data if trial.tuning else self.data

    def trained_on(self, trial: VisionTrial) -> int:
        """How many images that are."""
        return self.identity["train images"] - (self.identity["held out"] if trial.tuning else 0)


def load(data: str, base: Path) -> Images:
    """`digits`, or any images that the trainer reads, of which copies as its setting needs them are made below `base`.

    Raises UserError for data that cannot be read or whose splits differ in their classes.
    """
    sources = {split: open_source(data, split) for split in SPLITS}
    if not all(isinstance(source, Source) for source in sources.values()):
        raise UserError(f"--data {data} is a stream; give digits or a folder")
    check_classes(sources["train"], sources["val"])
    counts = {f"{split} images": len(source) for split, source in sources.items()}
    if data == "digits":
        return Images("digits", "digits", {"images": "digits", **counts})
    name = Path(data.partition(":")[2] or data).resolve().name
    sha256, apart = fingerprint(sources), bool(setting_of(name).tuning_epochs)
    if apart:
        held_out = len(held_out_of(sources["train"])[1])
        identity = {"images": name, **counts, "held out": held_out, "sha256": sha256}
        folder = base / f"{name}-{sha256[:8]}"
    else:
        identity = {"images": name, **counts, "short_side": SHORT_SIDE, "sha256": sha256}
        folder = base / f"{name}-{SHORT_SIDE}-{sha256[:8]}"
    if not (folder / MANIFEST).exists() or read_json(folder / MANIFEST, "manifest of copied images") != identity:
        console.print(f"making copies in {folder}", highlight=False)
        shutil.rmtree(folder, ignore_errors=True)
        (write_both if apart else write_small)(sources, folder)
        write_json(folder / MANIFEST, identity)
    if apart:
        return Images(name, str(folder / "compared"), identity, str(folder / "tuning"))
    return Images(name, str(folder), identity)


def fingerprint(sources: dict[str, Source]) -> str:
    """A hash of all images as they are stored, their classes and their order."""
    digest = hashlib.sha256()
    for split, source in sources.items():
        digest.update(repr((split, source.classes)).encode())
        for index in range(len(source)):
            stored, label, _ = source.read(index)
            content = stored if isinstance(stored, bytes) else stored.tobytes()
            digest.update(f"{label} {len(content)} ".encode() + content)
    return digest.hexdigest()


def held_out_of(train: Source) -> tuple[list[int], list[int]]:
    """The places of training images that are trained on, and of HELD_OUT of every class; always the same.

    Raises UserError if that is less than one of each class.
    """
    labels = [train.read(index)[1] for index in range(len(train))]
    try:
        kept, held_out = train_test_split(range(len(train)), test_size=HELD_OUT, random_state=0, stratify=labels)
    except ValueError as error:
        raise UserError(f"{train.name}: a tenth of every class must be held out: {error}; use more images") from None
    return sorted(kept), sorted(held_out)


def write_small(sources: dict[str, Source], folder: Path) -> None:
    """Copies with a short side of SHORT_SIDE pixels as folder/{train,val}/CLASS/NUMBER.png."""
    for split, source in sources.items():
        write_copies(source, range(len(source)), folder / split, SHORT_SIDE)


def write_both(sources: dict[str, Source], folder: Path) -> None:
    """The images as they are: folder/compared/{train,val}, and of the training images folder/tuning/{train,val}."""
    write_copies(sources["train"], range(len(sources["train"])), folder / "compared/train")
    write_copies(sources["val"], range(len(sources["val"])), folder / "compared/val")
    for split, places in zip(SPLITS, held_out_of(sources["train"]), strict=True):
        write_copies(sources["train"], places, folder / "tuning" / split)


def write_copies(source: Source, places: Iterable[int], folder: Path, short_side: int | None = None) -> None:
    """folder/CLASS/NUMBER.png of the images at these places; short_side: in pixels, None leaves them as they are."""
    for index in places:
        stored, label, _ = source.read(index)
        image = decode(stored)
        path = folder / str(source.classes[label]) / f"{index:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if short_side:
            scale = short_side / min(image.size)
            size = [round(side * scale) for side in image.size]
            image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
        image.save(path)
