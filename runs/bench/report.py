"""The benchmarks' tables and pictures, from their result files.

    python -m runs.bench.report                              of this machine's hardware, every number of threads
    python -m runs.bench.report --hardware "NVIDIA H200"     of another's

Prints a line for every comparison and why candidates were not timed. Writes a page with
every candidate (OUT/bench_<hardware>.md) and, where there is something to draw, pictures beside it. Runs made with
--quick count only with --quick.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gka.kinds import KINDS
from runs.bench import plots
from runs.bench.config import BenchConfig
from runs.bench.results import Comparison, load, slug
from runs.table import Row, Table
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import console
from trainkit_gka.results import describe_hardware, is_processor

TITLES = {
    "attention": "The operator",
    "deit": "Vision transformers",
    "gpt": "Language models",
}
UNITS = {"attention": "", "deit": "images/s", "gpt": "tokens/s"}
WHOLE_MODELS = ("deit", "gpt")
SOFTMAX, GKA = KINDS["softmax"].label, KINDS["gka"].label
QUIET_CORES = 0.1  # this much work of other processes disturbs nothing


@dataclass
class ReportConfig(BenchConfig):
    """Print the benchmarks' tables, and draw them, from the files of one hardware."""

    hardware: str = ""
    """Hardware to report: its name, or the end of its files' names; empty = this machine's device, a CPU with every
    number of threads that was timed."""
    out: Path = Path("out/bench")
    """Folder for the page and the pictures."""


def over(top: float | None, bottom: float | None) -> float | None:
    """top / bottom; None if either was not measured."""
    return top / bottom if top is not None and bottom else None


def flops_ratio(comparison: Comparison | None) -> float | None:
    """FLOPs of the softmax model over GKA's, for a token's training or an image's forward pass."""
    lines = comparison.lines if comparison else []
    counts = ("flops_per_token", "flops_per_image")
    flops = {
        line["config"]["role"]: next((line["metrics"][name] for name in counts if line["metrics"].get(name)), None)
        for line in lines
    }
    return over(flops.get("baseline"), flops.get("ours"))


def number(value: float | None, form: str = "{:.4g}") -> str:
    return "" if value is None else form.format(value)


def times(value: float | None) -> str:
    return number(value, "{:.2f}x")


def summary_table(name: str, comparisons: Iterable[Comparison], notes: Row, source: str) -> Table:
    """A row for every comparison; in brackets which softmax kernel, and which of our implementations."""
    unit = UNITS[name]
    measures = ("ms", unit) if unit else ("ms",)
    headings = ["", *(f"{side} {measure}" for side in (SOFTMAX, GKA) for measure in measures), "speed-up", "memory"]
    headings += {"attention": ["over eager"], "deit": ["over unfused"]}.get(name, [])
    headings += ["FLOPs ratio"] if name in WHOLE_MODELS else []
    rows = []
    for comparison in comparisons:
        row = [f"{comparison.case} {comparison.phase}"]
        for role in ("baseline", "ours"):
            line = comparison.fastest(role)
            row.append(number(line["metrics"]["median_ms"]) + in_brackets(line) if line else "none")
            row += [number(line["metrics"]["items_per_second"] if line else None, "{:,.0f}")] if unit else []
        row += [times(comparison.ratio()), times(over(1.0, comparison.ratio(metric="peak_mib")))]
        last = {"attention": comparison.ratio("eager"), "deit": comparison.ratio("unfused")}
        row += [times(last[name])] if name in last else []
        row += [times(flops_ratio(comparison))] if name in WHOLE_MODELS else []
        rows.append(row)
    filled = [place for place in range(len(headings)) if any(row[place] for row in rows)]  # a CPU has no memory column
    chosen = [[row[place] for place in filled] for row in rows]
    return Table.of([headings[place] for place in filled], chosen, title=TITLES[name], notes=notes, sources=[source])


def in_brackets(line: dict) -> str:
    """The candidate's kernel or implementation, without its kind."""
    name = line["config"]["candidate"].removeprefix("softmax").removeprefix("gka").strip(" ,-")
    return f" ({name})" if name else ""


def reasons(comparisons: Iterable[Comparison]) -> list[str]:
    """Why lines have no time or were timed unlike the others, each reason once with where it was met."""
    places: dict[str, list[str]] = {}
    for comparison in comparisons:
        where = f"{comparison.case} {comparison.phase}"
        for line in comparison.lines:
            if line["metrics"]["status"] != "ok":
                reason = f"{line['config']['candidate']} {line['metrics']['status']}: {line['metrics']['reason']}"
                places.setdefault(reason, []).append(where)
        if unlike := comparison.unlike():
            places.setdefault(f"timed {unlike}", []).append(where)
    more = {reason: f" and {len(where) - 1} more" if len(where) > 1 else "" for reason, where in places.items()}
    return [f"{reason} ({where[0]}{more[reason]})" for reason, where in places.items()]


