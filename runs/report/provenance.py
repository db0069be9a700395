"""What was run, on what, and with which commands: from the runs' result lines and the files in runs/results."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runs.frames import RESULTS
from runs.report.blocks import number
from runs.report.trained import TrainedRun
from runs.table import Row, Table
from trainkit_gka.progress import read_lines
from trainkit_gka.results import hardware_of, read_results

FACTS = ("hardware", "processes", "torch", "commit")
NOT_RECORDED = "not recorded"


def run_facts(runs: list[TrainedRun]) -> Table:
    """Where every run of the report was trained, as its line of a result file says."""
    rows = []
    for run in runs:
        day = str(run.result["date"])[:10] if "date" in run.result else NOT_RECORDED
        rows.append([run.name, day, *(number(fact_of(run.result, fact) or NOT_RECORDED) for fact in FACTS)])
    return Table.of(["run", "date", *FACTS], rows, title="The runs of this report", words=len(FACTS) + 2)


def file_facts(results: Path = RESULTS) -> Table:
    """What the measurements in runs/results were made on: for each file its dates, hardware, commits and versions."""
    rows = []
    for path in sorted(results.rglob("*.jsonl")):
        lines = [line for line in read_lines(path) if isinstance(line.get("config"), dict)]
        if lines:
            dates = sorted(str(line.get("date", ""))[:10] for line in lines)
            span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
            facts = [", ".join(distinct(lines, fact)) for fact in ("hardware", "torch", "commit")]
            rows.append([str(path.relative_to(results)), span, *facts, str(len(lines))])
    headings = ["file", "dates", "hardware", "torch", "commits", "lines"]
    return Table.of(headings, rows, title="The files in runs/results", words=5)


def distinct(lines: Iterable[dict[str, Any]], fact: str) -> Row:
    return sorted({str(fact_of(line, fact)) for line in lines if line.get(fact)})


def fact_of(record: dict[str, Any], fact: str) -> Any:
    """What the record says; None if it does not."""
    return hardware_of(record) if fact == "hardware" and fact in record else record.get(fact)


def commands(runs: list[TrainedRun], results: Path = RESULTS) -> list[tuple[str, list[str]]]:
    """(what they made, the commands), as they were typed: of the runs, then of the measurements."""
    trained = list(dict.fromkeys(run.result["command"] for run in runs if run.result.get("command")))
    groups = [("The runs", trained)] if trained else []
    for path in sorted(results.rglob("*.jsonl")):
        typed = list(dict.fromkeys(line["command"] for line in read_results(path) if line.get("command")))
        if typed:
            groups.append((f"runs/results/{path.relative_to(results)}", typed))
    return groups
