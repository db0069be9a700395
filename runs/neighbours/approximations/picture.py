"""The picture: error against time at one length, a panel for each source of features."""

from pathlib import Path

import pandas as pd

from runs.neighbours.approximations.forms import FORMS, MEAN
from runs.neighbours.approximations.measure import FUSED, SOFTMAX, errors_and_times, times
from trainkit_gka.plots import Figure, save, subplots

TOKENS = 16_384
PICTURE = "approximations.png"
TICKS = [number * 10**power for power in range(5) for number in (1, 2, 5)]  # ms
CAPTION = (
    "Relative error of y (median of heads, mean of seeds) on the features that a panel names, against the time of one "
    "call. Times are of random features of one batch with 3 heads of 64 channels in every panel, with a causal mask "
    "where the panel's features have one; errors are of the named features, whose heads may be narrower. Points along "
    "a line, from left to right: {sizes} features or landmarks; the window has none. Dashed: the exact fused operator "
    "and fused softmax attention, in turns with the forms. Dotted: the error of the mean of all that a query sees. "
    "Left of the dashed lines is faster."
)


def points(path: Path, tokens: int = TOKENS) -> pd.DataFrame:
    """What is drawn: a line for every source, form and size with an error and a time, the mean's too."""
    shown = errors_and_times(path)
    return shown[(shown.tokens == tokens) & shown.form.isin(FORMS)]


def caption(shown: pd.DataFrame) -> str:
    """How to read the picture, with the sizes that it has; empty if nothing is drawn."""
    sizes = sorted(set(shown["size"]) - {0})
    return CAPTION.format(sizes=" and ".join(f"{size:,}" for size in sizes)) if len(shown) else ""


def draw(path: Path, folder: Path, tokens: int = TOKENS) -> Figure | None:
    """Draw PICTURE of the file of results into `folder`; None if no source has both errors and times at this length."""
    shown, exact = points(path, tokens), times(path)
    if shown.empty:
        return None
    exact = exact[(exact.tokens == tokens) & exact.form.isin((FUSED, SOFTMAX))]
    sources = shown.source.unique()
    figure, axes = subplots(1, len(sources), figsize=(2.6 + 3.6 * len(sources), 4.2), squeeze=False)
    for axis, source in zip(axes[0], sources):
        panel = shown[shown.source == source]
        for number, (form, line) in enumerate(panel[panel.form != MEAN].groupby("form")):
            style = dict(color=f"C{number % 10}", marker="os^D"[number // 10], markersize=4, linewidth=1, label=form)
            axis.plot("median_ms", "error", data=line.sort_values("size"), **style)
        for _, line in exact[exact.causal == panel.causal.iloc[0]].iterrows():
            colour = "black" if line.form == FUSED else "grey"
            axis.axvline(line.median_ms, color=colour, linestyle="--", linewidth=1, label=line.form)
        for error in panel[panel.form == MEAN].error:
            axis.axhline(error, color="grey", linestyle=":", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="ms", ylim=(1e-3, 100))
        limits = axis.get_xlim()
        axis.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS], fontsize=8)
        axis.set_xlim(limits)
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_title(source, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("relative error of y")
    axes[0, -1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1))
    title = f"Approximations of GKA at N = {tokens:,}: error against time"
    figure.suptitle(title, fontsize=10)
    columns = {"source": "features of", "form": "form", "size": "size", "median_ms": "ms", "error": "error"}
    drawn = shown[shown.form != MEAN].rename(columns=columns)[[*columns.values()]]
    return Figure(save(figure, folder / PICTURE), title, caption(shown), drawn.to_dict("records"))
