"""The study's tables, one or two for each of its questions; what is not trained yet is called not run."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from nanochat_gka.accounting import AccountingConfig, account
from runs.sections.sources import RESULTS, measured, table
from runs.study.families import ALL, FAMILIES, FURTHER, HYBRIDS, KERNELS, PATTERNS, RATE_OF, REPAIRS, Family, fits_depth
from runs.study.grid import DEEPER, LONGER, REPEATED, SCALED, longer_families, scaled_places
from runs.study.rates import DEEPEST, SMALLEST
from runs.study.scores import Place, Result, Scores
from runs.study.statistics import UNIT, Interval, Scaling, SeedNoise, crossing, scaling

NOT_RUN = "not run"
TOO_FEW = "too few points"
ROWS = RESULTS / "study"
BEST = {
    "GKA": "GKA, the paper's form",
    "GKA + offsets": "GKA + offsets, values not rotated: the preset",
    "GKA + offsets + half VE": "the same + value embeddings in half of the layers, as softmax has",
    "GKA + offsets + VE": "the same + value embeddings in every layer",
    "softmax": "softmax (nanochat)",
    "softmax + offsets": "softmax + offsets",
}
PROVISIONAL = "Rates marked * are provisional: not every rate that must be tried has been."


def families(folder: Path = ROWS) -> str:
    """Question 3, at the smallest size: every family at its best rate, and its difference from nanochat's softmax."""
    return of_every_text(folder, lambda scores: _comparison(scores, {**FAMILIES, **FURTHER}, SMALLEST, "softmax"))


def deeper(folder: Path = ROWS) -> str:
    """Questions 2 to 4 at four layers: families, hybrids, repairs and kernels, as far as they are trained."""

    def one(scores: Scores) -> str:
        chosen = {**FAMILIES, **HYBRIDS, **REPAIRS, **KERNELS}
        trained = {name: family for name, family in chosen.items() if scores.at(family, DEEPER)}
        return _comparison(scores, trained, DEEPER, "softmax") if trained else f"{NOT_RUN}\n"

    return of_every_text(folder, one)


def largest(folder: Path = ROWS) -> str:
    """Question 3 at the largest size: what has several seeds there, each at the rate that is best there."""
    families = {name: ALL[name] for name in REPEATED}
    return of_every_text(folder, lambda scores: _comparison(scores, families, DEEPEST, "softmax"))


def best(folder: Path = ROWS) -> str:
    """Why `make pretrain-d20-best` has its form: the smallest size, and what it would have at depth 20."""
    return of_every_text(folder, _best)


def longer(folder: Path = ROWS) -> str:
    """Question 1: bits per byte and sigma^2 of the paper's form as training gets longer."""
    return of_every_text(folder, lambda scores: _by_budget(scores, longer_families()))


def repairs(folder: Path = ROWS) -> str:
    """Question 2: what repairs GKA, and what the same does for softmax."""
    unrepaired = {"GKA unrotated": "GKA unrotated", "softmax": "softmax"}
    names = ["GKA unrotated", "GKA + offsets", "softmax", "softmax + offsets", *REPAIRS]
    own = {name: unrepaired["GKA unrotated" if name.startswith("GKA") else "softmax"] for name in names}
    chosen = {name: ALL[name] for name in sorted(names, key=lambda name: own[name])}
    return of_every_text(folder, lambda scores: _comparison(scores, chosen, SMALLEST, own))


def further_offsets(folder: Path = ROWS) -> str:
    """Question 2: offsets of several tokens, and others in other layers, over those of one token in all layers."""
    own = {name: RATE_OF[name] for name in PATTERNS}
    own = {**{name: name for name in dict.fromkeys(own.values())}, **own}
    chosen = {name: ALL[name] for name in own}
    return of_every_text(folder, lambda scores: _comparison(scores, chosen, DEEPER, own))


