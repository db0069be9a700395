"""What a GPU has to tell, in order of worth, within the minutes that there are.

    python -m runs.gpu --minutes 10                             on a machine with a GPU
    python -m runs.gpu --dry-run                                the steps, their seconds, and what is done already
    python -m runs.gpu --pack out/carried --data out/packed/X   a folder to carry to a machine without a network
    python -m runs.gpu --device-type cpu --quick                all of it in miniature

A step is a command, or several at once, with an estimate of its seconds. None starts that does not fit into what is
left, and one that outlives it is stopped: trainings save and continue in the next call, everything else begins anew.
BASE/gpu/steps.jsonl records each step as it ends, with what it measured; the next call leaves finished ones out and
takes measured seconds for estimates. A step that fails costs one line, and the call ends with code 1; its output is in
BASE/gpu. The benchmarks and trainings append to --results as they always do.

The standard library alone: the packages that the commands need may first have to be installed from the carried folder.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs.gpu import carry
from runs.gpu.carry import Problem
from runs.gpu.steps import NEEDS, ROWS, TIMED, Step, all_steps, miniature, places_of
from trainkit_gka import gpus, signals

FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
ENDING = 5.0  # seconds kept for the last table
GRACE = {True: 20.0, False: 3.0}  # from SIGTERM to SIGKILL: of commands that save, and of others
Record = dict[str, Any]


# What was done before


def read_lines(path: Path, start: int = 0) -> Iterator[Record]:
    """The records of a file of JSON lines from a byte on; a line that was cut short is left out."""
    for line in path.read_bytes()[start:].splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def estimate(step: Step, past: list[Record]) -> float:
    """Seconds that the step will take: those it took, or what is left of a training, or the estimate."""
    if past and past[-1]["status"] != STOPPED:
        return past[-1]["seconds"]
    ran = [record["seconds"] for record in past if record["status"] == STOPPED]
    if step.least:
        return max(step.least, step.seconds - sum(ran) + (step.least if ran else 0.0))
    return max([step.seconds, *(1.5 * seconds for seconds in ran)])


def obstacle(step: Step, rows: Path | None) -> str:
    """Which packages are missing, or the rows; empty if nothing is."""
    needs = NEEDS.get(step.commands[0][0], TIMED)
    missing = [name for name in needs if name != ROWS and importlib.util.find_spec(name) is None]
    if missing:
        return f"there is no package {', '.join(missing)} (--pack makes a folder of such)"
    return "there are no packed rows (--data, or --pack with it)" if ROWS in needs and rows is None else ""


# Running a step


def run_step(step: Step, flags: list[list[str]], outputs: list[Path], variables: dict[str, str], left: float) -> str:
    """Run the commands at once for `left` seconds at most. Returns how that ended. flags, outputs: of each command."""
    running: list[subprocess.Popen] = []
    grace, stopped = GRACE[step.least > 0], False
    end = time.monotonic() + left - grace
    with signals.passed_on(lambda: running):
        try:
            for command, more, output in zip(step.commands, flags, outputs, strict=True):
                with open(output, "w", encoding="utf-8") as file:
                    words = [sys.executable, "-m", *command, *more]
                    options = {"cwd": carry.ROOT, "env": variables, "start_new_session": True}
                    running.append(subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, **options))
            while any(process.poll() is None for process in running) and not stopped:
                time.sleep(0.05)
                stopped = time.monotonic() > end
        finally:
            stop([process for process in running if process.poll() is None], grace)
    return STOPPED if stopped else FAILED if any(process.returncode for process in running) else FINISHED


def stop(running: list[subprocess.Popen], grace: float) -> None:
    """End processes and those that they started: SIGTERM, and after `grace` seconds SIGKILL."""
    end = time.monotonic() + grace
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        while time.monotonic() < end and any(process.poll() is None for process in running):
            time.sleep(0.05)
    for process in running:
        process.wait()


def last_line(path: Path) -> str:
    """The last line of a command's output that is not empty, without what draws bars."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", path.read_text(encoding="utf-8", errors="replace"))
    return ([line.strip() for line in re.split(r"[\r\n]", text) if line.strip()] or ["no output"])[-1]


# What was learned


