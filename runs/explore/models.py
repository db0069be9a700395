"""Which models the page has: those that were named, else the demo's, else an untrained one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from deit_gka.draw import demo_run
from deit_gka.figures.subjects import of_run, of_timm
from nanochat_gka.model import checkpoints
from runs.explore.language import LanguageModel
from runs.explore.vision import VisionModel
from runs.study import forms  # noqa: F401 (models of the study load too)
from trainkit_gka.cli import UserError

LANGUAGE_RUNS = ("d[0-9]*-gka-offsets-*", "d[0-9]*-gka-*")  # of the demo; the first that there is


class Models(NamedTuple):
    """Of both kinds the model and its twin; the lists may be shorter."""

    vision: list[VisionModel]
    language: list[LanguageModel]


def load(runs: tuple[Path, ...], twins: tuple[Path, ...], demo: Path, untrained: str) -> Models:
    """The models of the page. Raises UserError for runs that cannot be shown, or not side by side."""
    named, beside = [_model(path) for path in runs], [_model(path) for path in twins]
    language = next((run for pattern in LANGUAGE_RUNS for run in sorted(demo.glob(f"runs/{pattern}"))), None)

    def pair(kind: type, default: Callable[[], list]) -> list:
        models, twins = ([model for model in group if isinstance(model, kind)] for group in (named, beside))
        models = models or default()
        chosen = [*models[:1], *(twins or models[1:])]
        if len(chosen) > 2 or (twins and not models):
            raise UserError("give one run of a kind, vision or language, and one --twin of it")
        for twin in chosen[1:]:
            if twin.shape != chosen[0].shape:
                raise UserError(f"{twin.about} cannot stand beside {chosen[0].about}: layers, heads or tokens differ")
        return chosen

    return Models(
        pair(VisionModel, lambda: _with_twin(demo_run(demo)) or [VisionModel(of_timm(untrained))]),
        pair(LanguageModel, lambda: _with_twin(language)),
    )


def _model(path: Path) -> VisionModel | LanguageModel:
    if (path / checkpoints.CONFIG).exists() or "model_config" in checkpoints.find_checkpoint(path).state:
        return LanguageModel(checkpoints.load(path))
    return VisionModel(of_run(path))


def _with_twin(run: Path | None) -> list:
    """The model of a run of the demo, and that of the softmax run that has the rest of its name."""
    if run is None:
        return []
    twin = run.with_name(re.sub("-gka(-offsets|-paper)?-", "-softmax-", run.name))
    return [_model(path) for path in (run, twin) if path.is_dir()]
