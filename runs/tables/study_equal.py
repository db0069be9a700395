"""The study's tables of differences with intervals over seeds: at every size and budget, and at equal FLOPs, time and
parameters.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from runs.study.families import ALL, PRESET, RIVAL
from runs.study.grid import BUDGETS, CONTENDERS, CONTROL, HALF, LONGEST, REPEATED, SCALED, scaled_places
from runs.study.rates import SMALLEST
from runs.study.scores import Place, Result, Scores
from runs.study.speed import Speeds, speeds_of
from runs.study.statistics import Interval, common_seeds, interpolated, paired_difference
from runs.table import Table
from runs.tables.study import ROWS, difference_of, of_every_text, over, place_of

BASELINES = ("softmax", CONTROL)
COMPARED = ("GKA", "GKA + offsets", HALF, "GGGA + offsets", *CONTENDERS)
WAYS = ("equal tokens", "equal FLOPs", "equal time")
Ways = tuple[Interval | None, Interval | None, Interval | None]
ITSELF: Ways = (Interval(0.0, math.nan, math.nan),) * 3  # of a form over itself
OFFSETS, SOFTMAX_OFFSETS = "--head-offsets PS --gka-values normalised", "--head-offsets PS --offset-layers all"
HYBRID = "--attention GGGA --offset-layers all"
LEARNED = "--channel-bandwidths --head-gates"


def _command(target: str, flags: str = "") -> str:
    return f'`make {target} ARGS="{flags}"`' if flags else f"`make {target}`"


# What trains a form at depth 20, on the front page.
AT_DEPTH_20 = {
    "softmax": _command("pretrain-d20-base"),
    CONTROL: _command("pretrain-d20-base", SOFTMAX_OFFSETS),
    "GKA": _command("pretrain-d20"),
    "GKA + offsets": _command("pretrain-d20", OFFSETS),
    HALF: _command("pretrain-d20", f"{OFFSETS} --value-embeds all"),
    "GGGA + offsets": _command("pretrain-d20", f"{OFFSETS} {HYBRID}"),
    "GKA + offsets + half VE + channels + gates": _command("pretrain-d20-best"),
    "GKA + offsets + half VE + channels": _command("pretrain-d20-best", "--no-head-gates"),
    "softmax + offsets + channels + gates": _command(
        "pretrain-d20-base", f"{SOFTMAX_OFFSETS} {LEARNED} --gate-lr 0.005"
    ),
    "GGGA + offsets + channels + gates": _command("pretrain-d20", f"{OFFSETS} {HYBRID} {LEARNED}"),
}
MEASURES = ("flops_per_token", "parameters")
COMMON = SMALLEST["tokens"]  # the budget in which most families have seeds at every depth


# When to take a form, on the front page.
WHEN = {
    "softmax": "the paper's baseline",
    CONTROL: "softmax, with what costs it nothing",
    "GKA": "to reproduce the paper",
    "GKA + offsets": "fewest parameters",
    "GGGA + offsets": "a hybrid: three GKA layers, then one of softmax",
    PRESET: "**the preset**, recommended on a CPU",
    RIVAL: "softmax with all that the preset has",
}


def of_the_page(one: Callable[[Scores], Table]) -> Callable[..., list[Table]]:
    """A table of the study's text for the front page: its dates and commits are on the study's own page."""
    return lambda folder=ROWS: [replace(table, title="", sources=[]) for table in of_every_text(one)(folder)]


def common_places() -> list[Place]:
    """Every depth, with the budget that all have."""
    return [place for place in scaled_places() if place["tokens"] == COMMON]


def other_places() -> list[Place]:
    """Every depth, with its other budgets; with the common one too where a shorter training can be compared with it."""
    return [place for place in scaled_places() if place["tokens"] != COMMON or min(BUDGETS[place["depth"]]) < COMMON]


@of_every_text
def differences(scores: Scores) -> Table:
    """Questions 1 to 3: repeated families over both baselines, at every depth, with the budget that all have."""
    rows = []
    for name, baseline in _comparisons(*REPEATED):
        pairs = [(scores.at(ALL[name], place), scores.at(ALL[baseline], place)) for place in common_places()]
        cells = [over(own, other) for own, other in pairs]
        if any(own and other for own, other in pairs):
            rows.append([name, baseline, *cells, " / ".join(_seeds_of(own, other) for own, other in pairs)])
    headings = [f"depth {place['depth']}" for place in common_places()]
    return Table.of(["", "over", *headings, "seeds"], rows, words=2)


@of_every_text
def longer(scores: Scores) -> Table:
    """The same with other budgets; at equal FLOPs or time the baseline's loss is interpolated between its budgets."""
    speeds = speeds_of(scores.folder)
    rows = []
    for name, baseline in [*_comparisons(*REPEATED, HALF, PRESET), (PRESET, RIVAL)]:
        for place in other_places():
            own, other = scores.at(ALL[name], place), scores.at(ALL[baseline], place)
            if own and other:
                ways = three_ways(scores, speeds, name, baseline, place)
                rows.append([name, baseline, place_of(place), *map(_signed, ways), _seeds_of(own, other)])
    headings = ["", "over", "layers and tokens", *WAYS, "seeds"]
    return Table.of(headings, rows, words=3)


