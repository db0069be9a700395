"""What question 6 compares, and in which order it is trained."""

import math
from collections.abc import Callable
from typing import ClassVar

from runs.study.rates import Done, best_rate, tried_rates
from runs.study.vision.cells import Setting, VisionCell

# The patch itself, left, up and diagonal; then the four neighbours. The models have four heads.
NLUD, LRUB = dict(spatial_offsets="NLUD"), dict(spatial_offsets="LRUB")
KINDS = {"softmax": dict(attention="softmax"), "GKA": dict(attention="gka"), "VLT": dict(attention="vlt")}
FAMILIES = {
    **KINDS,
    "softmax + NLUD": dict(attention="softmax", **NLUD),
    "GKA + NLUD": dict(attention="gka", **NLUD),
    "softmax + LRUB": dict(attention="softmax", **LRUB),
    "GKA + LRUB": dict(attention="gka", **LRUB),
    "GGGA": dict(attention="GGGA"),
}
# Four layers have no place for one softmax layer in six.
DEEPER = {"GGGGGA": dict(attention="GGGGGA")}
# The norm's weight scales what GKA's distances see of every channel; channel bandwidths give that back, nothing else.
BARE_NORM = {
    "GKA, norm without weight": dict(attention="gka", norm_weight=False),
    "GKA, norm without weight, channel bandwidths": dict(attention="gka", norm_weight=False, channel_bandwidths=True),
}
# Of a setting that tunes rates apart: LRUB is GKA's best on the digits and on the photographs.
TUNED_APART = {**KINDS, **{name: FAMILIES[name] for name in ("GKA + LRUB", "softmax + LRUB")}}
TUNED_APART_LATER = {"GGGA": FAMILIES["GGGA"], **BARE_NORM}


class VisionDone(Done):
    """Errors, in percent, and losses of finished cells."""

    rates = (0.5, 1.0, 2.0)
    tuned_apart: ClassVar[bool] = False

    def first_cell(self, family: dict, rate: float) -> VisionCell:
        return VisionCell(**family, rate=rate, tuning=self.tuned_apart)


class TunedApartDone(VisionDone):
    """The same where runs of their own choose the rates."""

    tuned_apart = True


def done_of(setting: Setting) -> type[VisionDone]:
    """What keeps the scores of that setting's cells."""
    return TunedApartDone if setting.tuning_epochs else VisionDone


def families_of(setting: Setting) -> dict[str, dict]:
    """Those that are compared there, and differ from each other in models of that many layers."""
    return first_families(setting) | later_families(setting)


def first_families(setting: Setting) -> dict[str, dict]:
    """Those that have all their seeds before the others begin."""
    if setting.tuning_epochs:
        return TUNED_APART
    return FAMILIES | (DEEPER if setting.depth >= 6 else {})


def later_families(setting: Setting) -> dict[str, dict]:
    return TUNED_APART_LATER if setting.tuning_epochs else BARE_NORM


def rate_family(family: dict, done: VisionDone) -> dict:
    """The family whose rate this one takes: itself, but where rates are tuned apart, its kind; hybrids take GKA's."""
    if not done.tuned_apart:
        return family
    return next((kind for kind in KINDS.values() if kind["attention"] == family["attention"]), KINDS["GKA"])


def chosen_rate(family: dict, done: VisionDone) -> float | None:
    """The rate that the family is compared at; None until it is known."""
    return best_rate(rate_family(family, done), done)


def groups(setting: Setting) -> dict[str, Callable[[VisionDone], list[VisionCell]]]:
    """The groups of cells, as runs/study/grid.py has them for text."""

    def rates(done: VisionDone) -> list[VisionCell]:
        """Which learning rate is best for each family, or for each kind of attention where rates are tuned apart?"""
        tuned = [family for family in families_of(setting).values() if rate_family(family, done) == family]
        cells = [done.first_cell(family, rate) for family in tuned for rate in tried_rates(family, done)]
        return sorted(cells, key=lambda cell: abs(math.log2(cell.rate / done.rates[1])))

    def over_seeds(done: VisionDone) -> list[VisionCell]:
        """How do the families differ over the seeds, each at its rate?"""
        return at_chosen_rates(first_families(setting), done)

    def later_seeds(done: VisionDone) -> list[VisionCell]:
        """The same for families that only come when the others are done."""
        return at_chosen_rates(later_families(setting), done)

    def at_chosen_rates(families: dict[str, dict], done: VisionDone) -> list[VisionCell]:
        known = [(family, rate) for family in families.values() if (rate := chosen_rate(family, done)) is not None]
        return [VisionCell(**f, rate=rate, seed=seed) for seed in range(setting.seeds) for f, rate in known]

    return {"rates": rates, "seeds": over_seeds, "later-seeds": later_seeds}
