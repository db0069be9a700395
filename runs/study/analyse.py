"""Turn the study's rows into its tables and pictures.

python -m runs.study.analyse             prints the tables
python -m runs.study.analyse --write     writes them into the pages, and draws the pictures
python -m runs.study.analyse --check     exits with 1 if a page does not say what the rows say

A block stands between `<!-- study:NAME -->` and `<!-- /study -->` of a page in PAGES; NAME is a key of TABLES.

Intervals hold 95 %. Differences are paired over seeds, and their standard deviation over seeds is pooled over all
depths and budgets where both forms have two seeds or more: three seeds alone would give intervals that are too narrow
as often as too wide. With fewer than LEAST_FREEDOM degrees of freedom there is no interval.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from runs import pages
from runs.frames import RESULTS, frame, records
from runs.looks import HEADING, LARGE, Look, legend, panels, save, slide
from runs.study.train import (
    BUDGETS,
    CONTROL,
    FORMS,
    HALF_VE,
    PAPER,
    PRESET,
    REPEATED,
    RIVAL,
    fits,
)
from runs.table import NOT_RUN, Table, by_machine
from trainkit_gka.cli import UserError, run
from trainkit_gka.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from trainkit_gka.progress import console, read_lines

PAGES = ("README.md", "docs/results.md", "runs/study/README.md", "runs/study/TABLES.md")
TOKENS, FLOPS, TIME = AXES = ("equal tokens", "equal FLOPs", "equal time")
ALIKE = 1.1  # costs up to this ratio count as equal, so that additions may cost a little more
LEAST_FREEDOM = 4  # of an interval: five seeds, or three seeds at two places
Place = tuple[int, int]  # layers, training tokens
Speeds = dict[int, dict[str, float]]  # layers -> form -> tokens/s of a training step

SMALLEST, LONGEST = (2, 2**20), (4, 2**22)
COMPARED = ((4, 2**20), LONGEST)  # on the pages that compare few forms
HEADINGS = ("equal tokens, 2^20", "equal tokens, 2^22", "equal time, 2^22")
SCALED = (*REPEATED[:4], "VLT + offsets", "softmax without VE", "GGGA + offsets", "GGGGGA + offsets")
AT_SMALLEST = [form for form in list(FORMS)[: list(FORMS).index(RIVAL) + 1] if fits(form, 2)]
CONTENDERS = (PRESET, RIVAL, "GGGA + offsets + channels + gates", f"{HALF_VE} + channels")
FRONT = ("softmax", CONTROL, PAPER, "GKA + offsets", "GGGA + offsets", PRESET, RIVAL)  # of the front page
PUBLIC = "linux-doc-6.1"  # the text that everybody can get
IMAGES = {"cifar10": "CIFAR-10", "images": "600 photographs"}  # names of sets for people
OFFSETS = ("LRUB", "NLUD")  # spatial ones
# The order of tables and pictures; other forms follow.
IMAGE_FORMS = ["softmax", "VLT", "GKA", "GGGA", "GGGGGA", *(f"{a} + {b}" for b in OFFSETS for a in ("softmax", "GKA"))]


# Intervals


@dataclass(frozen=True)
class Interval:
    """A mean difference over `seeds` seeds, and the ends of what holds 95 %; NaN where seeds are too few."""

    value: float
    low: float
    high: float
    seeds: int

    def text(self, form: str) -> str:
        """The value, and in brackets the ends."""
        ends = "" if math.isnan(self.low) else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.value:{form}}{ends}"


def intervals(differences: dict[Any, pd.Series]) -> dict[Any, Interval]:
    """An interval for each place, from the differences of its seeds and the standard deviation pooled over places."""
    freedom = sum(len(one) - 1 for one in differences.values())
    squares = sum(one.var() * (len(one) - 1) for one in differences.values() if len(one) > 1)
    width = stats.t.ppf(0.975, freedom) * math.sqrt(squares / freedom) if freedom >= LEAST_FREEDOM else math.nan
    halves = {place: width / math.sqrt(len(one)) for place, one in differences.items()}
    means = {place: float(one.mean()) for place, one in differences.items()}
    return {
        place: Interval(mean, mean - halves[place], mean + halves[place], len(differences[place]))
        for place, mean in means.items()
    }


def read_curve(sizes: list[float], losses: np.ndarray, size: float) -> float:
    """The loss at a size, on the parabola (of two points the chord) through points in the logarithm of the size."""
    if len(sizes) < 3:
        return float(np.interp(np.log(size), np.log(sizes), losses))
    return float(np.polyval(np.polyfit(np.log(sizes), losses, 2), np.log(size)))


# Rows


def chosen_rows(path: Path, *metrics: str) -> list[dict[str, Any]]:
    """The rows whose learning rate was chosen for a comparison, each with its form and whether its rate is settled.

    Rows of before 0438d460 are in chosen.jsonl by their keys; later ones say it themselves. The last row of a key
    counts. Raises UserError for a damaged row, and for rows of several sets of data, which do not compare.
    """
    labels = {line["key"]: line for line in read_lines(path.with_name("chosen.jsonl"))}
    kind = "study-vision" if path.name.startswith("vision_") else "study"
    newest = {row["key"]: row for row in records(path, "key", "trial", "data", *metrics, kind=kind)}
    chosen = [{**row, **labels.get(key, {})} for key, row in newest.items() if key in labels or row.get("chosen")]
    known = dict.fromkeys(one["form"] for key, one in labels.items() if key in newest)
    order = {form: number for number, form in enumerate(known)}
    chosen.sort(key=lambda row: order.get(row["form"], len(order)))
    if (sets := len({json.dumps(row["data"], sort_keys=True) for row in chosen})) > 1:
        problem = f"{path} has rows of {sets} sets of data, whose losses do not compare"
        raise UserError(f'{problem}; move those with one value of "data" to another file')
    return chosen


def speeds_of(folder: Path) -> Speeds:
    """Tokens/s of training steps that were timed in turns: of each depth the newest, on the machine timed last."""
    timed = frame(folder / "study_speed.jsonl", "family", "depth", "group", kind="study-speed")
    if timed.empty:
        return {}
    timed = timed[timed.tokens_per_second.notna() & (timed.hardware == timed.hardware.iloc[-1])]
    timed = timed[timed.group == timed.groupby("depth").group.transform("last")]
    return {depth: dict(zip(one.family, one.tokens_per_second)) for depth, one in timed.groupby("depth")}


def cells_of(rows: list[dict[str, Any]], trial: Iterable[str], metrics: Iterable[str]) -> pd.DataFrame:
    """A line for each row: these and the usual values of what was trained and measured, and all bandwidths."""
    table = [
        {name: row["trial"][name] for name in ("seed", "rate", *trial)}
        | {name: row["metrics"][name] for name in ("parameters", *metrics)}
        | {"form": row["form"], "settled": row.get("settled", True)}
        | {"sigmas": [s for layer in (row["metrics"]["sigma"] or {}).values() for s in layer]}
        for row in rows
    ]
    return pd.DataFrame(table)


class Study:
    """The finished trainings of one text, and their comparisons."""

    def __init__(self, rows: list[dict[str, Any]], speeds: Speeds):
        self.speeds = speeds
        lines = cells_of(rows, ("depth", "tokens"), ("flops_per_token", "train_flops", "val_bpb"))
        cells = lines.rename(columns={"val_bpb": "loss"}).groupby(["form", "depth", "tokens"])
        self.cells: dict[tuple[str, int, int], pd.DataFrame] = {
            place: cell.set_index("seed").sort_index() for place, cell in cells
        }
        self.places = sorted({(depth, tokens) for _, depth, tokens in self.cells})
        self.intervals = cache(self._intervals)

    def has(self, form: str, place: Place) -> bool:
        return (form, *place) in self.cells

    @property
    def has_many(self) -> bool:
        """Whether there are sizes and budgets enough for curves."""
        return len(self.places) > 4

    @property
    def longest(self) -> Place:
        """The longest training of four layers in which the preset and CONTROL have several seeds."""
        places = [place for place in self.places if place[0] == LONGEST[0]]
        seeds = {place: [len(self.cells.get((form, *place), ())) for form in (CONTROL, PRESET)] for place in places}
        return max((place for place in places if min(seeds[place]) > 1), default=LONGEST)

    def at(self, form: str, place: Place) -> pd.DataFrame:
        """A row for each seed."""
        return self.cells[(form, *place)]

    def loss(self, form: str, place: Place) -> str:
        """The mean over seeds, and their standard deviation."""
        return mean_of(self.at(form, place).loss, ".4f") if self.has(form, place) else NOT_RUN

    def cost(self, form: str, place: Place, axis: str) -> float:
        """FLOPs or seconds of a training; NaN where the speed is unknown."""
        if axis == FLOPS:
            return float(self.at(form, place).train_flops.iloc[0])
        return place[1] / self.speeds.get(place[0], {}).get(form, math.nan)

    def difference(self, form: str, baseline: str, place: Place, axis: str = TOKENS) -> pd.Series:
        """The form's loss minus the baseline's, for each seed of both.

        At equal FLOPs or time the baseline's loss is the best that it reaches, at any depth, for as much or less.
        Between budgets it is on the parabola through them. None unless three of the baseline's budgets enclose the cost
        at some depth: only much cheaper trainings would be left for it, or a chord, on which its loss is too high.
        """
        ours = self.at(form, place).loss
        if axis == TOKENS:
            return (ours - self.at(baseline, place).loss).dropna()
        size, best, encloses = self.cost(form, place, axis), pd.Series(dtype=float), False
        for depth in {place[0]: None for place in self.places}:
            curve = [one for one in self.places if one[0] == depth and self.has(baseline, one)]
            sizes = [self.cost(baseline, one, axis) for one in curve]
            if not sizes or not min(sizes) <= size:
                continue
            encloses = encloses or (len(sizes) > 2 and size <= ALIKE * max(sizes))
            losses = pd.concat([self.at(baseline, one).loss for one in curve], axis=1).dropna()
            at_size = [read_curve(sizes, row, min(size, max(sizes))) for row in losses.to_numpy()]
            there = (ours - pd.Series(at_size, losses.index, dtype=float)).dropna()
            if len(there) and (best.empty or there.mean() > best.mean()):
                best = there
        return best if encloses else pd.Series(dtype=float)

    def _intervals(self, form: str, baseline: str, axis: str) -> dict[Place, Interval]:
        places = [place for place in self.places if self.has(form, place) and self.has(baseline, place)]
        differences = {place: self.difference(form, baseline, place, axis) for place in places}
        return intervals({place: one for place, one in differences.items() if len(one)})

    def interval(self, form: str, baseline: str, place: Place, axis: str = TOKENS) -> Interval | None:
        """The form over the baseline; None unless both are trained there."""
        return self.intervals(form, baseline, axis).get(place)

    def over(self, form: str, baseline: str, place: Place, axis: str = TOKENS, spec: str = "+.3f") -> str:
        """The same in words; empty where there is none."""
        one = self.interval(form, baseline, place, axis) if form != baseline else None
        return one.text(spec) if one else ""

    def seeds(self, form: str, baseline: str, place: Place) -> str:
        """How many seeds both have."""
        return str(one.seeds) if (one := self.interval(form, baseline, place)) else "0"


def mean_of(values: pd.Series, form: str) -> str:
    """The mean, and the standard deviation of several."""
    return f"{values.mean():{form}}" + (f" ± {values.std():{form}}" if len(values) > 1 else "")


def sigmas_of(cell: pd.DataFrame) -> np.ndarray:
    """The bandwidths of all heads, layers and seeds."""
    return np.concatenate([np.array(sigmas, dtype=float) for sigmas in cell.sigmas])


def name_of(place: Place) -> str:
    """A depth and a budget, as a heading."""
    return f"depth {place[0]}, 2^{place[1].bit_length() - 1}"


def plain_name(form: str) -> str:
    """What pages call the form."""
    return NAMES.get(form, form).replace("\n", " ")


def rate_of(cell: pd.DataFrame) -> str:
    """Its learning rate, with a star if not every rate that must be tried was."""
    return f"{cell.rate.iloc[0]:g}" + ("" if cell.settled.all() else "*")


# Tables


def smallest(study: Study) -> Table:
    """Every form at the smallest size."""
    rows = []
    for form in (form for form in AT_SMALLEST if study.has(form, SMALLEST)):
        cell = study.at(form, SMALLEST)
        counts = [f"{cell[name].iloc[0]:,}" for name in ("parameters", "flops_per_token")]
        difference = study.over(form, "softmax", SMALLEST, spec="+.4f")
        rows.append([form, study.loss(form, SMALLEST), rate_of(cell), str(len(cell)), difference, *counts])
    return Table.of(
        ["", "validation bits per byte", "rate", "seeds", "minus softmax", "parameters", "FLOPs/token"], rows
    )


def sizes(study: Study) -> Table:
    """The loss of the forms at every depth and budget that one of them was trained at."""
    forms = [form for form in (*SCALED, PRESET, RIVAL) if any(study.has(form, place) for place in study.places)]
    places = [place for place in study.places if any(study.has(form, place) for form in forms)]
    rows = [[form, *(study.loss(form, place) if fits(form, place[0]) else "" for place in places)] for form in forms]
    cells = [study.at(form, place).loss for form in REPEATED for place in places if study.has(form, place)]
    repeated = [cell for cell in cells if len(cell) > 1]
    freedom = sum(len(cell) - 1 for cell in repeated)
    deviation = math.sqrt(sum(cell.var() * (len(cell) - 1) for cell in repeated) / freedom) if freedom else math.nan
    note = f"Standard deviation over seeds, pooled over {len(repeated)} trials: {deviation:.4f}."
    return Table.of(["", *map(name_of, places)], rows, notes=[note] if freedom else [])


def pairs(forms: Iterable[str]) -> list[tuple[str, str]]:
    """Every form with each of the two baselines that comes before it."""
    baselines = {"softmax": ("softmax",), CONTROL: ("softmax", CONTROL)}
    return [(form, baseline) for baseline, before in baselines.items() for form in forms if form not in before]


def differences(study: Study) -> Table:
    """Forms with most seeds over both baselines, at the budget that all depths have."""
    common = [place for place in study.places if place[1] == 2**20]
    rows = []
    for form, baseline in pairs(REPEATED):
        if any(study.interval(form, baseline, place) for place in common):
            seeds = " / ".join(study.seeds(form, baseline, place) for place in common)
            rows.append([form, baseline, *(study.over(form, baseline, place) for place in common), seeds])
    return Table.of(["", "minus", *(f"depth {place[0]}" for place in common), "seeds"], rows, words=2)


def differences_longer(study: Study) -> Table:
    """The same with other budgets, and at equal FLOPs and time."""
    rows = []
    shortest = {place[0]: place[1] for place in reversed(study.places)}
    places = [place for place in study.places if place[1] != 2**20 or shortest[place[0]] < 2**20]
    for form, baseline in [*pairs([*REPEATED, HALF_VE, PRESET]), (PRESET, RIVAL)]:
        for place in (place for place in places if study.interval(form, baseline, place)):
            ways = [study.over(form, baseline, place, axis) for axis in AXES]
            rows.append([form, baseline, name_of(place), *ways, study.seeds(form, baseline, place)])
    return Table.of(["", "minus", "layers and tokens", *AXES, "seeds"], rows, words=3)


def longest(study: Study) -> Table:
    """The longest trainings of four layers over softmax with offsets, with what they cost in its shares."""
    rows, place = [], study.longest
    speeds = study.speeds.get(place[0], {})
    for form in ("softmax", CONTROL, PAPER, "GKA + offsets", HALF_VE, "GGGA + offsets", *CONTENDERS):
        if not (study.has_many and study.has(form, place) and study.has(CONTROL, place)):
            continue
        ours, control = study.at(form, place), study.at(CONTROL, place)
        ways = [study.over(form, CONTROL, place, axis) if form != CONTROL else "+0.000" for axis in AXES]
        shares = [ours[name].iloc[0] / control[name].iloc[0] for name in ("parameters", "flops_per_token")]
        shares.append(speeds.get(CONTROL, math.nan) / speeds.get(form, math.nan))
        costs = ["" if math.isnan(share) else f"{share:.2f}x" for share in shares]
        rows.append([form, *ways, *costs, str(len(ours.index.intersection(control.index)))])
    return Table.of([name_of(place), *AXES, "parameters", "FLOPs", "time of a step", "seeds"], rows)


def compared(study: Study, form: str, baseline: str) -> list[str]:
    """Two forms of four layers: at equal tokens after each of COMPARED, and at equal time after the last."""
    cells = [study.over(form, baseline, place) for place in COMPARED]
    return [*cells, study.over(form, baseline, COMPARED[-1], TIME)]


def forms(study: Study) -> Table:
    """The main forms over CONTROL, with their parameters and time of a step."""
    rows, speeds = [], study.speeds.get(COMPARED[0][0], {})
    for form in FRONT:
        if not (place := next((place for place in COMPARED if study.has(form, place)), None)):
            continue
        cells = ["0"] * len(HEADINGS) if form == CONTROL else compared(study, form, CONTROL)
        counts = [study.at(one, place).parameters.iloc[0] for one in (form, CONTROL)]
        shares = [counts[0] / counts[1], speeds.get(CONTROL, math.nan) / speeds.get(form, math.nan)]
        costs = ["" if math.isnan(share) else f"{share:.2f}x" for share in shares]
        rows.append([plain_name(form), *cells, *costs])
    return Table.of(["", *HEADINGS, "parameters", "time of a step"], rows)


def preset(study: Study) -> Table:
    """The preset over softmax, with ever more of what the preset has."""
    baselines = [form for form in ("softmax", CONTROL, RIVAL) if any(compared(study, PRESET, form))]
    return Table.of(
        ["the preset minus", *HEADINGS], [[plain_name(form), *compared(study, PRESET, form)] for form in baselines]
    )


def without_ve(study: Study) -> Table:
    """Forms without value embeddings, which models of other libraries do not have."""
    ours, place = "GKA + offsets + channels + gates", COMPARED[0]
    rows = [
        [form, study.loss(form, place), study.over(form, ours, place)]
        for form in ("softmax without VE", "softmax + offsets without VE", ours)
        if study.has(form, place) and study.has(ours, place)
    ]
    return Table.of([f"without value embeddings, {name_of(place)}", "bits per byte", "minus the last row"], rows)


def counts(study: Study) -> Table:
    """At how many sizes and budgets with several seeds the preset is significantly ahead or behind, or neither."""
    rows = []
    for baseline, axis in itertools.product((CONTROL, RIVAL), (TOKENS, TIME)):
        known = [one for one in study.intervals(PRESET, baseline, axis).values() if one.seeds > 1]
        known = [one for one in known if not math.isnan(one.low)]
        ahead = sum(one.high < 0 for one in known)
        behind = sum(one.low > 0 for one in known)
        if known:
            rows.append([baseline, axis, *map(str, (ahead, len(known) - ahead - behind, behind))])
    return Table.of(["the preset compared with", "at", "ahead", "neither", "behind"], rows, words=2)


# Images


def images_of(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, pd.DataFrame]]]:
    """By set of images its data, and for each form a row for each seed."""
    sets = {}
    for path in sorted(folder.glob("vision_*.jsonl")):
        if rows := chosen_rows(path, "ema_top1", "sigma"):
            cells = cells_of(rows, (), ("flops", "images_per_second", "ema_top1")).groupby("form", sort=False)
            by_form = {form: cell.set_index("seed").sort_index() for form, cell in cells}
            by_form = {form: by_form[form] for form in (*IMAGE_FORMS, *by_form) if form in by_form}
            sets[path.stem.removeprefix("vision_")] = rows[0]["data"], by_form
    return sets


def over_images(cells: dict[str, pd.DataFrame], form: str, baseline: str) -> str:
    """Points of top-1 between two forms."""
    if form == baseline or not {form, baseline} <= cells.keys():
        return ""
    difference = (cells[form].ema_top1 - cells[baseline].ema_top1).dropna()
    return intervals({"": difference})[""].text("+.2f") if len(difference) else ""


def images(folder: Path) -> list[Table]:
    """Every form's accuracy, and its difference from softmax and from GKA, for each set of images."""
    tables = []
    for data, cells in images_of(folder).values():
        rows, held_out = [], data.get("held out")
        for form, cell in cells.items():
            cells_of_form = [form, mean_of(cell.ema_top1, ".2f"), rate_of(cell), str(len(cell))]
            cells_of_form += [over_images(cells, form, baseline) for baseline in ("softmax", "GKA")]
            cells_of_form += [f"{cell.parameters.iloc[0]:,}", f"{cell.flops.iloc[0] / 1e6:.2f}"]
            if held_out:
                sigmas = sigmas_of(cell)
                learned = f"{min(sigmas):.2f} to {max(sigmas):.2f}" if len(sigmas) else ""
                cells_of_form += [f"{cell.images_per_second.median():,.0f}", learned]
            rows.append(cells_of_form)
        judged = f"to test, rates by {held_out:,} that those of training hold out" if held_out else "held out"
        headings = ["", "top-1 %", "rate", "seeds", "minus softmax", "minus GKA", "parameters", "MFLOPs/image"]
        headings += ["images/s", "learned σ"] if held_out else []
        provisional = "Rates marked * are provisional: not every rate that must be tried has been."
        notes = [] if all(cell.settled.all() for cell in cells.values()) else [provisional]
        title = f"{data['images']}, {data['train images']:,} for training and {data['val images']:,} {judged}:"
        tables.append(Table.of(headings, rows, title=title, notes=notes))
    return tables


