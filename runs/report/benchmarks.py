"""The benchmarks of runs/results, for each hardware: GKA against the fastest softmax attention, speed over length."""

from pathlib import Path

import pandas as pd

from gka.kinds import KINDS
from runs.bench import report, results
from runs.bench.results import Comparison
from runs.figures import variants
from runs.frames import RESULTS
from runs.report.blocks import Picture
from runs.report.charts import Series, bars, lines
from runs.table import Table
from runs.tables.speed import label

BENCHMARKS = ("deit", "gpt", "attention")
SWEEP = "sweep-"
GKA, SOFTMAX = KINDS["gka"].label, KINDS["softmax"].label
Compared = dict[tuple[str, str], Comparison]


def hardware_slugs(folder: Path) -> list[str]:
    """The hardware of the result files, as their names say it."""
    paths = [path for name in BENCHMARKS for path in folder.glob(f"bench_{name}_*.jsonl")]
    return sorted({path.stem.split("_", 2)[2] for path in paths})


def pictures(folder: Path = RESULTS) -> dict[str, list[Picture]]:
    """For each hardware a chart of ratios, and one of speed over length for each phase that was swept."""
    drawn = {}
    for slug in hardware_slugs(folder):
        compared: Compared = {}
        for name in BENCHMARKS:
            compared |= results.load(folder, name, slug)
        swept = {key: comparison for key, comparison in compared.items() if key[0].startswith(SWEEP)}
        charts = ratios({key: value for key, value in compared.items() if key not in swept}) + sweeps(swept)
        if charts:
            drawn[next(iter(compared.values())).lines[0]["hardware"]] = charts
    return drawn


def ratios(compared: Compared) -> list[Picture]:
    """A bar for every comparison: how many times as fast GKA is."""
    both = {in_words(comparison): comparison for comparison in compared.values() if comparison.ratio()}
    if not both:
        return []
    values = {name: comparison.ratio() for name, comparison in both.items()}
    rows = []
    for name, comparison in both.items():
        sides = [comparison.fastest(role) for role in ("baseline", "ours")]
        cells = [f"{side['metrics']['median_ms']:,.4g} ({side['config']['candidate']})" for side in sides]
        rows.append([name, *cells, f"{values[name]:.2f}"])
    hardware = next(iter(both.values())).lines[0]["hardware"]
    title = f"Speed of {GKA}, {hardware}"
    table = Table.of(["", f"{SOFTMAX}, ms", f"{GKA}, ms", "ratio"], rows, title=title)
    caption = (
        f"Time of the fastest {SOFTMAX} attention over that of {GKA}, medians, both timed in turns in one process. "
        f"Right of the dashed line {GKA} is faster. {report.provenance(both.values())}"
    )
    return [bars(title, caption, f"{SOFTMAX} time / {GKA} time", values, table, line_at=1.0)]


def in_words(comparison: Comparison) -> str:
    """The case and phase of a comparison, and its dtype where it is not float32."""
    line = pd.Series(comparison.lines[0]["config"])
    dtype = "" if line["dtype"] == "float32" else line["dtype"]
    return ", ".join(filter(None, [label(line), comparison.phase.replace("+", " + "), dtype]))


def sweeps(compared: Compared) -> list[Picture]:
    """Tokens per second of the operator against the length of a sequence, a chart for each phase."""
    pictures = []
    for phase, frame in results.swept(compared.values()).groupby("phase", sort=False):
        looks = {}
        for family, own in frame.groupby("family"):
            looks |= variants(KINDS[family].label, own.candidate.unique())
        series = [
            Series(name, list(zip(own.tokens, own.speed)), looks[name], marker=True)
            for name, own in frame.groupby("candidate")
        ]
        chosen = [comparison for comparison in compared.values() if comparison.phase == phase]
        title = f"Operator, {phase}, {chosen[0].lines[0]['hardware']}"
        caption = f"Equal tokens at every length, one layer, no projections. {report.provenance(chosen)}"
        pictures.append(lines(title, caption, "tokens in a sequence", "tokens per second", series, logarithmic=True))
    return pictures
