"""The table of the families, drawn by `FAMILIES[name](subjects, folder)`, and the models that they need."""

from collections.abc import Callable, Sequence
from pathlib import Path

from nanochat_gka.figures.bandwidths import draw_channels, draw_distances, draw_training
from nanochat_gka.figures.heads import draw_heads
from nanochat_gka.figures.matrices import draw_matrices
from nanochat_gka.figures.rows import draw_rows
from nanochat_gka.figures.subjects import TextSubject
from trainkit_gka.plots import Figure

FAMILIES: dict[str, Callable[[Sequence[TextSubject], Path], list[Figure]]] = {
    "rows": draw_rows,
    "matrices": draw_matrices,
    "heads": draw_heads,
    "sigma": draw_training,
    "distances": draw_distances,
    "channels": draw_channels,
}


def why_not(family: str, subjects: Sequence[TextSubject]) -> str:
    """Why the family cannot be drawn of these models; empty if it can."""
    if family in ("sigma", "distances") and not any(subject.layers_with("sigma") for subject in subjects):
        return f"{subjects[0].model} has no layer with a bandwidth"
    if family == "channels" and not any(subject.layers_with("channel_scales") for subject in subjects):
        return f"{subjects[0].model} has no bandwidths of channels"
    if family == "sigma" and not any(subject.history for subject in subjects):
        return f"the log of {subjects[0].model} has no evaluations with bandwidths"
    return ""
