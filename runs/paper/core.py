"""CORE of a trained language model: table 7, section 5 (six tasks of DCLM's 22, centred).

Command:   make eval-core NGPU=7 (RUN=folder for another run; ARGS="--tasks paper" for the paper's six tasks alone)
Data:      nanochat's bundle, fetched once (162 MB), or BUNDLE=folder or zip
Hardware:  any; the work is divided among the processes
Hours:     not measured on a GPU
Expected:  mean of the six tasks 0.2418 for the baseline, all examples; 0.2286 for GKA, 200 examples of each task
           (nanochat_gka/core_metric/published.py has every figure); not run here yet
"""

from dataclasses import dataclass
from pathlib import Path

from runs.paper import common


@dataclass
class CoreConfig(common.Experiment):
    """Score a run on CORE's 22 tasks. The evaluation's own flags follow `--`."""

    run: Path = Path("out/runs/d20-gka")
    """Folder of the run."""
    bundle: str = ""
    """Folder or zip of the evaluation bundle; empty = fetch it."""


def words(config: CoreConfig, extra: list[str]) -> list[str]:
    """The evaluation's command line."""
    bundle = ["--bundle", config.bundle] if config.bundle else []
    flags = ["--run", config.run, "--out", config.base / "core", *bundle, *extra]
    return config.command("nanochat_gka.eval_core", flags)


def main(config: CoreConfig, extra: list[str]) -> None:
    common.become(words(config, extra))


if __name__ == "__main__":
    common.run(main, CoreConfig)
