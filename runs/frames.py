"""The result files as pandas frames: a row for every line, with its facts, settings and measurements as columns.

This is the one reader of result files for tables. A damaged line is an error that names the file and the line.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd

from trainkit_gka.cli import UserError
from trainkit_gka.results import with_chip

RESULTS = Path(__file__).resolve().parent / "results"
FACTS = ("date", "commit", "hardware", "torch")


def records(path: Path, *names: str, kind: str = "") -> list[dict[str, Any]]:
    """The lines of a result file, of one kind if it is given; none if the file does not exist.

    names: settings, measurements and fields that every line must have. Raises UserError for a line without them or
    without its facts.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        try:
            record = json.loads(text)
        except ValueError:
            record = None
        record = record if isinstance(record, dict) else {"kind": kind}  # without any fact
        if kind and record.get("kind") != kind:
            continue
        known = record.get("config", {}) | record.get("metrics", {}) | record
        if missing := [name for name in (*FACTS, "metrics", *names) if name not in known]:
            advice = f"delete the line and measure again, or git checkout {path}"
            raise UserError(f"{path}, line {number}: has no {', '.join(missing)}; {advice}")
        lines.append(record)
    return lines


def frame(path: Path, *columns: str, kind: str = "") -> pd.DataFrame:
    """A row for each of `records`: its facts, settings and measurements as columns, and the record in `record`."""
    return pd.DataFrame(
        [
            {
                **{name: record[name] for name in FACTS},
                **record.get("config", {}),
                **record["metrics"],
                "record": record,
            }
            for record in records(path, *columns, kind=kind)
        ]
    )


def bench(name: str, results: Path | None = None, quick: bool = False) -> pd.DataFrame:
    """The newest comparison of every case and phase of a benchmark, on every machine with every number of threads.

    A comparison is what was timed in turns in one process: ratios are taken inside one alone. quick: whether those of
    --quick runs count too. Columns: machine, the hardware without its threads; eager, whether other candidates of the
    comparison are compiled and this one is not; flops, of a token's training or an image's forward pass.
    """
    columns = ("case", "phase", "role", "group", "family", "kernel", "computed_in", "compiled", "status", "quick")
    parts = []
    for path in sorted((results or RESULTS).glob(f"bench_{name}_*.jsonl")):
        lines = frame(path, *columns, kind=f"bench_{name}")
        if lines.empty:
            continue
        lines = lines if quick else lines[~lines.quick]
        if lines.empty:
            continue
        comparison = lines.groupby(["case", "phase"], sort=False)
        newest = lines[lines.group == comparison.group.transform("last")].assign(file=path.name)
        parts.append(newest.assign(place=comparison.ngroup()).sort_values("place", kind="stable"))
    if not parts:
        return pd.DataFrame(columns=[*FACTS, *columns, "form", "threads", "machine", "eager", "flops", "record"])
    lines = pd.concat(parts, ignore_index=True)
    lines["eager"] = ~lines.compiled & lines.groupby("group").compiled.transform("any")
    lines["machine"] = lines.hardware.map(with_chip).str.replace(r", \d+ threads?$", "", regex=True)
    known = [count for count in ("flops_per_token", "flops_per_image") if count in lines]
    lines["flops"] = lines[known].bfill(axis=1).iloc[:, 0] if known else None
    return lines


def sides(lines: pd.DataFrame) -> pd.DataFrame:
    """The fastest correct line of each role, by number of threads (0 for a GPU). lines: of one case and phase.

    Columns are pairs: a column of `lines`, and a role.
    """
    right = lines[lines.status == "ok"].fillna({"threads": 0})
    fastest = right.loc[right.groupby(["threads", "role"]).median_ms.idxmin()]
    return fastest.pivot(index="threads", columns="role")


def ratios(lines: pd.DataFrame) -> pd.Series:
    """The baseline's time over ours, by threads as in `sides`; left out where one of them was never correct."""
    times = sides(lines).get("median_ms", pd.DataFrame()).reindex(columns=["baseline", "ours"])
    return (times.baseline / times.ours).dropna()
