"""Finished trials, as comparisons need them: a family at a place, at its best rate, seed by seed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import pandas as pd

from runs.frames import RESULTS, records
from runs.study.families import ALL, Family
from runs.study.grid import SCALED, scaled_places
from runs.study.rates import Done, chosen_rate
from runs.study.statistics import Interval, Points, Scaling, SeedNoise, paired_difference, scaling, spread
from runs.study.trials import KIND, Trial

FORM = {field for family in ALL.values() for field in family}
HEADS = RESULTS / "study_heads.jsonl"  # what runs.study.heads appends to
Place = dict[str, Any]  # what else a trial says: depth, tokens, batch, ...


PLACE = ["layers", "tokens"]


def _place(place: Place) -> tuple[int, int]:
    return place["depth"], place["tokens"]


@dataclass(frozen=True)
class Result:
    """A family at a place. runs: the metrics of every seed. settled: whether all rates that must be tried are."""

    rate: float
    settled: bool
    runs: dict[int, dict[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        """Validation bits per byte, by seed."""
        return {seed: metrics["val_bpb"] for seed, metrics in self.runs.items()}

    @property
    def mean(self) -> float:
        return mean(self.losses.values())

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; NaN for one."""
        return spread(list(self.losses.values()))

    @property
    def sigma_squared(self) -> float | None:
        """The median over heads, layers and seeds; None without bandwidths."""
        sigmas = [sigma for run in self.runs.values() for layer in (run["sigma"] or {}).values() for sigma in layer]
        return median(sigma**2 for sigma in sigmas) if sigmas else None

    def of_seeds(self, seeds: set[int]) -> "Result":
        """The result of some of its seeds."""
        return replace(self, runs={seed: run for seed, run in self.runs.items() if seed in seeds})

    def __getitem__(self, name: str) -> float:
        """A count that is the same for all seeds: parameters, flops_per_token, train_flops."""
        return next(iter(self.runs.values()))[name]

    def over(self, baseline: "Result") -> Interval | None:
        """This family's loss minus the baseline's, paired over seeds."""
        return paired_difference(self.losses, baseline.losses)


def rate_to_compare(scores: dict[float, list[tuple[float, ...]]], chosen: float | None) -> float:
    """The rate with most seeds; among those the chosen one, or else the one of the lowest mean. scores: of every seed,
    by rate.
    """

    def order(rate: float) -> tuple:
        return -len(scores[rate]), rate != chosen, *(mean(part) for part in zip(*scores[rate]))

    return min(scores, key=order)


class Scores:
    """The finished trials of one text. folder: where its file of results is."""

    def __init__(self, rows: list[dict[str, Any]], folder: Path = Path()):
        self.rows, self.folder, self.done = rows, folder, Done()
        self.used: list[dict[str, Any]] = []  # what `at` has given so far
        self.by_form: dict[Trial, dict[float, dict[int, dict]]] = {}  # without rate and seed; then rate, then seed
        for row in rows:
            try:
                trial = Trial.from_row(row["trial"])
            except TypeError:  # of another version
                continue
            if row["data"] != rows[-1]["data"] or row["key"] != trial.key(row["data"]):
                continue  # of another text, or of a trial that would compute something else today
            self.done[trial] = row["metrics"]["val_bpb"]
            form = replace(trial, rate=1.0, seed=0)
            self.by_form.setdefault(form, {}).setdefault(trial.rate, {})[trial.seed] = row

    @classmethod
    def read(cls, path: Path) -> "Scores":
        """Of a file of results; the last row of a key counts. Raises UserError for a row that is damaged."""
        return cls(list({row["key"]: row for row in records(path, "val_bpb", kind=KIND)}.values()), path.parent)

    def at(self, family: Family, place: Place) -> Result | None:
        """The family at its rate there: the one with most seeds, among those what was chosen, or else the one of the
        lowest loss.
        """
        trial = Trial(**{**family, **place})
        rates, chosen = self.by_form.get(trial), chosen_rate(family, place, self.done)
        if not rates:
            return None

        losses = {rate: [(row["metrics"]["val_bpb"],) for row in seeds.values()] for rate, seeds in rates.items()}
        result = self.of(replace(trial, rate=rate_to_compare(losses, chosen)))
        return result and replace(result, settled=chosen is not None)

    def finished(self, name: str, places: Iterable[Place]) -> list[Result]:
        """What is finished of a family at some places."""
        return [result for place in places if (result := self.at(ALL[name], place))]

    def points(self, name: str) -> Points:
        """Training FLOPs and losses of a family's places of the scaling question that are finished."""
        results = {str(place): self.at(ALL[name], place) for place in scaled_places()}
        return {at: (one["train_flops"], list(one.losses.values())) for at, one in results.items() if one}

    def scalings(self) -> dict[str, Scaling | None]:
        """The fit of every family of the scaling question; None where there are too few points."""
        own = {name: self.points(name) for name in SCALED}
        of_all = SeedNoise.pooled(losses for points in own.values() for _, losses in points.values())
        return {name: scaling(points, of_all) for name, points in own.items()}

    def over(self, family: Family, baseline: Family, place: Place) -> Interval | None:
        """The family's loss minus the baseline's; None unless both have a seed there."""
        own, other = self.at(family, place), self.at(baseline, place)
        return own.over(other) if own and other else None

    def frame(self, families: dict[str, Family], places: Iterable[Place]) -> pd.DataFrame:
        """A row for every family at every place that is finished. spread: NaN for one seed; sigma^2: without any."""
        rows = [
            [name, *_place(place), r["train_flops"], r.mean, r.spread, r.sigma_squared or math.nan]
            for name, family in families.items()
            for place in places
            if (r := self.at(family, place))
        ]
        return pd.DataFrame(rows, columns=["family", *PLACE, "FLOPs", "loss", "spread", "sigma^2"])

    def differences(self, baselines: dict[str, str], places: Iterable[Place]) -> pd.DataFrame:
        """A row for every family at every place where it shares a seed with its baseline. baselines: by family."""
        rows = [
            [name, baseline, *_place(place), over.value, over.low, over.high]
            for name, baseline in baselines.items()
            for place in places
            if (over := self.over(ALL[name], ALL[baseline], place))
        ]
        return pd.DataFrame(rows, columns=["family", "over", *PLACE, "difference", "low", "high"])

    def of(self, trial: Trial) -> Result | None:
        """The trial with every seed that it was trained with."""
        rows = self.by_form.get(replace(trial, rate=1.0, seed=0), {}).get(trial.rate)
        if not rows:
            return None
        self.used += rows.values()
        return Result(trial.rate, True, {seed: row["metrics"] for seed, row in rows.items()})


def probed_models(folder: Path) -> Iterable[tuple[Trial | None, dict[str, Any]]]:
    """Every model whose heads were looked at: its trial, if a row in `folder` is of it, and the newest record."""
    newest = {one["config"]["sha256"]: one for one in records(folder.with_name(HEADS.name), "heads")}
    rows = [row for path in folder.glob("*.jsonl") for row in Scores.read(path).rows]
    trials = {row["key"]: Trial.from_row(row["trial"]) for row in rows}
    return ((trials.get(record["config"]["name"]), record) for record in newest.values())


def family_of(trial: Trial, varied: str = "") -> str:
    """The name of the first family that has the trial's form, whatever the varied field is."""

    def form(trial: Trial) -> list[Any]:
        return [getattr(trial, field) for field in sorted(FORM - {varied})]

    return next(name for name, family in ALL.items() if form(Trial(trial.depth, **family)) == form(trial))
