"""Which models the page has: those that were named, else the demo's, else an untrained one."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from deit_gka.draw import demo_run
from deit_gka.figures.subjects import of_run, of_timm
from nanochat_gka.model import checkpoints as language_checkpoints
from runs.explore.language import LanguageModel
from runs.explore.vision import VisionModel
from runs.study import forms  # noqa: F401 (models of the study load too)
from trainkit_gka.cli import UserError

LANGUAGE_RUNS = ("d*-gka-offsets-*", "d*-gka-*")  # of the demo; the first that there is


@dataclass
class Models:
    """Of both kinds the model and its twin; the lists may be shorter."""

    vision: list[VisionModel] = field(default_factory=list)
    language: list[LanguageModel] = field(default_factory=list)


def load(runs: tuple[Path, ...], twins: tuple[Path, ...], demo: Path, untrained: str) -> Models:
    """The models of the page. Raises UserError for runs that cannot be shown, or not side by side."""
    named, beside = Models(), Models()
    for models, paths in ((named, runs), (beside, twins)):
        for path in paths:
            _add(models, path)
    vision, language = demo_run(demo), _demo_language(demo)
    return Models(
        _pair(named.vision or [_vision(path) for path in _with_twin(vision)] or [_untrained(untrained)], beside.vision),
        _pair(named.language or [_language(path) for path in _with_twin(language)], beside.language),
    )


def _pair(models: list, twins: list) -> list:
    """A model and its twin: the one that was named, if any. Raises UserError if they do not go together."""
    pair = [*models[:1], *(twins or models[1:])]
    if len(pair) > 2 or (twins and not models):
        raise UserError("give one run of a kind, vision or language, and one --twin of it")
    for twin in pair[1:]:
        if twin.shape != pair[0].shape:
            raise UserError(f"{twin.about} cannot stand beside {pair[0].about}: layers, heads or tokens differ")
    return pair


def _add(models: Models, path: Path) -> None:
    exported = (path / language_checkpoints.CONFIG).exists()
    if exported or "model_config" in language_checkpoints.find_checkpoint(path).state:
        models.language.append(_language(path))
    else:
        models.vision.append(_vision(path))


def _language(path: Path) -> LanguageModel:
    return LanguageModel(language_checkpoints.load(path))


def _vision(path: Path) -> VisionModel:
    return VisionModel(of_run(path))


def _untrained(name: str) -> VisionModel:
    return VisionModel(of_timm(name))


def _demo_language(demo: Path) -> Path | None:
    return next((run for pattern in LANGUAGE_RUNS for run in sorted(demo.glob(f"runs/{pattern}"))), None)


def _with_twin(run: Path | None) -> list[Path]:
    """A run of the demo, and the softmax run that has the rest of its name."""
    if run is None:
        return []
    twin = run.with_name(re.sub("-gka(-offsets|-paper)?-", "-softmax-", run.name))
    return [run, twin] if twin.is_dir() else [run]
