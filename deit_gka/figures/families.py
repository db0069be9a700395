"""The table of the families, drawn by `FAMILIES[name](subjects, folder)`, and the families that need a bandwidth."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deit_gka.figures.depth import draw_bandwidths, draw_distances
from deit_gka.figures.explanation import draw_block, draw_operator
from deit_gka.figures.matrices import draw_evolution, draw_matrices
from deit_gka.figures.rollout import draw_rollout
from deit_gka.figures.rows import draw_cls_maps, draw_patch_to_patch
from deit_gka.figures.subjects import ImageSubject
from trainkit_gka.plots import Figure

FAMILIES: dict[str, Callable[[Sequence[ImageSubject], Path], list[Figure]]] = {
    "rollout": draw_rollout,
    "sigma": draw_bandwidths,
    "cls_maps": draw_cls_maps,
    "patch_to_patch": draw_patch_to_patch,
    "distance": draw_distances,
    "evolution": draw_evolution,
    "matrices": draw_matrices,
    "block": draw_block,
    "operator": draw_operator,
}
NEED_SIGMA = ("sigma", "block", "operator")


def why_not(family: str, subjects: Sequence[ImageSubject]) -> str:
    """Why the family cannot be drawn of these subjects, the model's first; empty if it can."""
    missing = family in NEED_SIGMA and not subjects[0].layers_with("sigma")
    return f"{subjects[0].model} has no layer with a bandwidth" if missing else ""
