"""The study's table of heads: what trained models do in their context, and the range of their heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from runs.study.families import ALL
from runs.study.scores import HEADS, family_of, probed_models
from runs.study.trials import Trial
from runs.table import Row, Table, measured
from runs.tables.study import ROWS

PROBES = ("induction", "copying")
HEADINGS = ["", "layers", "tokens", "seeds"]
HEADINGS += [f"{probe}: {what}" for probe in PROBES for what in ("right, %", "gain")]
HEADINGS += ["effective tokens", "σ", "gain from context"]


def heads(folder: Path = ROWS) -> list[Table]:
    """Question 6: a row for every family at a depth and budget, with the range over seeds and heads."""
    probed = list(probed_models(folder))
    by_model: dict[tuple, list[dict[str, Any]]] = {}
    for trial, record in probed:
        by_model.setdefault(_model(trial, record), []).append(record["metrics"])
    rows = [
        [name, str(depth), f"{tokens:,}" if tokens else "", str(len(seeds)), *_ranges(seeds)]
        for (depth, tokens, _, name, _), seeds in sorted(by_model.items())
    ]
    return [Table.of(HEADINGS, rows, sources=[measured([record for _, record in probed], HEADS.name)])] if rows else []


def _model(trial: Trial | None, record: dict[str, Any]) -> tuple[int, int, int, str, str]:
    """Layers, tokens of training, place and name of the family, and all that seeds have in common.

    A run that is not the study's goes by its name.
    """
    if trial is None:
        return record["config"]["depth"], 0, 0, record["config"]["name"], ""
    family = family_of(trial)
    return trial.depth, trial.tokens, list(ALL).index(family), family, replace(trial, seed=0).label


def _ranges(seeds: list[dict[str, Any]]) -> Row:
    """The cells of a row, from the numbers of every seed."""
    cells = []
    for probe in PROBES:
        cells.append(_range([100 * seed[probe]["accuracy"] for seed in seeds], ".1f"))
        cells.append(_range([seed[probe]["gain"] for seed in seeds], "+.2f"))
    heads = [head for seed in seeds for head in seed["heads"]]
    for name in ("effective tokens", "sigma"):
        cells.append(_range([head[name] for head in heads if head[name] is not None], ".3g"))
    return [*cells, _range([_gain_from_context(list(seed["loss_by_position"].values())) for seed in seeds], "+.2f")]


def _gain_from_context(losses: list[float]) -> float:
    """Nats a token from places 4-7 of a row to its second half; the last group may be one token."""
    return losses[2] - (losses[-2] if len(losses) > 2 else losses[-1])


def _range(values: list[float], form: str) -> str:
    said = list(dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values)))) if values else []
    return " to ".join(said)


TABLES = {"study-heads": heads}
