"""Numbers live in files: every finished run appends one JSON line that says what was run, where, and what came out."""

import datetime
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trainkit.cli import command_line
from trainkit.progress import finite, read_lines


def describe_hardware(device: torch.device) -> str:
    """The accelerator's or the processor's name with how much of it there is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {torch.get_num_threads()} threads"


def peak_memory(device: torch.device) -> float:
    """MiB that this process has held at once so far: of the GPU's memory by torch's count, or, on a CPU, of the machine's (resident set size)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KiB here


def git_commit() -> str:
    """The short commit of the code, with + if the tree was changed; "unknown" outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # installed: a repository around it is someone else's
        return "unknown"
    try:
        commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "-C", str(root), "diff", "--quiet", "HEAD", "--", "*.py"], capture_output=True
        ).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if dirty else "")


def check_appendable(path: Path) -> None:
    """Raises OSError now, not when there is something to append, if `path` cannot be appended to."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a"):
        pass


def read_results(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The records of a file that `append_result` wrote whose metrics have all `keys`; other lines (by hand, cut short) are left out."""
    lines = [
        line
        for line in read_lines(path)
        if isinstance(line.get("config"), dict) and isinstance(line.get("metrics"), dict)
    ]
    return [line for line in lines if line["metrics"].keys() >= set(keys)]


def append_result(
    path: Path, kind: str, config: dict[str, Any], metrics: dict[str, Any], device: torch.device, world_size: int = 1
) -> dict[str, Any]:
    """Append a record to the JSON-lines file `path` and return it."""
    record = {
        "kind": kind,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": git_commit(),
        "command": command_line(),
        "hardware": describe_hardware(device),
        "processes": world_size,
        "torch": torch.__version__,
        "config": config,
        "metrics": metrics,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if (
            file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
        ):  # a line that was cut short ends here
            file.write(b"\n")
        file.write((json.dumps(finite(record), default=str) + "\n").encode())
    return record