def learned(rows: list[Record]) -> list[list[str]]:
    """Cells of a table, of the rows that a step appended: what was measured, of which form, and its numbers."""
    cells, groups = [], {}
    for row in rows:
        config, metrics = row.get("config", {}), row.get("metrics", {})
        if "group" in config:
            groups.setdefault((f"{config['case']} {config['phase']}", config["group"]), []).append((config, metrics))
        elif "val_bpb" in metrics:
            cells.append(["bits per byte", config["model_tag"], f"{metrics['val_bpb']:.4f}"])
    for (case, _), group in groups.items():
        times = [m["median_ms"] for c, m in group if c["role"] == "baseline" and m["status"] == "ok"]
        softmax = min(times, default=None)
        for config, metrics in group:
            role, right = config["role"], metrics["status"] == "ok"
            if right and role != "eager" and (role != "baseline" or metrics["median_ms"] == softmax):
                cells.append([case, config["candidate"], numbers_of(metrics, softmax)])
            elif metrics["status"] == "wrong" or (not right and role == "ours"):
                cells.append([case, config["candidate"], f"{metrics['status']}: {metrics['reason']}"])
    return cells


def numbers_of(metrics: Record, softmax: float | None) -> str:
    """Milliseconds, how many times as fast as the fastest softmax attention, items per second, MFU and memory."""
    speedup = softmax / metrics["median_ms"] if softmax else None
    numbers = {"{:.4g} ms": metrics["median_ms"], "{:.2f}x": speedup, "{:,.0f}/s": metrics.get("items_per_second")}
    numbers |= {"MFU {:.0%}": metrics.get("mfu"), "{:,.0f} MiB": metrics.get("peak_mib")}
    return ", ".join(words.format(number) for words, number in numbers.items() if number is not None)


def show(cells: list[list[str]], indent: str) -> None:
    """Print cells in columns."""
    widths = [max((len(row[place]) for row in cells), default=0) for place in (0, 1)]
    for what, which, numbers in cells:
        print(f"{indent}{what:<{widths[0]}}  {which:<{widths[1]}}  {numbers}", flush=True)


# The command


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("runs.gpu", description="What a GPU has to tell, in the minutes that there are.")
    parser.add_argument("--minutes", type=float, default=10.0, help="no step starts that does not fit into these")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these steps, even if they are finished")
    parser.add_argument("--dry-run", action="store_true", help="list the steps and their seconds, and run none")
    parser.add_argument("--device-type", choices=["cuda", "cpu"], default="cuda", help="cpu needs --quick")
    parser.add_argument("--quick", action="store_true", help="a miniature for a CPU, to try the program out")
    parser.add_argument("--base", type=Path, default=Path("out"), help="outputs go to BASE/gpu")
    parser.add_argument("--results", type=Path, help="folder of the JSON lines (runs/results; a miniature's BASE/gpu)")
    parser.add_argument("--data", type=Path, help="packed rows; else those of the carried folder")
    parser.add_argument("--carried", type=Path, help="the folder that --pack made; else BASE/carried")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="make a folder to carry, of 60 MiB at most")
    parser.add_argument("--python", default="3.12", help="with --pack: the other machine's Python")
    options = parser.parse_args(words)
    options.carried = options.carried or options.base / "carried"
    options.results = options.results or (options.base / "gpu" if options.quick else Path("runs/results"))
    for name in ("base", "results", "data", "carried", "pack"):
        if path := getattr(options, name):
            setattr(options, name, Path(os.path.expanduser(path)).resolve())
    return options


def main(words: list[str] | None = None) -> None:
    options, began = parse(words), time.monotonic()
    if options.pack:
        return carry.pack(options.pack, options.data, options.python)
    if (options.device_type == "cpu") != options.quick:
        raise Problem("--device-type cpu and --quick need each other: a miniature runs on a CPU, all of it on a GPU")
    if options.device_type == "cuda" and not options.dry_run and gpus.count() == 0:
        raise Problem("no GPU is visible; --dry-run lists the steps, --device-type cpu --quick tries them in miniature")
    call = Call(options, began)
    steps = miniature(call.row_length()) if options.quick else all_steps()
    names = [step.name for step in steps]
    if unknown := [name for name in options.only if name not in names]:
        raise Problem(f"--only {unknown[0]}: no such step; there are {', '.join(names)}")
    chosen = [step for step in steps if not options.only or step.name in options.only]
    if options.dry_run:
        call.describe(chosen)
    elif FAILED in call.run(chosen):
        sys.exit(1)


