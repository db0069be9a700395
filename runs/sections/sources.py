"""Where the tables' numbers come from: the result files, and the line that names commit and hardware."""

from runs.bench import results as bench_results
from runs.demo.language import VARIANTS, run_tag
from trainkit.progress import read_lines
from trainkit.results import hardware_of

RESULTS = bench_results.RESULTS


def measured(record: dict, file: str) -> str:
    """The line under a table: when, where and of which commit its numbers are."""
    where = f"at commit {record['commit']} on {hardware_of(record)}, torch {record['torch']}"
    return f"\nMeasured {record['date'][:10]} {where} (`runs/results/{file}`)."


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
