"""Where the tables' numbers come from: the result files, and the line that names commit and hardware."""

from runs.bench import results as bench_results
from runs.demo.language import VARIANTS, run_tag
from trainkit_gka.progress import read_lines
from trainkit_gka.results import hardware_of

RESULTS = bench_results.RESULTS


def measured(records: dict | list[dict], file: str) -> str:
    """The line under a table: when, where and of which commits its numbers are, of one record or of all of them."""
    by_machine: dict[str, list[dict]] = {}
    for record in [records] if isinstance(records, dict) else records:
        by_machine.setdefault(f"{hardware_of(record)}, torch {record['torch']}", []).append(record)
    parts = []
    for machine, rows in by_machine.items():
        days, commits = sorted({row["date"][:10] for row in rows}), list(dict.fromkeys(row["commit"] for row in rows))
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        parts.append(f"{when} at commit{'s' * (len(commits) > 1)} {', '.join(commits)} on {machine}")
    return f"\nMeasured {'; '.join(parts)} (`runs/results/{file}`)."


def table(headings: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A markdown table; the first `left` columns are text, the others numbers."""
    alignment = "|---" * left + "|---:" * (len(headings) - left) + "|"
    return "\n".join([line(headings), alignment, *map(line, rows)])


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def language_records() -> dict[str, dict]:
    """Label -> the record of its run, for the models that today's demo trains."""
    records = {record["config"]["model_tag"]: record for record in read_lines(RESULTS / "demo.jsonl")}
    tags = {variant.label: run_tag(name) for name, variant in VARIANTS.items()}
    return {label: records[tag] for label, tag in tags.items() if tag in records}


def vision_records() -> dict[str, list[dict]]:
    """Label -> the records of its runs, a seed each."""
    records: dict[str, list[dict]] = {}
    for record in read_lines(RESULTS / "demo_vision.jsonl"):
        records.setdefault(record["label"], []).append(record)
    return records


def benchmarks(name: str) -> dict[str, dict]:
    """Hardware -> the newest comparisons of the benchmark `name`."""
    prefix = f"bench_{name}_"
    files = sorted(RESULTS.glob(f"{prefix}*.jsonl"))
    return {
        hardware: bench_results.load(RESULTS, name, hardware)
        for hardware in (path.stem.removeprefix(prefix) for path in files)
    }