def images_summary(folder: Path) -> list[Table]:
    """VLT and GKA over softmax, and GKA with its best spatial offsets over softmax with the same."""
    rows = []
    for data, cells in images_of(folder).values():
        shifted = [form for form in cells if form.startswith("GKA + ")]
        best = max(shifted, key=lambda form: cells[form].ema_top1.mean(), default="")
        name = IMAGES.get(data["images"], data["images"])
        for form in (form for form in ("VLT", "GKA", best) if form in cells):
            other = form.replace("GKA", "softmax") if form == best else "softmax"
            ends = [f"{cells[one].ema_top1.mean():.2f}" if one in cells else NOT_RUN for one in (form, other)]
            rows.append([name, form, other, *ends, over_images(cells, form, other), str(len(cells[form]))])
    headings = ["images", "form", "compared with", "top-1 %", "its top-1 %", "difference, points", "seeds"]
    return [Table.of(headings, rows, words=3)]


def sources(folder: Path) -> list[Table]:
    """When, where and at which commits the rows of every file were measured."""
    rows = []
    for path in sorted(path for path in folder.glob("*.jsonl") if path.name != "chosen.jsonl"):
        for machine, when, commits, count in by_machine(chosen_rows(path)):
            rows.append([f"`{path.name}`", machine, when, str(len(commits)), str(count)])
    return [Table.of(["file", "machine", "dates", "commits", "rows"], rows, words=3)]


