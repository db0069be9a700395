"""Rows of the benchmarks' result files, made by hand."""

import json

from runs.bench.program import facts_of, result_file
from runs.bench.timing import Measurement

SHAPE = {"batch": 256, "tokens": 197, "heads": 3, "head_dim": 64, "causal": False, "window": None, "queries": 197}
RECORD = {"date": "2026-01-02 03:04", "commit": "abc", "torch": "2"}


def line(
    candidate, role, median_ms, case="vit-ti", phase="forward", *, group="", quick=False, hardware="NVIDIA H200",
    benchmark="attention", settings=SHAPE, **metrics,
):  # fmt: skip
    """A row of a result file, of a candidate that was right if `metrics` do not say otherwise."""
    settings = {"dtype": "bfloat16", **settings}
    config = {"case": case, "phase": phase, "candidate": candidate, "role": role, "quick": quick, **settings}
    config |= {"group": group or f"{case} {phase}", **facts_of(candidate, phase, settings, hardware)}
    times = dict(median_ms=median_ms, low_ms=median_ms, high_ms=median_ms, first_ms=1.0)
    measured = vars(Measurement(peak_mib=10.0, graphed=True, **times))
    about = {"kind": f"bench_{benchmark}", **RECORD, "hardware": hardware}
    return {**about, "config": config, "metrics": {**measured, **metrics}}


def write_lines(path, *records):
    """A file of JSON lines, in folders that are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write(folder, *lines):
    """The result files of these rows, by benchmark and hardware."""
    paths = [result_file(folder, each["kind"].removeprefix("bench_"), each["hardware"]) for each in lines]
    for path in set(paths):
        write_lines(path, *(each for each, place in zip(lines, paths) if place == path))
