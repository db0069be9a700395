"""Result files: every finished run appends one JSON line with its settings, machine and numbers."""

import functools
import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainkit_gka.command import command_line
from trainkit_gka.progress import finite, read_lines

PROJECT = Path(__file__).resolve().parents[1]
CODE = ("*.py", "*.cpp", "*.h")  # the files whose change marks the commit with +
CPUINFO = Path("/proc/cpuinfo")
CHIPS = {"family 25 model 17": "Genoa", "family 26 model 2": "Turin"}


def processor_name(cpuinfo: str) -> str:
    """The processor's name, from the text of /proc/cpuinfo, with its family and model if it has no number."""
    entries = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*?)\s*$", cpuinfo.split("\n\n")[0], re.MULTILINE))
    name = entries.get("model name") or platform.processor() or platform.machine()
    if re.search(r"\d", name) or not {"cpu family", "model"} <= entries.keys():
        return name
    return f"{name} family {entries['cpu family']} model {entries['model']}"


def describe_hardware(device: torch.device) -> str:
    """The name of the GPU; or of the processor, with the number of threads that PyTorch uses.

    The instructions to which ATEN_CPU_CAPABILITY limits PyTorch are added: they make it another machine.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = processor_name(CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else "")
    if limit := os.environ.get("ATEN_CPU_CAPABILITY"):
        model += f" held to {limit.upper()}"
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def hardware_of(record: dict[str, Any]) -> str:
    """The hardware of a record, with the name of its chip if it tells. Older records have "1 threads"."""
    return re.sub(r"\b1 threads$", "1 thread", with_chip(str(record.get("hardware"))))


def with_chip(hardware: str) -> str:
    """A description of hardware with the name of the chip, where it has a family and a model that are known."""
    for numbers, name in CHIPS.items():
        hardware = hardware.replace(numbers, name)
    return hardware


def is_processor(hardware: str) -> bool:
    """Whether `describe_hardware`, or a file named after it, means a processor: an accelerator has no threads."""
    return bool(re.search(r"\b\d+[ -]threads?$", hardware))


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process in MiB: torch's count on a GPU, the resident set size on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes on macOS, KiB elsewhere


@functools.cache
def git_commit() -> str:
    """The short commit of the code, with + if code was changed; outside a checkout the version of the package.

    "unknown" where there is neither, as in a copy of the files that is not installed.
    Cached at the first call: the checkout may have another commit at the end of a long run.
    """
    if not (PROJECT / ".git").exists():  # installed: a repository around it is another project's
        try:
            return f"gka {importlib.metadata.version('gka')}, installed"
        except importlib.metadata.PackageNotFoundError:
            return "unknown"
    git = ["git", "-C", str(PROJECT)]
    options = {"text": True, "stderr": subprocess.DEVNULL}
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], **options)
        changed = subprocess.check_output([*git, "status", "--porcelain", "--", *CODE], **options)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("+" if changed else "")


def date_of(seconds: float | None = None) -> str:
    """A time of `time.time()` (None = now) as the date of a record: UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def read_results(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The records that `append_result` wrote to `path` whose metrics have all `keys`; other lines are skipped."""
    lines = [line for line in read_lines(path) if isinstance(line.get("config"), dict)]
    return [line for line in lines if isinstance(done := line.get("metrics"), dict) and done.keys() >= {*keys}]


def append_result(
    path: Path, kind: str, config: dict[str, Any], metrics: dict[str, Any], device: torch.device, world_size: int = 1
) -> None:
    """Append a run's record to the JSON-lines file `path`."""
    record = {
        "kind": kind,
        "date": date_of(),
        "commit": git_commit(),
        "command": command_line(),
        "hardware": describe_hardware(device),
        "processes": world_size,
        "torch": torch.__version__,
        "config": config,
        "metrics": metrics,
    }
    append_line(path, record)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a record to the JSON-lines file `path`. A line before it that was cut short is ended."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write((json.dumps(finite(record), default=str) + "\n").encode())