class Call:
    """One call of the command: first come the packages and rows, then the steps that fit, one after the other."""

    def __init__(self, options: argparse.Namespace, began: float):
        self.options, self.folder = options, options.base / "gpu"
        self.end = began + 60 * options.minutes - ENDING
        self.log, site = self.folder / "steps.jsonl", self.folder / "site"
        self.records = list(read_lines(self.log))
        sys.path.insert(1, str(site))
        self.rows = options.data
        if not options.dry_run:
            carry.install(options.carried, site)
            self.rows = options.data or carry.unpack(options.carried, self.folder / "rows")
        if self.rows and not (self.rows / carry.MANIFEST).is_file():
            raise Problem(f"--data {self.rows}: there are no packed rows (no {carry.MANIFEST})")
        paths = [str(carry.ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self.variables |= {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
        if not options.quick:
            self.variables["GKA_CPU_KERNEL"] = "0"  # compiling it would take seconds

    def row_length(self) -> int:
        """Tokens of a packed row; 1 if there are none."""
        return json.loads((self.rows / carry.MANIFEST).read_text(encoding="utf-8"))["sequence_len"] if self.rows else 1

    def past(self, step: Step) -> list[Record]:
        """How earlier calls ended this step."""
        return [record for record in self.records if record["digest"] == step.digest]

    def describe(self, steps: list[Step]) -> None:
        """Print the steps, and run none."""
        for step in steps:
            past = self.past(step)
            source = "measured" if past and past[-1]["status"] != STOPPED else "estimated"
            print(f"{step.name:<18} {estimate(step, past):4.0f} s {source}  {past[-1]['status'] if past else ''}")
            for command in step.commands:
                print(f"    python -m {shlex.join(command)}")

    def run(self, steps: list[Step]) -> set[str]:
        """Run what fits, and print what was learned and what is left. Returns the ways in which steps ended."""
        left_over, endings = [], set()
        for step in steps:
            past, left = self.past(step), max(0.0, self.end - time.monotonic())
            seconds = estimate(step, past)
            if past and past[-1]["status"] == FINISHED and not self.options.only:
                print(f"{step.name}: finished before")
            elif reason := obstacle(step, self.rows):
                left_over.append(f"{step.name}: {reason}")
            elif left < (step.least or seconds):
                left_over.append(f"{step.name}: {seconds:.0f} s, and {left:.0f} were left")
            else:
                print(f"{step.name}: about {seconds:.0f} s; {left:.0f} are left", flush=True)
                endings.add(status := self.take(step, left))
                if status != FINISHED:
                    left_over.append(f"{step.name}: {status}")
        print("\nWhat was learned (times as fast as the fastest softmax attention of torch, and images or tokens/s):")
        newest = [past[-1] for step in steps if (past := self.past(step))]
        show([cells for record in newest for cells in record["learned"]], "  ")
        print(f"The rows are in {self.options.results}; python -m runs.tables --only 4 prints the paper's table 4.")
        print("\n  ".join(["\nLeft for the next call:", *left_over]) if left_over else "\nNothing is left.")
        return endings

    def take(self, step: Step, left: float) -> str:
        """Run a step and record it. Returns how it ended."""
        before = {path: path.stat().st_size for path in self.options.results.glob("*.jsonl")}
        given = self.options.device_type, self.folder, self.options.results, self.rows
        places = [places_of(command[0], *given) for command in step.commands]
        outputs = [self.folder / f"{step.name}-{number}.txt" for number, _ in enumerate(step.commands)]
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        status = run_step(step, places, outputs, self.variables, left)
        seconds = round(time.monotonic() - began, 1)
        rows = [r for path in self.options.results.glob("*.jsonl") for r in read_lines(path, before.get(path, 0))]
        lines = [last_line(path) for path in outputs]
        cells = learned(rows) + ([["tests", step.name, lines[0]]] if step.commands[0][0] == "pytest" else [])
        record = {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "name": step.name, "digest": step.digest}
        record |= {"status": status, "seconds": seconds, "last_lines": lines, "learned": cells}
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(record)}\n")  # a line before it may have been cut short
        self.records.append(record)
        show(cells, "    ")
        why = f": {'; '.join(dict.fromkeys(lines))} ({outputs[0]})" if status == FAILED else ""
        print(f"    {status} after {seconds:.0f} s{why}", flush=True)
        return status


if __name__ == "__main__":
    try:
        main()
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
