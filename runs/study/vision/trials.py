"""One run of question 7: a vision transformer and its training, as data; the trainer's flags for it, and its key."""

from dataclasses import dataclass
from typing import Any

from deit_gka.model.registry import model_name
from gka.kinds import KINDS
from runs.store import key_of

KIND = "study-vision"  # of the rows of finished trials
OURS = model_name("tiny", KINDS["gka"].name)  # takes every kind of attention


@dataclass(frozen=True)
class Setting:
    """What all runs on some images share. lr: at rate 1, per 1,024 images, as the trainer's flag.

    images_per_second: of one thread, a guess before anything is measured.
    seeds, later_seeds: of the families that are compared first, and of those that come when the others are done.
    tuning_epochs: of the runs that choose a rate, if they are apart: shorter, and judged by training images that they
    hold out. 0 chooses it among the runs that are compared, seed 0.
    built_weights: kinds of attention that train faster there when timm builds the weights than by torch's fused one.
    """

    model: tuple[str, ...]  # --model-kwargs
    flags: tuple[Any, ...]  # of the recipe
    lr: float
    epochs: int
    batch: int
    images_per_second: float
    seeds: int = 5
    later_seeds: int = 5
    tuning_epochs: int = 0
    built_weights: tuple[str, ...] = ()

    @property
    def depth(self) -> int:
        """How many layers the model has."""
        [depth] = [word.partition("=")[2] for word in self.model if word.startswith("depth=")]
        return int(depth)

    def epochs_of(self, trial: "VisionTrial") -> int:
        """How often the trial sees its training images."""
        return self.tuning_epochs if trial.tuning else trial.epochs or self.epochs


@dataclass(frozen=True)
class VisionTrial:
    """What differs between runs. rate: multiplies the learning rate. tuning: it only chooses the rate, see `Setting`.

    norm_weight, channel_bandwidths: as the models' arguments. epochs: of the training; 0 is the setting's.
    """

    attention: str
    spatial_offsets: str = ""
    rate: float = 1.0
    seed: int = 0
    norm_weight: bool = True
    channel_bandwidths: bool = False
    tuning: bool = False
    epochs: int = 0

    @classmethod
    def from_row(cls, saved: dict[str, Any]) -> "VisionTrial":
        """The trial that a row of the results states. Raises TypeError for one of another version."""
        return cls(**saved)

    @property
    def label(self) -> str:
        """For people: gka NLUD rate 2 seed 1."""
        norm = "" if self.norm_weight else "norm without weight"
        channels = "channel bandwidths" if self.channel_bandwidths else ""
        epochs = f"{self.epochs} epochs" if self.epochs else ""
        form = [self.attention, self.spatial_offsets, norm, channels, epochs]
        words = [*form, f"rate {self.rate:g}", f"seed {self.seed}"]
        return " ".join(filter(None, [*words, "held-out images" if self.tuning else ""]))

    def flags(self, setting: Setting) -> list[Any]:
        """The trainer's flags that decide what is computed."""
        given = {
            f"spatial_offsets={self.spatial_offsets}": self.spatial_offsets,
            "norm_weight=false": not self.norm_weight,
            "channel_bandwidths=true": self.channel_bandwidths,
        }
        form = [word for word, is_given in given.items() if is_given]
        own = ["--model", OURS, "--attention", self.attention, "--model-kwargs", *setting.model, *form]
        length = ["--epochs", setting.epochs_of(self), "--batch-size", setting.batch, "--seed", self.seed]
        return [*own, *length, "--lr", round(setting.lr * self.rate, 9), *setting.flags]

    def key(self, data: dict[str, Any], setting: Setting) -> str:
        """A hash of everything that is computed, and of the images it is computed from."""
        said = {"flags": [str(word) for word in self.flags(setting)], "data": data}
        if self.tuning:
            said["tuning"] = True  # other images are trained on and judged
        return key_of(said)


def score(metrics: dict[str, Any]) -> tuple[float, float]:
    """By which runs are compared: errors of the averaged weights in percent, and of equal ones the loss."""
    return 100 - metrics["ema_top1"], metrics["ema_loss"]
