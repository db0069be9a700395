"""The images of question 6: scikit-learn's digits, or a folder of class folders as small copies; and each's recipe."""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from deit_gka.data.sources import Source, check_classes, decode, open_source
from runs.study.vision.cells import Setting
from trainkit_gka.cli import UserError
from trainkit_gka.files import read_json, write_json
from trainkit_gka.progress import console

SPLITS = ("train", "val")
MANIFEST = "manifest.json"
SHORT_SIDE = 72  # pixels of the copies: an eighth more than the models see
PLAIN = ("--aa", "", "--reprob", 0, "--mixup", 0, "--cutmix", 0, "--repeated-aug", 1, "--drop-path", 0)
PLAIN += ("--model-ema-decay", 0.99, "--warmup-epochs", 5)
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


def setting_of(name: str) -> Setting:
    """The model and recipe for images of that name."""
    return DIGITS if name == "digits" else PHOTOS


@dataclass(frozen=True)
class Images:
    """name: in results. data: for the trainer's --data. identity: what the same images have in common everywhere."""

    name: str
    data: str
    identity: dict[str, Any]

    @property
    def setting(self) -> Setting:
        return setting_of(self.name)


def load(data: str, base: Path) -> Images:
    """`digits`, or any folder that the trainer reads, of which small copies are made below `base`.

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
    identity = {"images": name, **counts, "short_side": SHORT_SIDE, "sha256": fingerprint(sources)}
    folder = base / f"{name}-{SHORT_SIDE}-{identity['sha256'][:8]}"
    if not (folder / MANIFEST).exists() or read_json(folder / MANIFEST, "manifest of small images") != identity:
        write_small(sources, folder)
        write_json(folder / MANIFEST, identity)
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


def write_small(sources: dict[str, Source], folder: Path) -> None:
    """Copies with a short side of SHORT_SIDE pixels as folder/{train,val}/CLASS/NUMBER.png."""
    console.print(f"making small copies in {folder}", highlight=False)
    shutil.rmtree(folder, ignore_errors=True)
    for split, source in sources.items():
        for index in range(len(source)):
            stored, label, _ = source.read(index)
            image = decode(stored)
            scale = SHORT_SIDE / min(image.size)
            path = folder / split / str(source.classes[label]) / f"{index:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = [round(side * scale) for side in image.size]
            image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0).save(path)