def of_every_text(one: Callable[[Study], Table], titled: bool = True) -> Callable[[Path], list[Table]]:
    """A table for each file of text that fills it, under its name; without `titled` only where there are several."""

    def tables(folder: Path) -> list[Table]:
        built = {path.stem: one(study) for path, study in texts(folder).items()}
        known = {name: table for name, table in built.items() if table.rows} or built
        return [replace(table, title=f"{name}:" * (titled or len(known) > 1)) for name, table in known.items()]

    return tables


@cache
def texts(folder: Path) -> dict[Path, Study]:
    """The files of text that have rows to compare. Raises UserError for a damaged row."""
    paths = [path for path in sorted(folder.glob("*.jsonl")) if not path.name.startswith(("vision_", "chosen"))]
    return {path: Study(rows, speeds_of(folder.parent)) for path in paths if (rows := chosen_rows(path, "val_bpb"))}


TABLES: dict[str, Callable[[Path], list[Table]]] = {
    "families": of_every_text(smallest),
    "sizes": of_every_text(sizes),
    "differences": of_every_text(differences),
    "differences-longer": of_every_text(differences_longer),
    "longest": of_every_text(longest, titled=False),
    "counts": of_every_text(counts, titled=False),
    "forms": lambda folder: [forms(study) for path, study in texts(folder).items() if path.stem == PUBLIC],
    "preset": of_every_text(preset, titled=False),
    "without-ve": of_every_text(without_ve, titled=False),
    "images": images,
    "images-summary": images_summary,
    "sources": sources,
}