@of_every_text
def longest(scores: Scores) -> Table:
    """The longest trainings of four layers over softmax with offsets, with what they cost in its shares."""
    rows = [[name, *map(_signed, ways), *map(_times, shares), seeds] for name, ways, shares, seeds in _longest(scores)]
    return Table.of([place_of(LONGEST), *WAYS, "parameters", "FLOPs", "time of a step", "seeds"], rows)


@of_the_page
def forms(scores: Scores) -> Table:
    """The same for the front page, of forms with several seeds, and when to take each."""
    rows = [
        [name, WHEN[name], _signed(ways[0]), _signed(ways[2]), _times(shares[0]), _times(shares[2])]
        for name, ways, shares, _ in _longest(scores)
        if name in WHEN
    ]
    return Table.of(["form", "when", WAYS[0], WAYS[2], "parameters", "time of a step"], rows, words=2)


@of_the_page
def preset(scores: Scores) -> Table:
    """The preset's loss over that of softmax, with ever more of what the preset has."""
    speeds = speeds_of(scores.folder)
    rows = [
        [name, *(_signed(three_ways(scores, speeds, PRESET, name, LONGEST)[way]) for way in (0, 2))]
        for name in (*BASELINES, RIVAL)
    ]
    return Table.of(["the preset over", WAYS[0], WAYS[2]], rows)


@of_the_page
def counts(scores: Scores) -> Table:
    """How often the preset is ahead, level or behind at equal tokens and at equal time, where it has several seeds."""
    speeds, rows = speeds_of(scores.folder), []
    for name in (CONTROL, RIVAL):
        differences = [three_ways(scores, speeds, PRESET, name, place) for place in scaled_places()]
        for way, words in ((0, WAYS[0]), (2, WAYS[2])):
            known = [ways[way] for ways in differences if ways[way] and not math.isnan(ways[way].low)]
            ahead, behind = sum(one.high < 0 for one in known), sum(one.low > 0 for one in known)
            rows.append([name, words, *map(str, (ahead, len(known) - ahead - behind, behind))])
    return Table.of(["the preset over", "at", "ahead", "level", "behind"], rows, words=2)


def commands(folder: Path = ROWS) -> list[Table]:
    """What trains each form at the paper's depth."""
    return [Table.of(["form", "what trains it"], [list(row) for row in AT_DEPTH_20.items()], words=2)]


def _longest(scores: Scores) -> list[tuple[str, Ways, list[float], str]]:
    """For every form after the longest training its name, its differences from softmax with offsets, its parts of that
    one's parameters, FLOPs and time of a step, and how many seeds both have.
    """
    speeds, found = speeds_of(scores.folder), []
    control, of_depth = scores.at(ALL[CONTROL], LONGEST), speeds.get(LONGEST["depth"], {})
    for name in ("softmax", CONTROL, *COMPARED):
        own = scores.at(ALL[name], LONGEST)
        if own and control:
            shares = [own[measure] / control[measure] for measure in ("parameters", "flops_per_token")]
            shares.append(of_depth.get(CONTROL, math.nan) / of_depth.get(name, math.nan))
            ways = three_ways(scores, speeds, name, CONTROL, LONGEST) if name != CONTROL else ITSELF
            found.append((name, ways, shares, _seeds_of(own, control)))
    return found


