"""Finished cells, as comparisons need them: a family at a place, at its best rate, seed by seed."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from runs.study.cells import Cell
from runs.study.families import ALL, Family
from runs.study.rates import Done, chosen_rate
from runs.study.rows import FINISHED
from runs.study.statistics import Interval, paired_difference, spread
from trainkit_gka.progress import read_lines

FORM = {field for family in ALL.values() for field in family}
Place = dict[str, Any]  # what else a cell says: depth, tokens, batch, ...


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

    def __getitem__(self, name: str) -> float:
        """A count that is the same for all seeds: parameters, flops_per_token, train_flops."""
        return next(iter(self.runs.values()))[name]

    def over(self, baseline: "Result") -> Interval | None:
        """This family's loss minus the baseline's, paired over seeds."""
        return paired_difference(self.losses, baseline.losses)


class Scores:
    """The finished cells of one text."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows, self.done = rows, Done()
        self.used: list[dict[str, Any]] = []  # what `at` has given so far
        self.by_form: dict[Cell, dict[float, dict[int, dict]]] = {}  # without rate and seed; then rate, then seed
        for row in rows:
            try:
                cell = Cell.from_row(row["cell"])
            except TypeError:  # of another version
                continue
            if row["data"] != rows[-1]["data"] or row["key"] != cell.key(row["data"]):
                continue  # of another text, or of a cell that would compute something else today
            self.done[cell] = row["metrics"]["val_bpb"]
            form = replace(cell, rate=1.0, seed=0)
            self.by_form.setdefault(form, {}).setdefault(cell.rate, {})[cell.seed] = row

    @classmethod
    def read(cls, path: Path) -> "Scores":
        """Of a file of results; the last row of a key counts."""
        lines = [line for line in read_lines(path) if line.get("kind") == FINISHED]
        return cls(list({line["key"]: line for line in lines if isinstance(line.get("cell"), dict)}.values()))

    def at(self, family: Family, place: Place) -> Result | None:
        """The family at its rate there: the one with most seeds, among those what was chosen, or else the one of the
        lowest loss.
        """
        cell = Cell(**{**family, **place})
        rates, chosen = self.by_form.get(cell), chosen_rate(family, place, self.done)
        if not rates:
            return None

        def order(rate: float) -> tuple[int, bool, float]:
            return -len(rates[rate]), rate != chosen, mean(row["metrics"]["val_bpb"] for row in rates[rate].values())

        result = self.of(replace(cell, rate=min(rates, key=order)))
        return result and replace(result, settled=chosen is not None)

    def over(self, family: Family, baseline: Family, place: Place) -> Interval | None:
        """The family's loss minus the baseline's; None unless both have a seed there."""
        own, other = self.at(family, place), self.at(baseline, place)
        return own.over(other) if own and other else None

    def of(self, cell: Cell) -> Result | None:
        """The cell with every seed that it was trained with."""
        rows = self.by_form.get(replace(cell, rate=1.0, seed=0), {}).get(cell.rate)
        if not rows:
            return None
        self.used += rows.values()
        return Result(cell.rate, True, {seed: row["metrics"] for seed, row in rows.items()})


def family_of(cell: Cell, varied: str = "") -> str:
    """The name of the first family that has the cell's form, whatever the varied field is."""

    def form(cell: Cell) -> list[Any]:
        return [getattr(cell, field) for field in sorted(FORM - {varied})]

    return next(name for name, family in ALL.items() if form(Cell(cell.depth, **family)) == form(cell))