# Pictures

OPEN = (0, (4, 2))  # dashes
LOOKS = {  # markers differ, so that forms can be told apart without colours
    "softmax": Look(BLACK),
    CONTROL: Look(SKY, "s"),
    PAPER: Look(VERMILION, "v"),
    "GKA + offsets": Look(ORANGE, "^"),
    HALF_VE: Look(GREEN, "D"),
    "GGGA + offsets": Look(BLUE, "P"),
    PRESET: Look(GREEN, "*", OPEN),
    RIVAL: Look(SKY, "X", OPEN),
}
MEAN = "causal mean"
NAMES = {  # for people
    PAPER: "GKA, the paper's form",
    "GGGA": "hybrid (GGGA)",
    "GGGGGA": "hybrid (GGGGGA)",
    "GGGA + offsets": "hybrid (GGGA) + offsets",
    PRESET: "GKA, the preset",
    RIVAL: "softmax with the\npreset's additions",
    MEAN: "a mean of all earlier tokens",
}
LOSS = "validation bits per byte"


def style(form: str, **changed: Any) -> dict[str, Any]:
    """How a form is drawn: arguments of matplotlib's plot and errorbar. The preset has the largest marker."""
    return LOOKS[form](NAMES.get(form, form), **{"markersize": 10 if form == PRESET else 5} | changed)


