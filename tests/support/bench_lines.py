"""Lines of the benchmarks' result files, made by hand."""

import json

from runs.bench.measurement import Measurement
from runs.bench.results import facts_of, result_file

SHAPE = {"batch": 256, "tokens": 197, "heads": 3, "head_dim": 64, "causal": False, "window": None, "queries": 197}


def line(candidate, role, median_ms, case="vit-ti", phase="forward", status="ok", group="g", quick=False, **metrics):
    """A line of a result file."""
    config = {"case": case, "phase": phase, "candidate": candidate, "role": role, "group": group, "quick": quick}
    times = dict(median_ms=median_ms, low_ms=median_ms, high_ms=median_ms, first_ms=1.0)
    measured = Measurement(status=status, peak_mib=10.0, graphed=True, **times)
    where = {"date": "2026-01-02 03:04", "commit": "abc", "hardware": "NVIDIA H200", "torch": "2"}
    kind = "bench_deit" if case.startswith("deit") else "bench_attention"
    facts = facts_of(candidate, phase, {"dtype": "bfloat16", **SHAPE}, where["hardware"])
    return {
        "kind": kind,
        **where,
        "config": {**config, **SHAPE, "dtype": "bfloat16", **facts},
        "metrics": {**vars(measured), **metrics},
    }


def write_lines(path, *records):
    """A file of JSON lines, in folders that are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write(folder, *lines):
    """The operator's result file of an H200 in `folder`."""
    write_lines(result_file(folder, "attention", "NVIDIA H200"), *lines)