def _times(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.2f}x"


def _signed(difference: Interval | None) -> str:
    return difference_of(difference, "+.3f")


def three_ways(scores: Scores, speeds: Speeds, name: str, baseline: str, place: Place) -> Ways:
    """A family over a baseline at equal tokens, FLOPs and time; None until both are finished at the place."""
    own, other = scores.at(ALL[name], place), scores.at(ALL[baseline], place)
    if own is None or other is None:
        return None, None, None

    def tokens_per_second(name: str, depth: int) -> float:
        return speeds.get(depth, {}).get(name, math.nan)

    seconds = place["tokens"] / tokens_per_second(name, place["depth"])
    by_flops, by_time = [], []
    for depth in BUDGETS:
        curve = scores.finished(baseline, [place for place in scaled_places() if place["depth"] == depth])
        by_flops.append(([result["train_flops"] for result in curve], curve))
        by_time.append(([result["train_tokens"] / tokens_per_second(baseline, depth) for result in curve], curve))
    at_flops, at_time = _over_the_best(own, own["train_flops"], by_flops), _over_the_best(own, seconds, by_time)
    return own.over(other), at_flops, at_time


def _over_the_best(own: Result, size: float, curves: list[tuple[list[float], list[Result]]]) -> Interval | None:
    """own minus the best that the baseline reaches for `size` or less, of all depths; None if all of them cost more.

    curves: of every depth what each budget costs, and its result. Between budgets the baseline's loss is on the
    parabola through them, in the logarithm of the cost: a chord would lie above its curve.
    """
    differences = []
    for sizes, curve in curves:
        if sizes and min(sizes) <= size:
            losses = interpolated(sizes, [result.losses for result in curve], min(size, max(sizes)), degree=2)
            differences.append(paired_difference(own.losses, losses))
    return max(filter(None, differences), key=lambda difference: difference.value, default=None)


def _comparisons(*names: str) -> list[tuple[str, str]]:
    """Every family over every baseline that comes before it."""
    return [
        (name, baseline)
        for number, baseline in enumerate(BASELINES)
        for name in names
        if name not in BASELINES[: number + 1]
    ]


def _seeds_of(own: Result | None, other: Result | None) -> str:
    """How many seeds both have."""
    return str(len(common_seeds([own.losses, other.losses]))) if own and other else "0"


@of_every_text
def equal(scores: Scores) -> Table:
    """Question 3: differences at the budget that all have, with the baseline's loss interpolated between its depths."""
    places, rows = common_places(), []
    for baseline in BASELINES:
        curve = scores.finished(baseline, places)
        for name in SCALED:
            if name.startswith("softmax") or len(curve) < 2:
                continue
            for place in places[1:]:  # the smallest GKA is smaller than any softmax
                own, other = scores.at(ALL[name], place), scores.at(ALL[baseline], place)
                if own and other:
                    cells = [
                        difference_of(own.over(other), "+.3f"),
                        *(_over_curve(own, curve, each) for each in MEASURES),
                    ]
                    rows.append([name, baseline, str(place["depth"]), *cells])
    headings = ["", "over", "depth", "equal tokens", "equal FLOPs", "equal parameters"]
    return Table.of(headings, rows, words=2)


def _over_curve(own: Result, curve: list[Result], measure: str) -> str:
    """own minus the baseline where it has as much of the measure, seed by seed; nothing beyond the baseline's sizes."""
    sizes = [result[measure] for result in curve]
    if not min(sizes) <= own[measure] <= max(sizes):
        return ""
    losses = interpolated(sizes, [result.losses for result in curve], own[measure], degree=1)
    return difference_of(paired_difference(own.losses, losses), "+.3f")


TABLES = {
    "preset": preset,
    "study-counts": counts,
    "commands": commands,
    "study-differences": differences,
    "study-differences-longer": longer,
    "study-longest": longest,
    "forms": forms,
    "study-equal": equal,
}