def finish(figure: Any, axes: Iterable[Any], title: str, path: Path) -> None:
    """Write the figure under its title, with one legend below all axes."""
    legend(figure, axes, columns=2)
    console.print(f"drew {save(figure, title, path)}", highlight=False, markup=False)


def draw_budgets(study: Study, name: str, path: Path) -> None:
    """Differences from CONTROL against the tokens of the training, a panel a depth."""
    depths = [depth for depth in BUDGETS if any(place[0] == depth for place in study.places)]
    figure, axes = panels(1, len(depths), 4.2, sharey=True)
    for axis, depth in zip(axes, depths, strict=True):
        for number, form in enumerate(form for form in LOOKS if form != CONTROL):
            ends = {tokens: study.interval(form, CONTROL, (depth, tokens)) for tokens in BUDGETS[depth]}
            beside = {tokens * 2 ** (0.06 * (number - 3)): one for tokens, one in ends.items() if one}
            values, highs = ([getattr(one, name) for one in beside.values()] for name in ("value", "high"))
            axis.errorbar(list(beside), values, np.subtract(highs, values), **style(form))
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set(xlim=(2**18.5, 2**22.5), xlabel="training tokens")
        axis.set_title(f"{depth} layers", fontsize=10)
    axes[0].set_ylabel(f"loss minus that of {CONTROL}")
    finish(figure, axes, f"{LOSS.capitalize()}: difference from {CONTROL}, on {name}", path)


