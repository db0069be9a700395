"""The picture: error against time at one length, a panel for each source of features."""

from pathlib import Path

from runs.neighbours.approximations.forms import FORMS
from runs.neighbours.approximations.rows import FUSED, MEAN, SOFTMAX, Approximations
from trainkit_gka.plots import Figure, save, subplots

TOKENS = 16_384
PICTURE = "approximations.png"
CAPTION = (
    "Relative error of y (median of heads, mean of seeds) on the features that a panel names, against the time of one "
    "call. Times are of random features of one batch with 3 heads of 64 channels in every panel, with a causal mask "
    "where the panel's features have one; errors are of the named features, whose heads may be narrower. Points along "
    "a line, from left to right: {sizes} features or landmarks; the window has none. Dashed: the exact fused operator "
    "and fused softmax attention, in turns with the forms. Dotted: the error of the mean of all that a query sees. "
    "Left of the dashed lines is faster."
)


def sources_of(results: Approximations, tokens: int) -> list[str]:
    """The sources that have both errors and times at this length, a panel each."""
    return [source for source in results.values("error", "source") if _points(results, source, tokens)]


def caption(results: Approximations, tokens: int = TOKENS) -> str:
    """How to read the picture, with the sizes that it has; empty if nothing is drawn."""
    points = [point for source in sources_of(results, tokens) for point in _points(results, source, tokens).values()]
    sizes = sorted({size for line in points for size, *_ in line if size})
    return CAPTION.format(sizes=" and ".join(f"{size:,}" for size in sizes)) if points else ""


def draw(results: Approximations, folder: Path, tokens: int = TOKENS) -> Figure | None:
    """Draw PICTURE into `folder`; None if no source has both errors and times at this length."""
    sources = sources_of(results, tokens)
    if not sources:
        return None
    figure, axes = subplots(1, len(sources), figsize=(2.6 + 3.6 * len(sources), 4.2), squeeze=False)
    rows = []
    for axis, source in zip(axes[0], sources):
        times = results.times(tokens, results.is_causal(source))
        for number, (form, points) in enumerate(_points(results, source, tokens).items()):
            style = dict(color=f"C{number % 10}", marker="os^D"[number // 10], markersize=4, linewidth=1, label=form)
            axis.plot([ms for _, ms, _ in points], [error for *_, error in points], **style)
            rows += [
                {"features of": source, "form": form, "size": size, "ms": ms, "error": error}
                for size, ms, error in points
            ]
        for name, colour in ((FUSED, "black"), (SOFTMAX, "grey")):
            if (name, 0) in times:
                axis.axvline(times[name, 0]["median_ms"], color=colour, linestyle="--", linewidth=1, label=name)
        mean = results.error(source, tokens, MEAN, 0)
        if mean is not None:
            axis.axhline(mean, color="grey", linestyle=":", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="ms", ylim=(1e-3, 100))
        ticks = [number * 10**power for power in range(5) for number in (1, 2, 5)]
        shown = axis.get_xlim()
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axis.set_xlim(shown)
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axis.set_title(source, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("relative error of y")
    axes[0, -1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.02, 1))
    title = f"Approximations of GKA at N = {tokens:,}: error against time"
    figure.suptitle(title, fontsize=10)
    return Figure(save(figure, folder / PICTURE), title, caption(results, tokens), rows)


def _points(results: Approximations, source: str, tokens: int) -> dict[str, list[tuple[int, float, float]]]:
    """Size, ms and error of every form but the mean that has both."""
    points: dict[str, list[tuple[int, float, float]]] = {}
    for (form, size), timed in sorted(results.times(tokens, results.is_causal(source)).items()):
        error = results.error(source, tokens, form, size)
        if form in FORMS and form != MEAN and error is not None:
            points.setdefault(form, []).append((size, timed["median_ms"], error))
    return points
