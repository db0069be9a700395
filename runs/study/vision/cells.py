"""One run of question 6: a vision transformer and its training, as data; the trainer's flags for it, and its key."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from deit_gka.model.registry import model_name
from gka.kinds import KINDS

OURS = model_name("tiny", KINDS["gka"].name)  # takes every kind of attention


@dataclass(frozen=True)
class Setting:
    """What all runs on some images share. lr: at rate 1, per 1,024 images, as the trainer's flag.

    images_per_second: of one thread, a guess before anything is measured.
    """

    model: tuple[str, ...]  # --model-kwargs
    flags: tuple[Any, ...]  # of the recipe
    lr: float
    epochs: int
    batch: int
    images_per_second: float


@dataclass(frozen=True)
class VisionCell:
    """What differs between runs. rate: multiplies the learning rate."""

    attention: str
    spatial_offsets: str = ""
    rate: float = 1.0
    seed: int = 0

    @classmethod
    def from_row(cls, saved: dict[str, Any]) -> "VisionCell":
        """The cell that a row of the results states. Raises TypeError for one of another version."""
        return cls(**saved)

    @property
    def label(self) -> str:
        """For people: gka NLUD rate 2 seed 1."""
        words = [self.attention, self.spatial_offsets, f"rate {self.rate:g}", f"seed {self.seed}"]
        return " ".join(filter(None, words))

    def flags(self, setting: Setting) -> list[Any]:
        """The trainer's flags that decide what is computed."""
        offsets = [f"spatial_offsets={self.spatial_offsets}"] if self.spatial_offsets else []
        own = ["--model", OURS, "--attention", self.attention, "--model-kwargs", *setting.model, *offsets]
        length = ["--epochs", setting.epochs, "--batch-size", setting.batch, "--seed", self.seed]
        return [*own, *length, "--lr", round(setting.lr * self.rate, 9), *setting.flags]

    def key(self, data: dict[str, Any], setting: Setting) -> str:
        """A hash of everything that is computed, and of the images it is computed from."""
        said = {"flags": [str(word) for word in self.flags(setting)], "data": data}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