def draw_time(study: Study, name: str, path: Path) -> None:
    """Loss against the minutes of training; lines join the trainings that no faster one of the form beats."""
    figure, [axis] = panels(1, 1, 5.4)
    for form in LOOKS:
        cells = [(study.cost(form, p, TIME) / 60, study.at(form, p).loss) for p in study.places if study.has(form, p)]
        known = sorted((minutes, loss.mean(), loss.std()) for minutes, loss in cells if not math.isnan(minutes))
        for minutes, loss, spread in known:
            axis.errorbar(minutes, loss, 0 if math.isnan(spread) else spread, **style(form, linestyle="none"))
        best = [one for place, one in enumerate(known) if one[1] < min([o[1] for o in known[:place]], default=9)]
        line = dict(color=LOOKS[form].colour, linestyle=LOOKS[form].line, linewidth=1)
        axis.plot([one[0] for one in best], [one[1] for one in best], **line)
    axis.set(xscale="log", xlabel="minutes of training, one thread", ylabel=LOSS)
    axis.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    finish(figure, [axis], f"Loss against the time of training, on {name}", path)


def draw_quality(study: Study, name: str, path: Path) -> None:
    """Differences from CONTROL with their intervals after the longest training, a row for each form, and its costs."""
    place, (figure, axis, words) = study.longest, slide(["para-\nmeters", "time of\na step"])
    forms = [form for form in FRONT if study.has(form, place)]
    for row, form in enumerate(forms):
        one, size = study.interval(form, CONTROL, place), 18 if form == PRESET else 9
        bars = [[one.value - one.low], [one.high - one.value]]
        axis.errorbar(one.value, row, xerr=bars, **style(form, markersize=size, elinewidth=2.5))
        beside = dict(xytext=(9, 0), textcoords="offset points", fontsize=LARGE - 2, va="center")
        axis.annotate(f"{one.value:+.3f}".replace("-", "−"), (np.nanmax([one.value, one.high]), row), **beside)
        costs = [(study.at(one, place).parameters.iloc[0], study.cost(one, place, TIME)) for one in (form, CONTROL)]
        for column, (ours, control) in enumerate(zip(*costs, strict=True)):
            share = "" if math.isnan(ours / control) else f"{ours / control:.2f}×"
            words.text(column, row, share, fontsize=LARGE, va="center", ha="center")
    axis.axvline(0, color="grey", linewidth=1)
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.15 * (right - left))
    axis.set_ylim(len(forms) - 0.4, -0.6)
    axis.set_yticks(range(len(forms)), [NAMES.get(form, form) for form in forms])
    axis.set_xlabel(f"bits per byte of {name}; bars hold 95 %")
    title = f"Loss minus that of {CONTROL}: {place[0]} layers, {place[1] / 1e6:.1f} million tokens"
    console.print(f"drew {save(figure, title, path, HEADING)}", highlight=False, markup=False)


