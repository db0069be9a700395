"""Pretraining: the command that trains a GPT, or continues a run that was stopped.

    python -m nanochat_gka.train --data out/packed --depth 4 --attention gka
    torchrun --standalone --nproc-per-node 7 -m nanochat_gka.train --depth 20 --attention gka \\
        --target-param-data-ratio 8.25

In run order: the flags (`training/config.py`), then the loop (`trainkit_gka/loop.py`), which builds and drives
`training/trainer.py`: data, model, horizon, optimiser; steps and reports; the run's numbers.
"""

from nanochat_gka.model.forms import extended
from nanochat_gka.training.config import TrainConfig
from nanochat_gka.training.trainer import Trainer
from trainkit_gka.cli import run
from trainkit_gka.loop import launch


def main(config: TrainConfig) -> None:
    launch(config, Trainer)


if __name__ == "__main__":
    run(main, extended(TrainConfig))
