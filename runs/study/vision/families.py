"""What question 7 compares, and in which order it is trained."""

import math
from collections.abc import Callable
from typing import ClassVar

from runs.study.rates import Done, best_rate, tried_rates
from runs.study.vision.trials import Setting, VisionTrial

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
# Softmax for the time of GKA's eight epochs, by what a thread trained alone: 570 and 740 images/s.
SHORTER_SOFTMAX = "softmax, 6 epochs"
FEWER_EPOCHS = {SHORTER_SOFTMAX: dict(attention="softmax", epochs=6)}
# Of a setting that tunes rates apart: LRUB is GKA's best on the digits and on the photographs.
TUNED_APART = {**KINDS, **{name: FAMILIES[name] for name in ("GKA + LRUB", "softmax + LRUB")}, **FEWER_EPOCHS}
TUNED_APART_LATER = {"GGGA": FAMILIES["GGGA"], **BARE_NORM}


class VisionDone(Done):
    """Errors, in percent, and losses of finished trials."""

    rates = (0.5, 1.0, 2.0)
    tuned_apart: ClassVar[bool] = False

    def first_trial(self, family: dict, rate: float) -> VisionTrial:
        return VisionTrial(**family, rate=rate, tuning=self.tuned_apart)


class TunedApartDone(VisionDone):
    """The same where runs of their own choose the rates."""

    tuned_apart = True


def done_of(setting: Setting) -> type[VisionDone]:
    """What keeps the scores of that setting's trials."""
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


def planned(setting: Setting) -> int:
    """How many trainings a comparison of all families takes, if no best rate lies at an end of those first tried."""
    done, first, later = done_of(setting)(), first_families(setting), later_families(setting)
    families = [*first.values(), *later.values()]
    tuned = sum(rate_family(family, done) == family for family in families)
    compared = len(first) * setting.seeds + len(later) * setting.later_seeds
    if not done.tuned_apart:
        compared -= len(families)  # seed 0 at the best rate is one of the tuned
    return tuned * len(done.rates) + compared


def rate_family(family: dict, done: VisionDone) -> dict:
    """The family whose rate this one takes: itself, but where rates are tuned apart, its kind; hybrids take GKA's."""
    if not done.tuned_apart:
        return family
    return next((kind for kind in KINDS.values() if kind["attention"] == family["attention"]), KINDS["GKA"])


def chosen_rate(family: dict, done: VisionDone) -> float | None:
    """The rate that the family is compared at; None until it is known."""
    return best_rate(rate_family(family, done), done)


def groups(setting: Setting) -> dict[str, Callable[[VisionDone], list[VisionTrial]]]:
    """The groups of trials, as runs/study/grid.py has them for text."""

    def rates(done: VisionDone) -> list[VisionTrial]:
        """Which learning rate is best for each family, or for each kind of attention where rates are tuned apart?"""
        tuned = [family for family in families_of(setting).values() if rate_family(family, done) == family]
        trials = [done.first_trial(family, rate) for family in tuned for rate in tried_rates(family, done)]
        return sorted(trials, key=lambda trial: abs(math.log2(trial.rate / done.rates[1])))

    def over_seeds(done: VisionDone) -> list[VisionTrial]:
        """How do the families differ over the seeds, each at its rate?"""
        return at_chosen_rates(first_families(setting), setting.seeds, done)

    def later_seeds(done: VisionDone) -> list[VisionTrial]:
        """The same for families that only come when the others are done."""
        return at_chosen_rates(later_families(setting), setting.later_seeds, done)

    def at_chosen_rates(families: dict[str, dict], seeds: int, done: VisionDone) -> list[VisionTrial]:
        known = [(family, rate) for family in families.values() if (rate := chosen_rate(family, done)) is not None]
        return [VisionTrial(**f, rate=rate, seed=seed) for seed in range(seeds) for f, rate in known]

    return {"rates": rates, "seeds": over_seeds, "later-seeds": later_seeds}