def draw_longer(study: Study, name: str, path: Path) -> None:
    """Loss and σ² against the tokens of the training, with two layers."""
    figure, (left, right) = panels(1, 2, 4.4)
    looks = {form: LOOKS[form] for form in ("softmax", PAPER, "GKA + offsets")} | {MEAN: Look(GREY, "x", ":")}
    for form, look in looks.items():
        cells = {place[1]: study.at(form, place) for place in study.places if place[0] == 2 and study.has(form, place)}
        left.plot(cells.keys(), [cell.loss.mean() for cell in cells.values()], **look(NAMES.get(form, form)))
        if all(len(sigmas_of(cell)) for cell in cells.values()):
            right.plot(cells.keys(), [np.median(sigmas_of(cell) ** 2) for cell in cells.values()], **look(form))
    for axis, label in ((left, LOSS), (right, "median σ² of all heads")):
        axis.set(xlabel="training tokens", ylabel=label)
        axis.set_xscale("log", base=2)
    right.set_yscale("log")
    finish(figure, [left], f"Two layers, trained longer, on {name}", path)


def draw_images(folder: Path, path: Path) -> None:
    """Top-1 of the forms of IMAGE_FORMS on every set of images, a dot for each seed and a stroke for their mean."""
    sets = images_of(folder).values()
    figure, axes = panels(1, len(sets), 4.2, sharey=True)
    for axis, (data, cells) in zip(axes, sets, strict=True):
        for row, form in ((row, form) for row, form in enumerate(IMAGE_FORMS) if form in cells):
            top1, colour = cells[form].ema_top1, {"s": BLACK, "V": PURPLE}.get(form[0], VERMILION)
            axis.plot(top1, [row] * len(top1), "o", color=colour, markersize=6, alpha=0.5)
            axis.plot(top1.mean(), row, "|", color=colour, markersize=18, markeredgewidth=2.5)
        axis.set(xlabel="top-1, %", ylim=(len(IMAGE_FORMS) - 0.5, -0.5))
        axis.set_title(IMAGES.get(data["images"], data["images"]), fontsize=10)
    axes[0].set_yticks(range(len(IMAGE_FORMS)), [NAMES.get(form, form) for form in IMAGE_FORMS])
    title = "Top-1 of vision transformers, with spatial offsets (LRUB, NLUD) and without"
    console.print(f"drew {save(figure, title, path)}", highlight=False, markup=False)


