"""What the programs that compare softmax attention with GKA share: their flags, and the rows of their results.

A row is one candidate of a comparison, which is what was timed in turns in one process. A file, and so a table, never
mixes hardware. Ratios are of the fastest candidate with the role "baseline" over the one with the role "ours"; "other",
"variant", "eager" and "unfused" are timed beside them.
"""

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from runs.bench.timing import MIN_ROUNDS, Measurement, Plan
from trainkit_gka.cli import Bounds, UserError
from trainkit_gka.progress import console
from trainkit_gka.results import append_result, describe_hardware

# On each kind of device the usual dtype of features, which the names of cases leave out.
USUAL_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
SUFFIXES = {"bfloat16": "-bf16", "float32": "-fp32"}
KERNEL_KINDS = ("unfused", "cudnn")  # softmax-KIND names a kernel; other kinds are forms of the model
Counts = Annotated[list[int], Bounds(1)]


@dataclass
class BenchConfig:
    """The flags that the benchmarks and their report have."""

    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to run; auto takes CUDA if there is a GPU."""
    quick: bool = False
    """Time fewer cases in fewer rounds: to try things out, not to report."""
    results: Path = Path("runs/results")
    """Folder of the JSON lines: one file for each benchmark and hardware, appended to case by case."""


@dataclass
class ComparisonConfig(BenchConfig):
    """The flags of a benchmark."""

    only: list[str] = field(default_factory=list)
    """Run the cases whose names begin with one of these; empty = all."""
    rounds: Annotated[int, Bounds(0)] = 0
    """Timed turns of every candidate; 0 = the benchmark's own number."""
    seconds: Annotated[float, Bounds(0)] = 0.0
    """Stop the turns of a comparison after this time (three are made in any case); 0 = the benchmark's own limit."""
    dtypes: list[Literal["float32", "bfloat16"]] = field(default_factory=list)
    """What features and products are rounded to; empty = bfloat16 on CUDA, both on a CPU."""
    threads: Counts = field(default_factory=list)
    """Numbers of threads to time a CPU with, one after the other, each in a file of its own; empty = torch's own."""

    def select(self, names: list[str]) -> list[str]:
        """The names that --only asks for, in order. Raises UserError for a beginning that no name has."""
        for beginning in self.only:
            if not any(name.startswith(beginning) for name in names):
                raise UserError(f"--only {beginning}: no such case; there are {', '.join(names)}")
        return [name for name in names if not self.only or name.startswith(tuple(self.only))]

    def adjust(self, plan: Plan) -> Plan:
        """The benchmark's plan with the user's --rounds, --seconds and --quick."""
        if self.quick:
            plan = replace(plan, rounds=max(MIN_ROUNDS, plan.rounds // 5), seconds=plan.seconds / 5)
        return replace(plan, rounds=self.rounds or plan.rounds, seconds=self.seconds or plan.seconds)

    def dtypes_on(self, device_type: str) -> list[str]:
        return self.dtypes or (["bfloat16"] if device_type == "cuda" else ["float32", "bfloat16"])

    def with_threads(self, otherwise: list[int] | None = None) -> Iterator[int]:
        """Every number of threads to time with, while torch uses it; `otherwise` if the user named none."""
        before = torch.get_num_threads()
        try:
            for threads in self.threads or otherwise or [before]:
                torch.set_num_threads(threads)
                yield threads
        finally:
            torch.set_num_threads(before)


def with_dtype(case: str, dtype: str, device_type: str) -> str:
    """The case's name, which says what dtype it has unless that is the device's usual one: vit-ti-bf16 on a CPU."""
    return case if dtype == USUAL_DTYPE[device_type] else case + SUFFIXES[dtype]


def slug(hardware: str) -> str:
    """The hardware's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", hardware.lower())).strip("-")


def result_file(results: Path, benchmark: str, hardware: str) -> Path:
    """One file for each benchmark and hardware (its name or its slug)."""
    return Path(results) / f"bench_{benchmark}_{slug(hardware)}.jsonl"


def facts_of(candidate: str, phase: str, settings: dict[str, Any], hardware: str) -> dict[str, Any]:
    """What a candidate is, as columns of a row, from its name and the settings of its comparison.

    family: softmax or gka. form: of a model, such as offsets. kernel: what computes it, empty where a model chooses.
    computed_in: the dtype of its products. compiled: whether torch.compile made it. threads: None on a GPU.
    """
    name, _, more = candidate.partition(", ")
    name, eager, _ = name.partition(" eager")
    head, _, kernel = name.partition(" ")
    family, _, form = head.partition("-")
    whole_model = "compile" in settings or "compile_mode" in settings
    if family == "softmax" and form in KERNEL_KINDS:
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
    """Appends the rows of a comparison to the benchmark's file, and prints them."""

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
