"""Train the vision transformers of the study's question 7 that are not finished.

python -m runs.study.vision                           on scikit-learn's digits
python -m runs.study.vision --data path/to/images     on a folder with train/ and val/ of class folders
python -m runs.study.vision --list                    what is left, and how long it takes
"""

from dataclasses import dataclass, field

from runs.study.runner import RunnerConfig, chosen_groups, train_left
from runs.study.vision.images import load
from runs.study.vision.study import VisionStudy, groups_of
from trainkit_gka import cli


@dataclass(kw_only=True)
class VisionStudyConfig(RunnerConfig):
    """Train softmax, VLT and GKA, with and without spatial head offsets, and hybrids, each at its best learning rate.

    A finished run is not trained again. SIGTERM or Ctrl-C lets the trainings save; the same command continues them.
    """

    data: str = "digits"
    """Images to train on: digits, or a folder with train/ and val/ or hf:FOLDER of parquet files, of which small copies
    are made below --runs."""
    groups: list[str] = field(default_factory=lambda: ["all"])
    """Groups of trials to train, in this order: rates, seeds, later-seeds; all takes every group."""


def main(config: VisionStudyConfig) -> None:
    images = load(config.data, config.runs / "images")
    groups = chosen_groups(config, groups_of(images))
    name = f"vision_{images.name}"
    study = VisionStudy(images, config.results / f"{name}.jsonl", config.runs / name, groups, config.retry_failed)
    train_left(study, config)


if __name__ == "__main__":
    cli.run(main, VisionStudyConfig)
