"""The result files as pandas frames: a row for every line, with its facts, settings and measurements as columns.

This is the one reader of result files for tables. A damaged line is an error that names the file and the line.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from trainkit_gka.cli import UserError

RESULTS = Path(__file__).resolve().parent / "results"
FACTS = ("date", "commit", "hardware", "torch")


def records(path: Path, *metrics: str, kind: str = "") -> list[dict[str, Any]]:
    """The lines of a result file, of one kind if it is given; none if the file does not exist.

    metrics: measurements that every line must have. Raises UserError for a line without them or without its facts.
    """
    return [record for _, record in _numbered(path, metrics, kind)]


def _numbered(path: Path, metrics: tuple[str, ...], kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The records with the numbers of their lines, from 1."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise _damaged(path, number, "is not JSON") from None
        if not isinstance(record, dict):
            raise _damaged(path, number, "is not a record")
        if kind and record.get("kind") != kind:
            continue
        missing = [name for name in (*FACTS, "metrics") if name not in record]
        missing += [name for name in metrics if not missing and name not in record["metrics"]]
        if missing:
            raise _damaged(path, number, f"has no {', '.join(missing)}")
        yield number, record


def _damaged(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"{path}, line {number}: {reason}; delete the line and measure again, or git checkout {path}")


def frame(path: Path, *columns: str, kind: str = "") -> pd.DataFrame:
    """A row for each record: its facts, settings and measurements as columns, and the record itself in `record`.

    columns: settings or measurements that every record must have. Raises UserError as `records` does.
    """
    rows, numbers = [], []
    for number, record in _numbered(path, (), kind):
        numbers.append(number)
        config = record.get("config", {})
        row = {name: record[name] for name in FACTS} | config | record["metrics"]
        rows.append({**row, "record": record})
    lines = pd.DataFrame(rows)
    for name in columns if rows else ():
        holes = lines.index[lines[name].isna()] if name in lines else lines.index
        if len(holes):
            raise _damaged(path, numbers[holes[0]], f"has no {name}")
    return lines


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
    lines["machine"] = lines.hardware.str.replace(r", \d+ threads?$", "", regex=True)
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
