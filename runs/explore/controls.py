"""The controls that both tabs have: layer, head, and by how much and where σ is scaled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import gradio as gr

from runs.explore.scaling import Scaling

EVERYWHERE, LAYER, HEAD = WHERE = ("all layers and heads", "this layer", "this layer and head")
MEAN = "mean of the heads"
T = TypeVar("T")
POWERS = 4  # σ is scaled by 2^-4 to 2^4


@dataclass(frozen=True)
class Controls:
    """The components, in the order in which `Choice.of` takes their values."""

    layer: gr.Slider
    head: gr.Dropdown
    power: gr.Slider
    where: gr.Radio

    @property
    def all(self) -> list:
        return [self.layer, self.head, self.power, self.where]


@dataclass(frozen=True)
class Choice:
    """What the controls say. layer, head: from 0; the head is None for all of them."""

    layer: int
    head: int | None
    scaling: Scaling

    @classmethod
    def of(cls, layer: float, head: str, power: float, where: str) -> "Choice":
        number, one = int(layer) - 1, None if head == MEAN else int(head.split()[-1]) - 1
        return cls(
            number,
            one,
            Scaling(
                factor=2.0**power,
                layer=None if where == EVERYWHERE or not power else number,
                head=one if where == HEAD and power else None,
            ),
        )


def build(layers: int, heads: int, has_sigma: bool) -> Controls:
    """Put the controls on the page. Models without σ get none for it."""
    return Controls(
        layer=gr.Slider(1, max(2, layers), value=layers, step=1, label="Layer", visible=layers > 1),
        head=gr.Dropdown([MEAN, *(f"head {head}" for head in range(1, heads + 1))], value=MEAN, label="Head"),
        power=gr.Slider(
            -POWERS, POWERS, value=0, step=0.25, label="σ × 2 to the power of", visible=has_sigma,
            info="0 leaves σ as it is. The model runs again with every change.",
        ),
        where=gr.Radio(WHERE, value=EVERYWHERE, label="Scale σ of", visible=has_sigma),
    )  # fmt: skip


def before_and_after(scaling: Scaling, compute: Callable[[Scaling], T]) -> dict[str, T]:
    """What is computed with the bandwidths as they are and, if they are scaled, with those; by a heading."""
    results = {"as it is": compute(Scaling())}
    if scaling.factor != 1:
        results[f"σ × {scaling.factor:.3g}"] = compute(scaling)
    return results


def html(value: str = "", **settings) -> gr.HTML:
    """A piece of the page that is styled by `markup.CSS` alone."""
    return gr.HTML(value, apply_default_css=False, **settings)
