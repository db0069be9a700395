"""Train the trials of the study that are not finished, some at a time, in the background of everything else.

make study                                  (python -m runs.study)
make study ARGS="--list"                    what is left, and how long it takes
make study CORPUS=../text ARGS="--groups rates seeds"
"""

from dataclasses import dataclass, field
from pathlib import Path

from runs.study.grid import GROUPS
from runs.study.runner import RunnerConfig, chosen_groups, train_left
from runs.study.text import Study, load
from trainkit_gka import cli

DEFAULT_GROUPS = ("rates", "seeds", "precision", "depth-4")


@dataclass(kw_only=True)
class StudyConfig(RunnerConfig):
    """Train softmax attention and GKA side by side, every side at its own best learning rate, and record each run.

    A finished run is not trained again. SIGTERM or Ctrl-C lets the trainings save; the same command continues them.
    """

    data: Path = Path("out/packed/builtin-4096-512")
    """Folder of packed rows (make study packs those of CORPUS)."""
    groups: list[str] = field(default_factory=lambda: list(DEFAULT_GROUPS))
    """Groups of trials to train, in this order; all takes every group."""


def main(config: StudyConfig) -> None:
    groups = chosen_groups(config, GROUPS)
    text = load(config.data)
    places = {"results": config.results / f"{text.name}.jsonl", "runs": config.runs / text.name}
    train_left(Study(text, **places, groups=groups, retry_failed=config.retry_failed), config)


if __name__ == "__main__":
    cli.run(main, StudyConfig)
