"""What question 6 compares, and in which order it is trained."""

import math
from collections.abc import Callable

from runs.study.rates import Done, best_rate, tried_rates
from runs.study.vision.cells import VisionCell

# The patch itself, left, up and diagonal; then the four neighbours. The models have four heads.
NLUD, LRUB = dict(spatial_offsets="NLUD"), dict(spatial_offsets="LRUB")
FAMILIES = {
    "softmax": dict(attention="softmax"),
    "GKA": dict(attention="gka"),
    "VLT": dict(attention="vlt"),
    "softmax + NLUD": dict(attention="softmax", **NLUD),
    "GKA + NLUD": dict(attention="gka", **NLUD),
    "softmax + LRUB": dict(attention="softmax", **LRUB),
    "GKA + LRUB": dict(attention="gka", **LRUB),
    "GGGA": dict(attention="GGGA"),
}
# Four layers have no place for one softmax layer in six.
DEEPER = {"GGGGGA": dict(attention="GGGGGA")}
SEEDS = (0, 1, 2, 3, 4)


class VisionDone(Done):
    """Errors, in percent, and losses of finished cells."""

    rates = (0.5, 1.0, 2.0)

    def first_cell(self, family: dict, rate: float) -> VisionCell:
        return VisionCell(**family, rate=rate)


def families_of(depth: int) -> dict[str, dict]:
    """Those that differ from each other in models of that many layers."""
    return FAMILIES | (DEEPER if depth >= 6 else {})


def groups(families: dict[str, dict]) -> dict[str, Callable[[Done], list[VisionCell]]]:
    """The groups of cells, as runs/study/grid.py has them for text."""

    def rates(done: Done) -> list[VisionCell]:
        """Which learning rate is best for each family?"""
        cells = [VisionCell(**f, rate=rate) for f in families.values() for rate in tried_rates(f, done)]
        return sorted(cells, key=lambda cell: abs(math.log2(cell.rate / done.rates[1])))

    def seeds(done: Done) -> list[VisionCell]:
        """How do the families differ over five seeds, each at its best rate?"""
        known = [(family, best_rate(family, done)) for family in families.values()]
        return [VisionCell(**f, rate=rate, seed=seed) for seed in SEEDS for f, rate in known if rate is not None]

    return {"rates": rates, "seeds": seeds}
