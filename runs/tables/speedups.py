"""One picture of speed over machines: how many times as fast GKA is as PyTorch's fastest softmax attention."""

import textwrap
from pathlib import Path
from typing import Any

import pandas as pd

from runs import frames
from runs.looks import legend, look, panels, save
from runs.tables.speed import GKA, SOFTMAX, by, label
from trainkit_gka.plots import Figure

PICTURE = "speed.png"
TITLE = "How many times as fast GKA is as softmax attention on CPUs, in float32"
# The cases of the picture, the operator alone and then whole models, all float32; the tables have the others.
BOTH, STEP = "forward+backward", "training"
SHOWN = {
    "attention": [*((case, BOTH) for case in ("vit-ti", "vit-b", "lm-full", "lm-short-window")),
                  ("decode-b8-1024", "forward")],
    "deit": [(case, phase) for case in ("deit-ti-b8", "deit-b-b8") for phase in ("inference", STEP)],
    "gpt": [("d4", STEP), ("d8", STEP)],
}  # fmt: skip
PHASES = {BOTH: "forward + backward", STEP: "training step"}
MARKERS = "osD^vP"


def speedups(results: Path | None = None) -> pd.DataFrame:
    """A row for every case of SHOWN that was timed on a CPU: case, machine, threads, and the ratio of the times of
    softmax's fastest and ours. Each ratio is of one comparison, timed in turns.
    """
    rows = []
    for benchmark, cases in SHOWN.items():
        lines = frames.bench(benchmark, results)
        lines = lines[lines.threads.notna()]
        for case, phase in cases:
            for machine, own in by(lines[(lines.case == case) & (lines.phase == phase)], "machine"):
                name = f"{label(own.iloc[0])}, {PHASES.get(phase, phase)}"
                ratios = frames.ratios(own).items()
                rows += [[name, benchmark, machine, int(threads), ratio] for threads, ratio in ratios]
    return pd.DataFrame(rows, columns=["case", "benchmark", "machine", "threads", "ratio"])


def draw(frame: pd.DataFrame, width: float | None = None) -> Any:
    """The figure: a line for every case, a marker for every machine, open with one thread."""
    cases = list(dict.fromkeys(frame.case))
    wrap = 44 if width is None else 26
    lines = [textwrap.fill(case, wrap) for case in cases]
    figure, [axis] = panels(1, 1, 1.6 + sum(0.2 + 0.16 * (1 + line.count("\n")) for line in lines))
    if width:
        figure.set_figwidth(width)
    colour, markers = look(GKA).colour, dict(zip(dict.fromkeys(frame.machine), MARKERS))
    most = frame.groupby("machine").threads.max()
    for (machine, threads), own in frame.groupby(["machine", "threads"], sort=False):
        name = machine.replace("(R)", "") if threads == most[machine] else "_"  # one entry of the legend a machine
        heights = [cases.index(case) + (0.14 if threads == 1 else -0.14) for case in own.case]
        face = "none" if threads == 1 else colour
        style = dict(linestyle="none", color=colour, markerfacecolor=face, markersize=6.5)
        axis.plot(own.ratio, heights, markers[machine], label=name, **style)
    axis.axvline(1, color="#8c8c8c", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(cases)), lines)
    axis.set(ylim=(len(cases) - 0.5, -0.5))
    axis.set_xlabel(f"time of {SOFTMAX} / time of {GKA}\n(open: one thread, filled: two)")
    axis.set_xlim(min(0.9, axis.get_xlim()[0]), None)
    axis.xaxis.set_major_formatter("{x:g}×")
    legend(figure, [axis], 2 if width is None else 1)
    return figure


def caption(frame: pd.DataFrame) -> str:
    """What the picture shows, and its smallest and largest numbers."""
    models = frame[frame.benchmark != "attention"].ratio
    whole = f" of whole models {models.min():.2f} to {models.max():.2f} times as fast;" if len(models) else ""
    return (
        f"Right of the dashed line {GKA} is faster:{whole} of all cases {frame.ratio.min():.2f} to "
        f"{frame.ratio.max():.2f} times. Float32, medians, both timed in turns in one process; {SOFTMAX} is "
        "the fastest attention that torch has for the case. Open markers: one thread."
    )


def picture(folder: Path, results: Path | None = None) -> Figure | None:
    """Draw PICTURE into the folder; None without measurements."""
    frame = speedups(results)
    if frame.empty:
        return None
    return Figure(save(draw(frame), TITLE, folder / PICTURE), TITLE, caption(frame), frame.to_dict("records"))
