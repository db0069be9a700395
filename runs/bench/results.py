"""The benchmarks' result files: a line for every candidate, written case by case, and the comparisons they make up again.

A comparison is what was timed in turns in one process. Ratios are taken inside one, never across two; files, and so tables, never mix hardware.
"""

import re
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from runs.bench.timing import BenchConfig, Measurement
from trainkit.progress import console
from trainkit.results import append_result, describe_hardware, read_results

RESULTS = Path(__file__).resolve().parents[1] / "results"


def slug(hardware: str) -> str:
    """The hardware's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", hardware.lower())).strip("-")


def result_file(results: Path, what: str, hardware: str) -> Path:
    """One file for each benchmark and hardware (its name or its slug)."""
    return Path(results) / f"bench_{what}_{slug(hardware)}.jsonl"


class Recorder:
    """Appends the lines of a comparison and prints them."""

    def __init__(self, config: BenchConfig, what: str, device: torch.device):
        self.what, self.device, self.quick = what, device, config.quick
        self.path = result_file(config.results, what, describe_hardware(device))

    def record(self, case: str, phase: str, measured: dict[str, Measurement], roles: dict[str, str], settings: dict[str, Any],
               extra: Callable[[str, Measurement], dict[str, Any]] = lambda name, measurement: {}) -> None:  # fmt: skip
        """roles: by candidate. settings: what was run, the same for all of them. extra: further metrics of a candidate."""
        group = uuid.uuid4().hex[:12]
        for name, measurement in measured.items():
            config = {
                "case": case,
                "phase": phase,
                "candidate": name,
                "role": roles[name],
                "group": group,
                "quick": self.quick,
                **settings,
            }
            append_result(
                self.path,
                f"bench_{self.what}",
                config,
                {**asdict(measurement), **extra(name, measurement)},
                self.device,
            )
            console.print(f"{case} {phase:<16} {name:<26} {_told(measurement)}", highlight=False, markup=False)


def _told(measurement: Measurement) -> str:
    if measurement.status != "ok":
        return f"{measurement.status}: {measurement.reason}"
    memory = "" if measurement.peak_mib is None else f", {measurement.peak_mib:,.0f} MiB"
    note = f"; {measurement.note}" if measurement.note else ""
    return (f"{measurement.median_ms:10.4g} ms ({measurement.low_ms:.4g} to {measurement.high_ms:.4g} in {measurement.samples} samples), "
            f"first call {measurement.first_ms / 1e3:.2f} s{memory}{note}")  # fmt: skip


@dataclass
class Comparison:
    """The lines of one comparison."""

    case: str
    phase: str
    lines: list[dict] = field(default_factory=list)

    def fastest(self, *roles: str) -> dict | None:
        """The quickest line among these roles that was right; None if there is none."""
        timed = [line for line in self.lines if line["config"]["role"] in roles and line["metrics"]["status"] == "ok"]
        return min(timed, key=lambda line: line["metrics"]["median_ms"], default=None)

    def ratio(self, role: str = "baseline", metric: str = "median_ms") -> float | None:
        """The FASTEST line of `role` over ours: above 1, ours is quicker (or, with another metric, smaller). None if either is missing."""
        theirs, ours = self.fastest(role), self.fastest("ours")
        if theirs is None or ours is None:
            return None
        top, bottom = theirs["metrics"].get(metric), ours["metrics"].get(metric)
        return top / bottom if top is not None and bottom else None

    def unlike(self) -> str:
        """A warning if one side of the ratio ran in a CUDA graph and another did not."""
        sides = [
            line
            for line in self.lines
            if line["config"]["role"] in ("ours", "baseline") and line["metrics"]["status"] == "ok"
        ]
        without = [line["config"]["candidate"] for line in sides if not line["metrics"]["graphed"]]
        return f"without a CUDA graph: {', '.join(without)}" if 0 < len(without) < len(sides) else ""


def load(results: Path, what: str, hardware: str, quick: bool = False) -> dict[tuple[str, str], Comparison]:
    """The newest comparison of every (case, phase) in a result file; those of --quick runs only if `quick`."""
    groups: dict[str, Comparison] = {}
    for line in read_results(result_file(results, what, hardware)):
        config = line["config"]
        if config.keys() >= {"group", "case", "phase", "role", "candidate", "quick"} and (quick or not config["quick"]):
            groups.setdefault(config["group"], Comparison(config["case"], config["phase"])).lines.append(line)
    return {(comparison.case, comparison.phase): comparison for comparison in groups.values()}
