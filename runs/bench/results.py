"""The benchmarks' result files: a line for every candidate, written case by case, and the comparisons made of them.

A comparison is what was timed in turns in one process. Ratios are taken inside one, never across two; a file, and so a
table, never mixes hardware.
"""

import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from runs.bench.config import BenchConfig
from runs.bench.measurement import Measurement
from trainkit_gka.progress import console
from trainkit_gka.results import append_result, describe_hardware, read_results


def slug(hardware: str) -> str:
    """The hardware's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", hardware.lower())).strip("-")


def result_file(results: Path, benchmark: str, hardware: str) -> Path:
    """One file for each benchmark and hardware (its name or its slug)."""
    return Path(results) / f"bench_{benchmark}_{slug(hardware)}.jsonl"


def facts_of(candidate: str, phase: str, settings: dict[str, Any], hardware: str) -> dict[str, Any]:
    """What a candidate is, as columns of its own, from its name and the settings of its comparison.

    family: softmax or gka. form: of GKA, such as offsets. kernel: what computes it, empty where a model chooses.
    computed_in: the dtype of its products. compiled: whether torch.compile made it. threads: None on a GPU.
    """
    name, _, more = candidate.partition(", ")
    name, eager, _ = name.partition(" eager")
    head, _, kernel = name.partition(" ")
    family, _, form = head.partition("-")
    whole_model = "compile" in settings or "compile_mode" in settings
    if family == "softmax" and form:  # of ONNX: the runtime's fused attention
        form, kernel = "", form
    if family == "softmax" and settings.get("window") is not None and kernel == "sdpa":
        kernel = "dense mask"  # SDPA takes a window as a mask
    if eager and not whole_model:
        kernel = "eager"
    general = " general norms" if more == "general norms" else ""
    threads = re.search(r", (\d+) threads?$", hardware)
    return {
        "family": family,
        "form": form,
        "kernel": kernel + general,
        "computed_in": more if more and not general else settings.get("dtype", ""),
        "compiled": whole_model and not (eager or phase.startswith("decode") or settings.get("compile") == "off"),
        "threads": settings.get("threads", int(threads[1]) if threads else None),
    }


class Recorder:
    """Appends the lines of a comparison and prints them."""

    def __init__(self, config: BenchConfig, benchmark: str, device: torch.device):
        self.benchmark, self.device, self.quick = benchmark, device, config.quick
        self.hardware = describe_hardware(device)
        self.path = result_file(config.results, benchmark, self.hardware)

    def record(
        self,
        case: str,
        phase: str,
        measured: dict[str, Measurement],
        roles: dict[str, str],
        settings: dict[str, Any],
        extra: Callable[[str, Measurement], dict[str, Any]] = lambda name, measurement: {},
    ) -> None:
        """Append and print one comparison.

        roles: of every candidate. settings: of all of them. extra: further metrics of a candidate.
        """
        group = uuid.uuid4().hex[:12]
        for name, measurement in measured.items():
            config = {"case": case, "phase": phase, "candidate": name, "role": roles[name], "group": group}
            config |= {"quick": self.quick, **settings, **facts_of(name, phase, settings, self.hardware)}
            metrics = {**asdict(measurement), **extra(name, measurement)}
            append_result(self.path, f"bench_{self.benchmark}", config, metrics, self.device)
            console.print(f"{case} {phase:<16} {name:<26} {summary(measurement)}", highlight=False, markup=False)


def summary(measurement: Measurement) -> str:
    """One measurement in words."""
    if measurement.status != "ok":
        return f"{measurement.status}: {measurement.reason}"
    memory = "" if measurement.peak_mib is None else f", {measurement.peak_mib:,.0f} MiB"
    note = f"; {measurement.note}" if measurement.note else ""
    spread = f"{measurement.low_ms:.4g} to {measurement.high_ms:.4g} in {measurement.samples} samples"
    first = f"first call {measurement.first_ms / 1e3:.2f} s"
    return f"{measurement.median_ms:10.4g} ms ({spread}), {first}{memory}{note}"


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
        """The fastest line of `role` over ours: above 1, ours is quicker (or, with another metric, smaller).

        None if either is missing.
        """
        other, ours = self.fastest(role), self.fastest("ours")
        if other is None or ours is None:
            return None
        top, bottom = other["metrics"].get(metric), ours["metrics"].get(metric)
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


def load(results: Path, benchmark: str, hardware: str, quick: bool = False) -> dict[tuple[str, str], Comparison]:
    """The newest comparison of every (case, phase) in a result file; those of --quick runs only if `quick`."""
    groups: dict[str, Comparison] = {}
    for line in read_results(result_file(results, benchmark, hardware)):
        config = line["config"]
        if config.keys() >= {"group", "case", "phase", "role", "candidate", "quick"} and (quick or not config["quick"]):
            groups.setdefault(config["group"], Comparison(config["case"], config["phase"])).lines.append(line)
    return {(comparison.case, comparison.phase): comparison for comparison in groups.values()}


def swept(comparisons: Iterable[Comparison]) -> pd.DataFrame:
    """A row for every timed candidate at every length: family (a name of KINDS), tokens a second, and MiB."""
    rows = []
    for comparison in comparisons:
        for config, metrics in ((line["config"], line["metrics"]) for line in comparison.lines):
            if milliseconds := metrics["median_ms"]:
                speed = config["batch"] * config["tokens"] / milliseconds * 1e3
                where = [comparison.phase, config["family"], config["candidate"], config["tokens"]]
                rows.append([*where, speed, metrics["peak_mib"]])
    frame = pd.DataFrame(rows, columns=["phase", "family", "candidate", "tokens", "speed", "memory"])
    return frame.sort_values(["candidate", "tokens"])
