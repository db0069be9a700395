"""The paper's vision models: tables 2 (accuracy), 3 (size) and 5 (ablation), sections 4.2 to 4.4; ImageNet, 300 epochs.

Command:   make train-deit-ti DATA=/imagenet NGPU=7 (GKA; -base is softmax, -vlt is VLT; sizes ti, s, b)
Hardware:  7 RTX 5090 of 32 GB, bfloat16, 256 images each
Hours:     on those 7, an estimate from table 4's throughput at 128 images each: 300 x 1,281,167 images at
           softmax  ti 4.6,  s 5.3,  b 13.4
           GKA      ti 7.8,  s 14.4, b 31.5 (the paper's implementation; ours has not been timed on a GPU)
Expected:  EMA top-1, as printed; none has been run here yet
           softmax  ti 72.2,  s 79.8,  b 81.8  (DeiT's own published figures, which are without EMA)
           VLT      ti 73.5
           GKA      ti 71.54, s 78.23, b 80.3
"""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from gka.kinds import KINDS
from runs import commands
from runs.paper import common
from trainkit_gka.cli import UserError

SIZE_NAMES = commands.VISION_SIZES
PAPER_NAMES = {"softmax": "DeiT"} | {name: kind.label for name, kind in KINDS.items() if name != "softmax"}
DEFAULT_KIND = "gka"
SOFTMAX_TARGET = "base"  # what make's targets call softmax attention


@dataclass
class VisionConfig(common.Training):
    """Train one of the paper's vision models. The trainer's own flags follow `--`."""

    name: Annotated[str, tyro.conf.Positional] = "ti"
    """Size, and kind if it is not GKA: ti, s-vlt, b-base (softmax)."""
    data: str = ""
    """Folder with train/ and val/, hf:NAME, hf-stream:NAME, wds:FOLDER or digits."""
    model: str = ""
    """Any timm name in place of the one that NAME makes."""


def model_of(name: str) -> str:
    """timm's name of the paper's model `name`, such as ti or s-vlt. Raises UserError."""
    try:
        return commands.vision_model(name)
    except ValueError as error:
        raise UserError(str(error)) from None


def words(config: VisionConfig, model: str, extra: list[Any]) -> list[str]:
    """The trainer's command line for one model."""
    return config.command("deit_gka.train", [*commands.vision(model, config.data, config.base, config.wandb), *extra])


def main(config: VisionConfig, extra: list[str]) -> None:
    common.become(words(config, config.model or model_of(config.name), extra))


if __name__ == "__main__":
    common.run(main, VisionConfig)
