"""python -m runs.study: the same as python -m runs.study.train."""

from runs.study.train import TrainConfig, main
from trainkit_gka.cli import run

if __name__ == "__main__":
    run(main, TrainConfig)
