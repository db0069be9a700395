"""The picture: error against time at one length, a panel for each source of features."""

from pathlib import Path

import pandas as pd

from runs.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, Look, legend, look, panels, save
from runs.neighbours.approximations.forms import FORMS, MEAN
from runs.neighbours.approximations.measure import FUSED, SOFTMAX, errors_and_times, times
from trainkit_gka.plots import Figure

TOKENS = 16_384
EXACT = {FUSED: look("GKA").colour, SOFTMAX: look("softmax").colour}
LOOKS = {
    "positive": Look(PURPLE),
    "positive, orthogonal": Look(PURPLE, "v", "--"),
    "trigonometric": Look(SKY),
    "trigonometric, orthogonal": Look(SKY, "v", "--"),
    "Nyström, uniform": Look(BLUE),
    "Nyström, k-means": Look(BLUE, "v", "--"),
    "window + Nyström": Look(BLUE, "s"),
    "clusters": Look(GREEN),
    "window + clusters": Look(GREEN, "s"),
    "window": Look(GREY, "s"),
    "nearest keys": Look(ORANGE, "D"),
}
PICTURE = "approximations.png"
TICKS = [10, 100, 1_000, 10_000]  # ms
CAPTION = (
    "Relative error of y (median of heads, mean of seeds) on the features that a panel names, against the time of one "
    "call. Times are of random features of one batch with 3 heads of 64 channels in every panel, with a causal mask "
    "where the panel's features have one; errors are of the named features, whose heads may be narrower. A line has a "
    "form's numbers of features or landmarks, fewest on the left; the window has none. Dashed: the exact fused "
    "operator and fused softmax attention, in turns with the forms. Dotted: the error of the mean of all that a query "
    "sees. Left of the dashed lines is faster."
)


def points(path: Path, tokens: int = TOKENS) -> pd.DataFrame:
    """What is drawn: a line for every source, form and size with an error and a time, the mean's too."""
    shown = errors_and_times(path)
    return shown[(shown.tokens == tokens) & shown.form.isin(FORMS)]


def draw(path: Path, folder: Path, tokens: int = TOKENS) -> Figure | None:
    """Draw PICTURE of the file of results into `folder`; None if no source has both errors and times at this length."""
    shown, exact = points(path, tokens), times(path)
    if shown.empty:
        return None
    exact = exact[exact.tokens == tokens].drop_duplicates(["form", "causal"], keep="last").set_index("form")
    sources = list(shown.source.unique())
    columns = min(len(sources), 3)
    figure, axes = panels(-(-len(sources) // columns), columns, 1.6 + 2.8 * (-(-len(sources) // columns)))
    for axis in axes[len(sources) :]:
        axis.set_visible(False)
    for axis, source in zip(axes, sources):
        panel = shown[shown.source == source]
        for form, line in panel[panel.form != MEAN].groupby("form"):
            line = line.sort_values("size")
            axis.plot(line.median_ms, line.error, **LOOKS[form](form, linewidth=1))
        for form, colour in EXACT.items():
            for number, ms in enumerate(exact[exact.causal == panel.causal.iloc[0]].median_ms.get([form], [])):
                axis.axvline(ms, color=colour, linestyle="--", linewidth=1.3, label="_" * number + form)
        for error in panel[panel.form == MEAN].error:
            axis.axhline(error, color="grey", linestyle=":", linewidth=1.3, label=MEAN)
        axis.set(xscale="log", yscale="log", xlabel="ms", ylim=(1e-3, 100))
        limits = axis.get_xlim()
        axis.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS])
        axis.set_xlim(limits)
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_title(source, fontsize=10)
    for axis in axes[::columns]:
        axis.set_ylabel("relative error of y")
    legend(figure, axes, 4)
    title = f"Approximations of GKA at N = {tokens:,}: error against time"
    names = {"source": "features of", "form": "form", "size": "size", "median_ms": "ms", "error": "error"}
    drawn = shown[shown.form != MEAN].rename(columns=names)[[*names.values()]]
    return Figure(save(figure, title, folder / PICTURE), title, CAPTION, drawn.to_dict("records"))