def draw(folder: Path, pictures: Path) -> None:
    """All pictures that there are rows for; of texts with few sizes and budgets, only how the forms compare."""
    pictures.mkdir(parents=True, exist_ok=True)
    for path, study in texts(folder).items():
        if study.has_many and any(form == CONTROL for form, _, _ in study.cells):
            draw_budgets(study, path.stem, pictures / f"study-budgets-{path.stem}.png")
        if study.has_many and study.speeds:
            draw_time(study, path.stem, pictures / f"study-time-{path.stem}.png")
        if study.has_many and study.has(PRESET, study.longest):
            draw_quality(study, path.stem, pictures / f"quality-{path.stem}.png")
        if any(place[0] == 2 and study.has(MEAN, place) for place in study.places):
            draw_longer(study, path.stem, pictures / f"study-longer-{path.stem}.png")
    if images_of(folder):
        draw_images(folder, pictures / "study-images.png")


# The command


@dataclass
class AnalyseConfig:
    """Print the tables of the rows in runs/results/study, or write them into the pages and draw the pictures."""

    write: bool = False
    """Write the tables into the pages and draw the pictures."""
    check: bool = False
    """Exit with 1 if a page is out of date."""
    results: Path = RESULTS / "study"
    """Folder of the results, a file of JSON lines for each corpus."""


def main(config: AnalyseConfig) -> None:
    if not list(config.results.glob("*.jsonl")):
        raise UserError(f"no results in {config.results}; python -m runs.study.train writes some")
    if not (config.write or config.check):
        for name, tables in TABLES.items():
            if filled := [table for table in tables(config.results) if table.rows]:
                print(f"\n{name}\n", *(f"\n{table.markdown()}" for table in filled), sep="\n")
        return
    builders = {name: partial(tables, config.results) for name, tables in TABLES.items()}
    pages.write(builders, PAGES, "python -m runs.study.analyse --write", config.check, mark="study")
    if not config.check:
        draw(config.results, RESULTS / "pictures")


if __name__ == "__main__":
    run(main, AnalyseConfig)
