"""The benchmarks' tables, targets and pictures, from their result files.

    python -m runs.bench.report                              of this machine's hardware
    python -m runs.bench.report --hardware "NVIDIA H200"     of another's

Prints a line for every comparison, why candidates were not timed, and the targets with pass or miss. Writes a page with every candidate
(OUT/bench_<hardware>.md) and, where there is something to draw, pictures beside it. Runs made with --quick count only with --quick.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runs.bench import plots as bench_plots
from runs.bench.results import Comparison, load, slug
from runs.bench.timing import BenchConfig
from trainkit.cli import UserError, run
from trainkit.distributed import setup
from trainkit.progress import console
from trainkit.results import describe_hardware

WHATS = {"attention": "The operator", "deit": "Vision transformers", "gpt": "Language models"}
UNITS = {"attention": "", "deit": "images/s", "gpt": "tokens/s"}
WIDE = 160
QUIET = 0.1  # cores
Comparisons = dict[tuple[str, str], Comparison]


@dataclass
class ReportConfig(BenchConfig):
    """Print the benchmarks' tables and targets, and draw them, from the files of one hardware."""

    hardware: str = ""
    """its name or the end of its files' names; empty = this machine's device"""
    out: Path = Path("out/bench")
    """folder for the page and the pictures"""


@dataclass
class Target:
    """A promise and what was measured. `at_most`: smaller is better."""

    what: str
    wanted: float
    measured: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "pass" if (self.measured <= self.wanted if self.at_most else self.measured >= self.wanted) else "miss"


# Targets


def best(deit: Comparisons, size: str, role: str) -> float | None:
    """Images per second of a size's inference at its best batch, among the lines of `role`."""
    lines = [
        c.fastest(role)
        for (case, phase), c in deit.items()
        if case.startswith(f"deit-{size}-") and phase == "inference"
    ]
    return max((line["metrics"]["items_per_second"] for line in lines if line), default=None)