def disturbance(comparisons: Iterable[Comparison]) -> list[str]:
    """A warning if other processes worked while a CPU was timed."""
    used = [max((line["metrics"].get("elsewhere") or 0.0 for line in c.lines), default=0.0) for c in comparisons]
    disturbed = sum(cores > QUIET_CORES for cores in used)
    if not disturbed:
        return []
    others = f"other processes used up to {max(used):.1f} cores while {disturbed} of these {len(used)} were timed"
    return [f"{others}: measure again on a quiet machine"]


def provenance(comparisons: Iterable[Comparison]) -> str:
    """Where a table's numbers come from."""
    lines = [line for comparison in comparisons for line in comparison.lines]
    facts = {key: ", ".join(sorted({line[key] for line in lines})) for key in ("hardware", "commit", "torch")}
    dates = sorted(line["date"][:10] for line in lines)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} at commit {facts['commit']} on {facts['hardware']}, torch {facts['torch']}."


def candidate_table(comparisons: Iterable[Comparison]) -> Table:
    """Every candidate of every comparison, failed ones too."""
    headings = ["case", "phase", "candidate", "role", "median ms", "20 % to 80 %", "samples", "first call s"]
    headings += ["peak MiB", "remark"]
    rows = []
    for comparison in comparisons:
        for line in comparison.lines:
            config, metrics = line["config"], line["metrics"]
            row = [comparison.case, comparison.phase, config["candidate"], config["role"], number(metrics["median_ms"])]
            timed = metrics["median_ms"] is not None
            row.append(f"{number(metrics['low_ms'])} to {number(metrics['high_ms'])}" if timed else "")
            first_ms = metrics["first_ms"]
            row += [str(metrics["samples"]), number(None if first_ms is None else first_ms / 1e3, "{:.2f}")]
            remark = metrics["note"] if metrics["status"] == "ok" else f"{metrics['status']}: {metrics['reason']}"
            rows.append([*row, number(metrics["peak_mib"], "{:,.1f}"), remark])
    return Table.of(headings, rows, title="Every candidate:", words=4)


def benchmark_page(name: str, comparisons: list[Comparison]) -> list[str]:
    """Print a benchmark's table; returns its part of the page."""
    remarks = [f"- {remark}" for remark in reasons(comparisons) + disturbance(comparisons)]
    table = summary_table(name, comparisons, remarks, provenance(comparisons))
    table.show()
    table.title = f"## {table.title}"
    return [table.markdown(), candidate_table(comparisons).markdown()]


def same_machine(results: Path, hardware: str) -> list[str]:
    """`hardware`, and if it is a processor, the slugs of its files with other numbers of threads, fewer first."""
    if not is_processor(hardware):
        return [hardware]
    processor = re.sub(r"-\d+-threads?$", "", slug(hardware))
    files = [
        path.stem.split("_", 2)[2] for name in TITLES for path in results.glob(f"bench_{name}_{processor}-*.jsonl")
    ]
    counts = {int(found[1]): each for each in files if (found := re.fullmatch(rf"{processor}-(\d+)-threads?", each))}
    own = int(re.search(r"(\d+) threads?$", hardware)[1])
    counts[own] = hardware
    return [counts[threads] for threads in sorted(counts)]


def main(config: ReportConfig) -> None:
    own = config.hardware or describe_hardware(setup(config.device_type).device)
    places = [own] if config.hardware else same_machine(config.results, own)
    loaded = {
        hardware: {name: load(config.results, name, hardware, config.quick) for name in TITLES} for hardware in places
    }
    if not any(any(results.values()) for results in loaded.values()):
        quick = "" if config.quick else " (runs made with --quick count only with --quick)"
        raise UserError(f"{config.results} has no benchmark of {own}{quick}; make bench makes one")
    for hardware, results in loaded.items():
        if any(results.values()):
            show_hardware(hardware, results, config)


def show_hardware(hardware: str, results: dict[str, dict[tuple[str, str], Comparison]], config: ReportConfig) -> None:
    """Print and write everything of one hardware, its name or its slug."""
    page = [f"# Benchmarks on {hardware}"]
    for name, comparisons in results.items():
        if comparisons:
            page += benchmark_page(name, list(comparisons.values()))
    pictures = plots.draw(results["attention"], hardware, config.out)
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / f"bench_{slug(hardware)}.md"
    path.write_text("\n\n".join(page) + "\n")
    drawn = ", ".join(map(str, pictures)) or "none"
    console.print(f"Every candidate: {path}. Pictures: {drawn}.", highlight=False, markup=False)


if __name__ == "__main__":
    run(main, ReportConfig)