def kernels(folder: Path = ROWS) -> str:
    """Question 4: GKA + offsets with something else in the place of its kernel."""
    names = ("GKA + offsets", "softmax + offsets", "VLT + offsets", "GKA unrotated", *KERNELS)
    chosen = {name: ALL[name] for name in names}
    return of_every_text(folder, lambda scores: _comparison(scores, chosen, SMALLEST, "GKA + offsets"))


def sizes(folder: Path = ROWS) -> str:
    """Question 3: bits per byte of every family at every size and budget."""
    return of_every_text(folder, _sizes)


def fits(folder: Path = ROWS) -> str:
    """Question 3: L(C) = a + b (C / UNIT)^-c of every family's frontier, and where it crosses softmax's."""
    return of_every_text(folder, _fits)


def of_every_text(folder: Path, one: Callable[[Scores], str]) -> str:
    """A table for each file of results, under its name, with when and where it was measured."""
    parts = []
    for path in sorted(folder.glob("*.jsonl")):
        scores = Scores.read(path)
        if scores.done:
            shown = one(scores)
            parts.append(f"{path.stem}:\n\n{shown}\n{measured(scores.used or scores.rows, f'study/{path.name}')}")
    return "\n\n".join(parts) or NOT_RUN


def _comparison(scores: Scores, families: dict[str, Family], place: Place, baseline: str | dict[str, str]) -> str:
    """Families at one place, and the difference of each from its baseline: one for all, or each one's own."""
    baselines = dict.fromkeys(families, baseline) if isinstance(baseline, str) else baseline
    results = {name: scores.at(family, place) for name, family in families.items()}
    own = {name: scores.at(ALL[name], place) for name in set(baselines.values())}
    rows = []
    for name, result in results.items():
        other = own[baselines[name]]
        compared = result.over(other) if result and other and baselines[name] != name else None
        counts = [f"{result['parameters']:,}", f"{result['flops_per_token']:,}"] if result else ["", ""]
        rows.append([name, loss_of(result), rate_of(result), seeds_of(result), difference_of(compared), *counts])
    of = " and ".join(dict.fromkeys(baselines.values()))
    headings = ["", "validation bits per byte", "rate", "seeds", f"over {of}", "parameters", "FLOPs/token"]
    return table(headings, rows) + _note(results.values())


def _best(scores: Scores) -> str:
    rows = []
    for name, label in BEST.items():
        result = scores.at(ALL[name], SMALLEST)
        deep = account(AccountingConfig(depth=20, **ALL[name]))["parameters"]
        own = [loss_of(result), seeds_of(result), f"{result['parameters']:,}" if result else ""]
        rows.append([label, *own, f"{deep:,}"])
    tokens = f"{SMALLEST['tokens']:,} tokens"
    return table(["", f"validation bits per byte, {tokens}", "seeds", "parameters", "parameters at depth 20"], rows)


def _by_budget(scores: Scores, families: dict[str, Family]) -> str:
    """Families down, budgets across: bits per byte, and the median sigma^2 of all heads."""
    rows = []
    for name, family in families.items():
        results = [scores.at(family, place) for place in LONGER]
        sigmas = [result and result.sigma_squared for result in results]
        cells = [loss_of(result) + (f"; σ² {s:.3g}" if s else "") for result, s in zip(results, sigmas)]
        rows.append([name, *cells])
    return table(["", *(f"{place['tokens']:,} tokens" for place in LONGER)], rows)


def _sizes(scores: Scores) -> str:
    """Families down, depths and budgets across."""
    rows = []
    for name in SCALED:
        losses = [loss_of(scores.at(ALL[name], place)) for place in scaled_places()]
        possible = [fits_depth(ALL[name], place["depth"]) for place in scaled_places()]
        rows.append([name, *(loss if has_form else "" for loss, has_form in zip(losses, possible))])
    repeated = [list(result.losses.values()) for name in REPEATED for result in finished(scores, name, scaled_places())]
    noise = SeedNoise.pooled(repeated)
    places = sum(len(losses) > 1 for losses in repeated)
    said = f"\n\nStandard deviation over seeds, pooled over {places} cells: {noise.deviation:.4f}." if noise else ""
    return table(["", *map(place_of, scaled_places())], rows) + said


