"""The file of the results, as tables and the picture read it."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from trainkit_gka.results import read_results

FUSED, SOFTMAX, MEAN = "exact, fused", "softmax, fused", "mean"
EXACT, BEST, WINDOW = "exact", "window + Nyström", "window"
APPROXIMATE = (BEST, WINDOW)  # what is trained beside the exact operator


@dataclass(frozen=True)
class Approximations:
    """Errors by source, tokens, form and size, a record for each seed; the newest times by causality and tokens."""

    records: list[dict]

    @classmethod
    def read(cls, path: Path) -> "Approximations":
        return cls(read_results(path))

    def errors(self, source: str, tokens: int, form: str, size: int) -> list[dict]:
        """The metrics of every seed."""
        wanted = dict(part="error", source=source, tokens=tokens, form=form, size=size)
        return [record["metrics"] for record in self.records if wanted.items() <= record["config"].items()]

    def error(self, source: str, tokens: int, form: str, size: int) -> float | None:
        """The median over heads, mean over seeds; None if nobody measured it."""
        measured = self.errors(source, tokens, form, size)
        return mean(metrics["error"] for metrics in measured) if measured else None

    def values(self, part: str, name: str) -> list:
        """What a field of the configuration of a part is, in the order of the file."""
        return list(dict.fromkeys(r["config"][name] for r in self.records if r["config"]["part"] == part))

    def is_causal(self, source: str) -> bool:
        """Whether a source has a causal mask, as its rows say."""
        return any(r["metrics"].get("causal") for r in self.records if r["config"].get("source") == source)

    def times(self, tokens: int, causal: bool) -> dict[tuple[str, int], dict]:
        """The metrics of time by form and size, each with `over_fused`, taken in its own process; NaN without one."""
        wanted = dict(part="time", tokens=tokens, causal=causal)
        chosen = [r for r in self.records if wanted.items() <= r["config"].items() and r["metrics"]["median_ms"]]
        exact = {r["metrics"]["group"]: r["metrics"]["median_ms"] for r in chosen if r["config"]["form"] == FUSED}
        return {
            (r["config"]["form"], r["config"]["size"]): {
                **r["metrics"],
                "over_fused": r["metrics"]["median_ms"] / exact.get(r["metrics"]["group"], math.nan),
            }
            for r in chosen
        }
