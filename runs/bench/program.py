"""What the benchmarks share: their flags, the loop over their cases, and the rows of their results.

A row is one candidate of a comparison, which is what was timed in turns in one process. A file, and so a table, never
mixes hardware. Ratios are of the fastest candidate with the role "baseline" over the one with the role "ours"; "other",
"variant", "eager" and "unfused" are timed beside them.
"""

import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from runs.bench.timing import MIN_ROUNDS, Measurement, Plan, release_memory
from trainkit_gka.cli import Bounds, UserError
from trainkit_gka.progress import console, progress_bar
from trainkit_gka.results import append_result, describe_hardware

# On each kind of device the usual dtype of features, which the names of cases leave out.
USUAL_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
SUFFIXES = {"bfloat16": "-bf16", "float32": "-fp32"}
KERNEL_KINDS = ("unfused", "cudnn")  # softmax-KIND names a kernel; other kinds are forms of the model


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

    shapes: list[str] = field(default_factory=list)
    """Time these cases instead of the standard ones."""
    only: list[str] = field(default_factory=list)
    """Time the cases that begin with one of these, such as vit, d4 or "d4 training"; empty = all."""
    skip: list[str] = field(default_factory=list)
    """Leave out candidates with one of these in their name, such as flex or eager."""
    rounds: Annotated[int, Bounds(0)] = 0
    """Timed turns of every candidate; 0 = the benchmark's own number."""
    seconds: Annotated[float, Bounds(0)] = 0.0
    """Stop the turns of a comparison after this time (three are made in any case); 0 = the benchmark's own limit."""
    dtypes: list[Literal["float32", "bfloat16"]] = field(default_factory=list)
    """What features and products are rounded to; empty = bfloat16 on CUDA, both on a CPU."""
    threads: Annotated[list[int], Bounds(1)] = field(default_factory=list)
    """Numbers of threads to time a CPU with, one after the other, each in a file of its own; empty = torch's own."""

    def choose(
        self, parse: Callable[[str, str], Any], standard: Callable[[str, bool], list[Any]], device_type: str
    ) -> list[tuple[Any, str]]:
        """The cases to time, each with a phase: of --shapes or the standard ones, those that --only names.

        A case has a name and phases. parse(text, device_type) raises ValueError. standard(device_type, quick). Raises
        UserError.
        """
        try:
            cases = [parse(text, device_type) for text in self.shapes] or standard(device_type, self.quick)
        except ValueError as error:
            raise UserError(f"--shapes: {error}") from None
        named = {f"{case.name} {phase}": (case, phase) for case in cases for phase in case.phases}
        for beginning in self.only:
            if not any(name.startswith(beginning) for name in named):
                names = dict.fromkeys(case.name for case in cases)
                raise UserError(f"--only {beginning}: no such case; there are {', '.join(names)}")
        return [one for name, one in named.items() if not self.only or name.startswith(tuple(self.only))]

    def skips(self, candidate: str) -> bool:
        return any(word in candidate for word in self.skip)

    def adjust(self, plan: Plan) -> Plan:
        """The benchmark's plan with the user's --rounds, --seconds and --quick."""
        if self.quick:
            plan = replace(plan, rounds=max(MIN_ROUNDS, plan.rounds // 5), seconds=plan.seconds / 5)
        return replace(plan, rounds=self.rounds or plan.rounds, seconds=self.seconds or plan.seconds)

    def dtypes_on(self, device_type: str) -> list[str]:
        return self.dtypes or (["bfloat16"] if device_type == "cuda" else ["float32", "bfloat16"])


def facts_of(candidate: str, phase: str, settings: dict[str, Any], hardware: str) -> dict[str, Any]:
    """What a candidate is, as columns of a row, from its name and the settings of its comparison.

    family: softmax or gka. form: of a model, such as offsets. kernel: what computes it, empty where a model chooses.
    computed_in: the dtype of its products. compiled: whether torch.compile made it. threads: None on a GPU.
    """
    name, _, more = candidate.partition(", ")
    name, eager, _ = name.partition(" eager")
    head, _, kernel = name.partition(" ")
    family, _, form = head.partition("-")
    mode = settings.get("compile", settings.get("compile_mode"))  # None: not a whole model
    if family == "softmax" and form in KERNEL_KINDS:
        form, kernel = "", form
    if family == "softmax" and settings.get("window") is not None and kernel == "sdpa":
        kernel = "dense mask"  # SDPA takes a window as a mask
    if eager and mode is None:
        kernel = "eager"
    general = " general norms" if more == "general norms" else ""
    threads = re.search(r", (\d+) threads?$", hardware)
    return {
        "family": family,
        "form": form,
        "kernel": kernel + general,
        "computed_in": more if more and not general else settings.get("dtype", ""),
        "compiled": mode not in (None, "off") and not eager and not phase.startswith("decode"),
        "threads": settings.get("threads", int(threads[1]) if threads else None),
    }


def slug(hardware: str) -> str:
    """The hardware's name as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", hardware.lower())).strip("-")


def result_file(results: Path, benchmark: str, hardware: str) -> Path:
    """One file for each benchmark and hardware (its name or its slug)."""
    return Path(results) / f"bench_{benchmark}_{slug(hardware)}.jsonl"


@dataclass
class Comparison:
    """What was timed in turns. settings: dtype among them. measured, roles, metrics (further ones): by candidate. part:
    of a step, in place of the case's phase.
    """

    settings: dict[str, Any]
    measured: dict[str, Measurement]
    roles: dict[str, str]
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    part: str = ""

    def record(self, config: BenchConfig, benchmark: str, case: str, phase: str, device: torch.device) -> None:
        """Append a row for each candidate to the benchmark's file, and print it.

        The case's name says the dtype unless that is the device's usual one: vit-ti-bf16 on a CPU.
        """
        hardware = describe_hardware(device)
        group = uuid.uuid4().hex[:12]
        dtype = self.settings["dtype"]
        case += "" if dtype == USUAL_DTYPE[device.type] else SUFFIXES[dtype]
        for name, measurement in self.measured.items():
            row = {"case": case, "phase": phase, "candidate": name, "role": self.roles[name], "group": group}
            row |= {"quick": config.quick, **self.settings, **facts_of(name, phase, self.settings, hardware)}
            metrics = {**asdict(measurement), **self.metrics.get(name, {})}
            append_result(result_file(config.results, benchmark, hardware), f"bench_{benchmark}", row, metrics, device)
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


def time_cases(
    benchmark: str, config: ComparisonConfig, chosen: list[tuple[Any, str]], device: torch.device,
    measure: Callable[[Any, str], Iterable[Comparison]], threads: Sequence[int] = (),
) -> None:  # fmt: skip
    """Time and record the chosen cases. threads: numbers to time with if the user named none; empty = torch's own."""
    before = torch.get_num_threads()
    try:
        with progress_bar() as bar:
            for count in config.threads or threads or [before]:
                torch.set_num_threads(count)
                task = bar.add_task(f"{benchmark}, {count} threads", total=len(chosen), status="")
                for case, phase in chosen:
                    bar.update(task, status=f"{case.name} {phase}")
                    for comparison in measure(case, phase):
                        comparison.record(config, benchmark, case.name, comparison.part or phase, device)
                    release_memory()
                    bar.advance(task)
    finally:
        torch.set_num_threads(before)