def finished(scores: Scores, name: str, places: Iterable[Place]) -> list[Result]:
    """What is finished of a family at some places."""
    return [result for place in places if (result := scores.at(ALL[name], place))]


def scalings(scores: Scores) -> dict[str, Scaling | None]:
    """The fit of every family that `sizes` trains; None where there are too few points."""
    own = {name: points(scores, ALL[name]) for name in SCALED}
    of_all = SeedNoise.pooled(losses for places in own.values() for _, losses in places.values())
    return {name: scaling(places, of_all) for name, places in own.items()}


def points(scores: Scores, family: Family) -> dict[str, tuple[float, list[float]]]:
    """Training FLOPs and losses of the places of `sizes` that are finished."""
    results = {str(place): scores.at(family, place) for place in scaled_places()}
    return {place: (result["train_flops"], list(result.losses.values())) for place, result in results.items() if result}


def _fits(scores: Scores) -> str:
    fitted, rows = scalings(scores), []
    for name, own in fitted.items():
        done = len(points(scores, ALL[name]))
        places = sum(fits_depth(ALL[name], place["depth"]) for place in scaled_places())
        if own is None:
            rows.append([name, f"{done} of {places}", *[NOT_RUN if done < places else TOO_FEW] * 6])
            continue
        baseline = fitted["softmax"]
        cells = [interval_of(own.interval(part)) for part in "abc"]
        crossing_there = "" if name == "softmax" else _crossing_of(own, baseline)
        rows.append([name, str(done), str(own.points), *cells, f"{own.miss:.3f}", crossing_there])
    headings = [
        "",
        "finished sizes and budgets",
        "fitted",
        "a",
        f"b at {UNIT:g} FLOPs",
        "c",
        "largest miss",
        "crosses softmax at FLOPs (share of draws)",
    ]
    return table(headings, rows)


def _crossing_of(own: Scaling, baseline: Scaling | None) -> str:
    if baseline is None:
        return NOT_RUN
    where, share = crossing(own, baseline)
    shares = "" if math.isnan(share) else f" ({share:.0%})"
    return ("nowhere in reach" if where is None else interval_of(where, ".2e")) + shares


# Cells


def place_of(place: Place) -> str:
    """A depth and a budget, as a heading."""
    return f"depth {place['depth']}, 2^{place['tokens'].bit_length() - 1}"


def loss_of(result: Result | None) -> str:
    """The mean over seeds, and their standard deviation."""
    if result is None:
        return NOT_RUN
    return f"{result.mean:.4f}" + ("" if math.isnan(result.spread) else f" ± {result.spread:.4f}")


def rate_of(result: Result | None) -> str:
    return "" if result is None else f"{result.rate:g}" + ("" if result.settled else "*")


def seeds_of(result: Result | None) -> str:
    return "" if result is None else str(len(result.runs))


def difference_of(difference: Interval | None, form: str = "+.4f") -> str:
    return "" if difference is None else interval_of(difference, form)


def interval_of(interval: Interval, form: str = ".3g") -> str:
    """The value, and in brackets what holds 95 %."""
    if math.isnan(interval.low):
        return f"{interval.value:{form}}"
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _note(results: Iterable[Result | None]) -> str:
    return f"\n\n{PROVISIONAL}" if any(result and not result.settled for result in results) else ""


TABLES: dict[str, Callable[..., str]] = {"study-families": families, "study-longer": longer, "study-sizes": sizes}
TABLES |= {"study-fits": fits, "study-deeper": deeper, "study-largest": largest}
TABLES |= {
    "study-repairs": repairs,
    "study-further-offsets": further_offsets,
    "study-kernels": kernels,
    "study-best": best,
}