def over(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def ratio(
    comparisons: Comparisons, case: str, phase: str, role: str = "baseline", metric: str = "median_ms"
) -> float | None:
    """The fastest of `role` over ours in one comparison; None if it was not made."""
    found = comparisons.get((case, phase))
    return found.ratio(role, metric) if found else None


def flops_ratio(comparison: Comparison | None) -> float | None:
    """FLOPs per token of the softmax model over GKA's."""
    found = (
        {line["config"]["role"]: line["metrics"].get("flops_per_token") for line in comparison.lines}
        if comparison
        else {}
    )
    return over(found.get("baseline"), found.get("ours"))


def targets(results: dict[str, Comparisons], cuda: bool) -> list[Target]:
    """The project's promises for this kind of device; ratios are of the fastest softmax over ours, in time."""
    attention, deit, gpt = results["attention"], results["deit"], results["gpt"]
    if not cuda:
        flops = flops_ratio(gpt.get(("d4", "training")))
        return [
            Target("DeiT-Ti forward", 1.15, over(best(deit, "ti", "ours"), best(deit, "ti", "baseline"))),
            Target(
                "d4 training step, 0.95 x its FLOPs ratio",
                0.95 * (flops or 1.0),
                ratio(gpt, "d4", "training") if flops else None,
            ),
        ]
    found = []
    for size in ("ti", "s", "b"):
        for phase, wanted in (("forward", 1.5), ("forward+backward", 1.7)):
            found.append(
                Target(f"operator, DeiT-{size.title()}, {phase}", wanted, ratio(attention, f"vit-{size}", phase))
            )
        found.append(
            Target(
                f"operator, DeiT-{size.title()}, against eager GKA",
                5,
                ratio(attention, f"vit-{size}", "forward+backward", "eager"),
            )
        )
    for case in ("lm-full", "lm-window"):
        for phase, wanted in (("forward", 1.0), ("forward+backward", 0.9)):
            found.append(
                Target(f"operator, d20 {case.removeprefix('lm-')}, {phase}", wanted, ratio(attention, case, phase))
            )
    found.append(
        Target("operator, d20 full, against eager GKA", 10, ratio(attention, "lm-full", "forward+backward", "eager"))
    )
    for batch, wanted in ((1, 1.25), (32, 1.6)):
        for tokens in (1024, 2048, 8192):
            found.append(
                Target(
                    f"decode, batch {batch}, {tokens} tokens",
                    wanted,
                    ratio(attention, f"decode-b{batch}-{tokens}", "forward"),
                )
            )
    for size in ("ti", "s", "b"):
        name = f"DeiT-{size.title()}"
        found.append(
            Target(
                f"{name}, inference at its best batch",
                1.25,
                over(best(deit, size, "ours"), best(deit, size, "baseline")),
            )
        )
        for batch in (64, 128):
            case = (f"deit-{size}-b{batch}", "training")
            smaller = over(1.0, ratio(deit, *case, metric="peak_mib"))
            found += [Target(f"{name}, training step at {batch}", 1.3, ratio(deit, *case)),
                      Target(f"{name}, training step at {batch}, peak memory", 0.85, smaller, at_most=True)]  # fmt: skip
    return [*found, Target("d20 training step", 1.18, ratio(gpt, "d20", "training"))]


# Tables


def number(value: float | None, form: str = "{:.4g}") -> str:
    return "" if value is None else form.format(value)


def times(value: float | None) -> str:
    return number(value, "{:.2f}x")


def summary_rows(what: str, comparisons: Iterable[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Headings and a row for every comparison; in brackets which softmax kernel, and which of our implementations."""
    unit = UNITS[what]
    headings = [
        "",
        *(f"{side} {measure}" for side in ("softmax", "GKA") for measure in (("ms", unit) if unit else ("ms",))),
        "speed-up",
        "memory",
    ]
    headings += {"attention": ["over eager"], "gpt": ["FLOPs ratio"]}.get(what, [])
    rows = []
    for comparison in comparisons:
        row = [f"{comparison.case} {comparison.phase}"]
        for role in ("baseline", "ours"):
            line = comparison.fastest(role)
            name = line["config"]["candidate"].removeprefix("softmax").removeprefix("gka").strip(" -") if line else ""
            row.append(number(line["metrics"]["median_ms"]) + (f" ({name})" if name else "") if line else "none")
            row += [number(line["metrics"]["items_per_second"] if line else None, "{:,.0f}")] if unit else []
        row += [times(comparison.ratio()), times(over(1.0, comparison.ratio(metric="peak_mib")))]
        row += {"attention": [times(comparison.ratio("eager"))], "gpt": [times(flops_ratio(comparison))]}.get(what, [])
        rows.append(row)
    said = [place for place in range(len(headings)) if any(row[place] for row in rows)]  # no memory on a CPU
    return [headings[place] for place in said], [[row[place] for place in said] for row in rows]


def reasons(comparisons: Iterable[Comparison]) -> list[str]:
    """Why lines have no time or were timed unlike the others, each reason once with where it was met."""
    met: dict[str, list[str]] = {}
    for comparison in comparisons:
        where = f"{comparison.case} {comparison.phase}"
        for line in comparison.lines:
            if line["metrics"]["status"] != "ok":
                told = f"{line['config']['candidate']} {line['metrics']['status']}: {line['metrics']['reason']}"
                met.setdefault(told, []).append(where)
        if unlike := comparison.unlike():
            met.setdefault(f"timed {unlike}", []).append(where)
    return [
        f"{told} ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})"
        for told, places in met.items()
    ]


def disturbance(comparisons: Iterable[Comparison]) -> list[str]:
    """A warning if other processes worked while a CPU was timed."""
    met = [
        max((line["metrics"].get("elsewhere") or 0.0 for line in comparison.lines), default=0.0)
        for comparison in comparisons
    ]
    busy = sum(cores > QUIET for cores in met)
    if not busy:
        return []
    return [
        f"other processes used up to {max(met):.1f} cores while {busy} of these {len(met)} were timed: measure again on a quiet machine"
    ]


def provenance(comparisons: Iterable[Comparison]) -> str:
    """Where a table's numbers come from."""
    lines = [line for comparison in comparisons for line in comparison.lines]
    facts = {key: ", ".join(sorted({line[key] for line in lines})) for key in ("hardware", "commit", "torch")}
    dates = sorted(line["date"][:10] for line in lines)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"Measured {when} at commit {facts['commit']} on {facts['hardware']}, torch {facts['torch']}."


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (headings, ["---"] * len(headings), *rows)])


def show(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """A table on the console; a file or a pipe gets it in full width."""
    table = Table(title=f"\n{title}")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    (console if console.is_terminal else Console(width=WIDE)).print(table)


def candidate_rows(comparisons: Iterable[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Every candidate of every comparison, failed ones too."""
    headings = [
        "case",
        "phase",
        "candidate",
        "role",
        "median ms",
        "20 % to 80 %",
        "samples",
        "first call s",
        "peak MiB",
        "remark",
    ]
    rows = []
    for comparison in comparisons:
        for line in comparison.lines:
            config, metrics = line["config"], line["metrics"]
            spread = (
                f"{number(metrics['low_ms'])} to {number(metrics['high_ms'])}"
                if metrics["median_ms"] is not None
                else ""
            )
            first = number(metrics["first_ms"] / 1e3 if metrics["first_ms"] is not None else None, "{:.2f}")
            remark = f"{metrics['status']}: {metrics['reason']}" if metrics["status"] != "ok" else metrics["note"]
            rows.append([comparison.case, comparison.phase, config["candidate"], config["role"], number(metrics["median_ms"]), spread, str(metrics["samples"]),
                         first, number(metrics["peak_mib"], "{:,.1f}"), remark.replace("|", "\\|")])  # fmt: skip
    return headings, rows


def target_rows(found: list[Target]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [t.what, f"{'<=' if t.at_most else '>='} {t.wanted:.2f}", number(t.measured, "{:.2f}"), t.verdict]
        for t in found
    ]
    return ["target", "wanted", "measured", ""], rows


def main(config: ReportConfig) -> None:
    hardware = config.hardware or describe_hardware(setup(config.device_type).device)
    results = {what: load(config.results, what, hardware, config.quick) for what in WHATS}
    if not any(results.values()):
        quick = "" if config.quick else " (runs made with --quick count only with --quick)"
        raise UserError(f"{config.results} has no benchmark of {hardware}{quick}; make bench makes one")
    page = []
    for what, comparisons in results.items():
        if comparisons:
            headings, rows = summary_rows(what, comparisons.values())
            show(WHATS[what], headings, rows)
            remarks = reasons(comparisons.values()) + disturbance(comparisons.values())
            for remark in remarks:
                console.print(f"  {remark}", highlight=False, markup=False)
            source = provenance(comparisons.values())
            console.print(source, highlight=False, markup=False)
            page += [f"## {WHATS[what]}", markdown(headings, rows), *(f"- {remark}" for remark in remarks), source,
                     "Every candidate:", markdown(*candidate_rows(comparisons.values()))]  # fmt: skip
    # A processor is described with its number of threads; an accelerator is not.
    found = targets(results, cuda=not slug(hardware).endswith("-threads"))
    headings, rows = target_rows(found)
    show("Targets: the fastest softmax attention over GKA", headings, rows)
    console.print(
        ", ".join(
            f"{sum(t.verdict == verdict for t in found)} {verdict}" for verdict in ("pass", "miss", "not measured")
        )
    )
    pictures = bench_plots.draw(results["attention"], hardware, config.out)
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / f"bench_{slug(hardware)}.md"
    path.write_text("\n\n".join([f"# Benchmarks on {hardware}", *page, "## Targets", markdown(headings, rows)]) + "\n")
    console.print(
        f"Every candidate: {path}. Pictures: {', '.join(map(str, pictures)) or 'none'}.", highlight=False, markup=False
    )


if __name__ == "__main__":
    run(main, ReportConfig)
