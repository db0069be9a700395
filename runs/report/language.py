"""Attention pictures of language models, and what the live views of a text need, from one pass through each model."""

import functools
from collections.abc import Sequence
from contextlib import suppress

from nanochat_gka.figures.families import FAMILIES, why_not
from nanochat_gka.figures.rows import MOST_LINES, TOKENS, draw_rows, spread_layers
from nanochat_gka.figures.subjects import Subject, subjects_of
from nanochat_gka.figures.words import choose
from runs.report.attention import embedded
from runs.report.blocks import Picture
from runs.report.live import LiveView, text_view
from runs.report.trained import TrainedRun, first_that_works
from trainkit_gka.cli import UserError

NUM_MODELS = 4
NUM_VIEWS = 2  # language models with a live view
# Which families are on the page, and of how many models; bandwidths over training are a chart.
ON_THE_PAGE = {"rows": 1, "matrices": 1, "heads": NUM_MODELS, "distances": NUM_MODELS}


def subjects(runs: Sequence[TrainedRun], text: str) -> tuple[list[Subject], str]:
    """What the first models with one tokenizer do with the text, the paper's form first; and why nothing, if it is so.

    Raises UserError for a text that is empty.
    """
    if not text.strip():
        raise UserError("the text is empty; give some words with --text")
    families: dict[str, TrainedRun] = {}
    language = [run for run in runs if not run.is_vision]
    for run in sorted(language, key=lambda run: (not run.has_sigma, bool(run.config.get("head_offsets")))):
        families.setdefault(run.family, run)
    first, reason = first_that_works(list(families.values()), lambda run: (run, subjects_of([run.folder], text)))
    if first is None:
        return [], reason
    ours, seen = first
    for run in families.values():
        with suppress(UserError):  # another tokenizer, or no checkpoint yet
            seen += subjects_of([ours.folder, run.folder], text)[1:] if run is not ours else []
    return seen[:NUM_MODELS], ""


def views(seen: Sequence[Subject]) -> list[LiveView]:
    """The live views of the first models that have bandwidths."""
    made = (text_view(s.model, s.about, s.words, s.layers) for s in seen)
    return [view for view in made if view][:NUM_VIEWS]


def pictures(seen: Sequence[Subject]) -> list[Picture]:
    """The families that can be drawn of these models; none without models."""
    drawn = []
    for name, count in ON_THE_PAGE.items() if seen else ():
        if not why_not(name, seen[:count]):
            drawn += embedded(functools.partial(FAMILIES[name], seen[:count]))
    return drawn


def heads_read(seen: Sequence[Subject]) -> list[Picture]:
    """What the heads of one model read, the one with head offsets if there is one; none without models."""
    chosen = sorted(seen, key=lambda subject: not subject.config.head_offsets)[:1]
    if not chosen:
        return []
    queries = choose(chosen[0].words[:TOKENS], most=2)
    layers = spread_layers(len(chosen[0].layers), MOST_LINES // 2)
    return embedded(functools.partial(draw_rows, chosen, queries=queries, layers=layers))
