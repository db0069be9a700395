"""The study's pictures of budgets: loss against compute with fits and spread, differences by depth and budget, and the
loss and sigma^2 of longer trainings.
"""

import math
from pathlib import Path

import numpy as np

from runs.study.families import ALL
from runs.study.grid import BUDGETS, CONTROL, HALF, LONGER, longer_families, scaled_places
from runs.study.scores import Result, Scores
from runs.study.statistics import frontier
from trainkit_gka.plots import Figure, save, subplots

CAPTION = (
    "Every family at the learning rate that is best for it with two layers (with eight, there); "
    "bars are one standard deviation over seeds, where there are any."
)
OVER_CONTROL = ("softmax", "GKA + offsets", HALF, "GGGA + offsets")


def compute(scores: Scores, folder: Path, name: str) -> Figure | None:
    """Loss against training FLOPs for the families of the scaling question; None if none of them is finished."""
    figure, axis = subplots(figsize=(7.5, 5))
    rows = []
    for number, (family, fitted) in enumerate(scores.scalings().items()):
        own, colour = scores.points(family), f"C{number}"
        if not own:
            continue
        spent = [flops for flops, _ in own.values()]
        means = [float(np.mean(losses)) for _, losses in own.values()]
        spreads = [float(np.std(losses, ddof=1)) if len(losses) > 1 else 0.0 for _, losses in own.values()]
        axis.errorbar(spent, means, spreads, fmt="o", color=colour, markersize=4, label=family)
        rows += [{"family": family, "FLOPs": flops, "loss": loss} for flops, loss in zip(spent, means)]
        if fitted is None:
            continue
        reach = np.geomspace(*fitted.reach, 60)
        axis.plot(reach, fitted.fit(reach), color=colour, linewidth=1)
        if fitted.draws:
            drawn = np.stack([draw(reach) for draw in fitted.draws])
            axis.fill_between(reach, *np.percentile(drawn, (2.5, 97.5), axis=0), color=colour, alpha=0.15, linewidth=0)
    if not rows:
        return None
    axis.set(xscale="log", xlabel="training FLOPs", ylabel="validation bits per byte")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    title = f"Loss against compute on {name}"
    axis.set_title(title, fontsize=10)
    caption = f"{CAPTION} Lines: a + b C^-c through what is better than everything cheaper; bands: 95 % of other seeds."
    return Figure(save(figure, folder / f"study-compute-{name}.png"), title, caption, rows)


def budgets(scores: Scores, folder: Path, name: str) -> Figure | None:
    """Losses over the control's against the tokens of the training, a panel a depth; None if nothing is finished."""
    figure, axes = subplots(1, len(BUDGETS), figsize=(12, 3.8), sharey=True)
    all_budgets, rows = sum(BUDGETS.values(), ()), []
    for depth, axis in zip(BUDGETS, axes, strict=True):
        for number, family in enumerate(OVER_CONTROL):
            for place in (place for place in scaled_places() if place["depth"] == depth):
                if over := scores.over(ALL[family], ALL[CONTROL], place):
                    drawn = {"difference": over.value, "low": over.low, "high": over.high}
                    rows.append({"family": family, "layers": depth, "tokens": place["tokens"], **drawn})
            own = [row for row in rows if (row["family"], row["layers"]) == (family, depth)]
            tokens = [row["tokens"] * 2 ** (0.06 * (number - 1.5)) for row in own]  # side by side
            axis.plot(tokens, [row["difference"] for row in own], "o-", color=f"C{number}", markersize=4, label=family)
            axis.vlines(tokens, [row["low"] for row in own], [row["high"] for row in own], color=f"C{number}")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xlim(min(all_budgets) / 1.3, max(all_budgets) * 1.3)
        axis.set_title(f"{depth} layers", fontsize=9)
        axis.set_xlabel("training tokens")
        axis.grid(alpha=0.3)
    if not rows:
        return None
    axes[0].set_ylabel(f"bits per byte over {CONTROL}")
    axes[-1].legend(fontsize=7)
    title = f"Losses over those of {CONTROL}, on {name}"
    figure.suptitle(title, fontsize=10)
    caption = "At equal tokens. Bars hold 95 % over seeds, paired; without a bar there is one seed. Less is better."
    return Figure(save(figure, folder / f"study-budgets-{name}.png"), title, caption, rows)


def time(scores: Scores, folder: Path, name: str, speeds: dict[int, dict[str, float]]) -> Figure | None:
    """Loss against the time of training, tokens over `speeds` (depth -> family -> tokens/s); None without any."""
    figure, axis = subplots(figsize=(7.5, 5))
    rows = []
    for number, family in enumerate((CONTROL, *OVER_CONTROL)):
        for place in scaled_places():
            result, speed = scores.at(ALL[family], place), speeds.get(place["depth"], {}).get(family)
            if result and speed:
                minutes, spread = place["tokens"] / speed / 60, 0.0 if math.isnan(result.spread) else result.spread
                where = {"family": family, "layers": place["depth"], "tokens": place["tokens"], "minutes": minutes}
                rows.append({**where, "loss": result.mean, "spread": spread})
        own = [row for row in rows if row["family"] == family]
        if not own:
            continue
        minutes, losses, spreads = (np.array([row[key] for row in own]) for key in ("minutes", "loss", "spread"))
        axis.errorbar(minutes, losses, spreads, fmt="o", color=f"C{number}", markersize=4, label=family)
        best = frontier(minutes, losses)
        axis.plot(minutes[best], losses[best], color=f"C{number}", linewidth=1)
    if not rows:
        return None
    axis.set(xscale="log", xlabel="minutes of training, one thread", ylabel="validation bits per byte")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    title = f"Loss against the time of training, on {name}"
    axis.set_title(title, fontsize=10)
    caption = (
        "Two to eight layers; lines join what is better than everything quicker; bars are one standard deviation over "
        "seeds. Minutes are tokens over the speed of steps that were timed in turns."
    )
    return Figure(save(figure, folder / f"study-time-{name}.png"), title, caption, rows)


def longer(scores: Scores, folder: Path, name: str) -> Figure | None:
    """Loss and sigma^2 against the tokens of the training, at depth 2; None if nothing is finished."""
    figure, (left, right) = subplots(1, 2, figsize=(10, 4.2))
    rows = []
    for number, (family, form) in enumerate(longer_families().items()):
        found = [(place["tokens"], result) for place in LONGER if (result := scores.at(form, place))]
        if not found:
            continue
        tokens, results = [tokens for tokens, _ in found], [result for _, result in found]
        spreads = [0.0 if math.isnan(result.spread) else result.spread for result in results]
        style = dict(color=f"C{number}", marker="o", markersize=4, label=family)
        left.errorbar(tokens, [result.mean for result in results], spreads, **style)
        sigmas = [sigma_of(result) for result in results]
        if not np.isnan(sigmas).all():
            right.plot(tokens, sigmas, **style)
        rows += [
            {"family": family, "tokens": count, "loss": result.mean, "sigma^2": sigma}
            for count, result, sigma in zip(tokens, results, sigmas)
        ]
    if not rows:
        return None
    for axis, label in ((left, "validation bits per byte"), (right, "median σ² of all heads (head_dim is 64)")):
        axis.set(xlabel="training tokens", ylabel=label)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    right.set_yscale("log")
    title = f"Two layers, trained longer, on {name}"
    figure.suptitle(title, fontsize=10)
    return Figure(save(figure, folder / f"study-longer-{name}.png"), title, CAPTION, rows)


def sigma_of(result: Result) -> float:
    return float("nan") if result.sigma_squared is None else result.sigma_squared
