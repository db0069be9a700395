"""Training a vision transformer: the command that trains one, or continues a run that was stopped.

    python -m deit_gka.train --data digits --input-size 32 --batch-size 64 --epochs 2 --warmup-epochs 1
    python -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- deit_gka.train --data /imagenet

In run order: the flags (`training/config.py`, with the recipe), then the loop (`trainkit_gka/loop.py`), which builds
and drives `training/trainer.py`: images, model, optimiser; updates and reports; the run's numbers.
"""

from deit_gka.training.config import TrainConfig
from deit_gka.training.trainer import Trainer
from trainkit_gka.cli import run
from trainkit_gka.loop import launch


def main(config: TrainConfig) -> None:
    launch(config, Trainer)


if __name__ == "__main__":
    run(main, TrainConfig)
