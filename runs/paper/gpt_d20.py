"""What gpt_d20_gka.py and gpt_d20_softmax.py share: the trainer's command line for a language model of depth 20."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runs import commands
from runs.paper import common
from trainkit_gka.cli import Count


@dataclass
class LanguageConfig(common.Training):
    """Train one of the paper's language models. The trainer's own flags follow `--`."""

    data: Path = Path("out/packed/fineweb-170-32768-2048")
    """Folder of packed rows (make tokenize)."""
    depth: Count = 20
    """Layers; width, batch and horizon follow. The paper has 20."""


def words(config: LanguageConfig, recipe: dict[str, Any], extra: list[str]) -> list[str]:
    """The trainer's command line. recipe: what the experiment is about."""
    own = commands.language(recipe, config.data, config.depth, config.base, config.wandb)
    return config.command("nanochat_gka.train", [*own, *extra])


def run(recipe: dict[str, Any]) -> None:
    """The experiment with this recipe, as a command."""
    common.run(lambda config, extra: common.become(words(config, recipe, extra)), LanguageConfig)
