"""The paper's figures for language models, drawn from trained runs and a text.

    python -m nanochat_gka.draw --run out/runs/d20-gka --twin out/runs/d20-softmax --text "The cat sat on the mat."
    python -m nanochat_gka.draw                                # the demo's runs

Writes OUT/<run>/<family>.png and a PDF beside each. The models of --twin are drawn beside the run's.
"""

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from nanochat_gka.figures.families import FAMILIES, why_not
from nanochat_gka.figures.matrices import draw_matrices
from nanochat_gka.figures.rows import TOKENS, draw_rows
from nanochat_gka.figures.subjects import subjects_of
from trainkit_gka.cli import Bounds, CountOrAll, UserError, run
from trainkit_gka.figures.subjects import check_names, draw_families

TEXT = "If the list is empty, the method raises an error. If the list has one item, the method returns it."


@dataclass
class DrawConfig:
    """Draw what the attention of language models does with a text: of a run (--run), or else of the demo's runs."""

    run: Path | None = None
    """Run folder, one checkpoint folder in it, or an exported model. Without it: the demo's GKA run in the paper's
    form, and its other language runs as twins."""
    step: int = -1
    """Checkpoint to take of the run; -1 = the newest."""
    twin: tuple[Path, ...] = ()
    """Other runs with the same tokenizer, such as the softmax twin or other seeds, that are drawn beside it."""
    text: str | None = None
    """The text that the models read. Without it and --text-file: two sentences that share some words."""
    text_file: Path | None = None
    """A file with the text, in UTF-8."""
    query: tuple[str, ...] = ()
    """Tokens whose rows are drawn, as they read: the last ones in the text. Without any: three are chosen, words that
    came before in the text if there are some."""
    layer: tuple[Annotated[int, Bounds(1)], ...] = ()
    """Layers whose rows are drawn, from 1. Without any: all, or as many as fit, evenly spread."""
    tokens: CountOrAll = TOKENS
    """Tokens of the text that are drawn as rows and matrices; all other numbers are of the whole text. -1 = all."""
    family: tuple[Literal[tuple(FAMILIES)], ...] = ()
    """Which figures to draw. Without any: all."""
    talk: bool = False
    """Leave the caption of the rows out, for a slide."""
    out: Path = Path("out/figures")
    """The folder of the figures; every model has its own in it."""
    demo: Path = Path("out/demo")
    """Where the demo's runs are, for the default."""


def demo_runs(demo: Path) -> list[Path]:
    """The demo's GKA run in the paper's form, then its twins of that depth and length, softmax first; empty without."""
    for first in sorted(demo.glob("runs/d*-gka-paper-*")):
        depth, steps = first.name.split("-gka-paper-")
        twins = [path for path in sorted(demo.glob(f"runs/{depth}-*-{steps}")) if path != first]
        return [first, *sorted(twins, key=lambda path: "softmax" not in path.name)]
    return []


def read_text(config: DrawConfig) -> str:
    """The text to draw. Raises UserError if it is empty, or is not text."""
    if config.text is not None and config.text_file is not None:
        raise UserError("give either --text or --text-file")
    text = TEXT if config.text is None else config.text
    if config.text_file is not None:
        try:
            text = config.text_file.read_text(encoding="utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError:
            raise UserError(f"{config.text_file} is not UTF-8 text") from None
    if not text.strip():
        raise UserError("the text is empty; give some words with --text or --text-file")
    return text


def find_queries(config: DrawConfig, words: list[str]) -> list[int]:
    """The last token that reads as each of --query. Raises UserError, naming those that are drawn, for another one."""
    drawn = words if config.tokens < 0 else words[: config.tokens]
    places = {word.strip(): place for place, word in enumerate(drawn)}
    if unknown := [query for query in config.query if query.strip() not in places]:
        known = " ".join(filter(None, places))
        raise UserError(f'--query "{unknown[0]}" is not one of the tokens that are drawn: {known}')
    return sorted({places[query.strip()] for query in config.query})


def main(config: DrawConfig) -> None:
    started = time.perf_counter()
    text, paths = read_text(config), [config.run] if config.run else demo_runs(config.demo)
    if not paths:
        raise UserError(f"{config.demo} has no language runs: give --run")
    subjects = subjects_of([*paths, *config.twin], text, config.step)
    check_names([subject.about for subject in subjects])
    for subject in subjects:
        subject.print_error()
    depth = max(len(subject.layers) for subject in subjects)
    if max(config.layer, default=1) > depth:
        raise UserError(f"--layer is at most {depth}, got {max(config.layer)}")
    chosen = {"queries": find_queries(config, subjects[0].words), "layers": [layer - 1 for layer in config.layer]}
    draws = {
        **FAMILIES,
        "rows": functools.partial(draw_rows, **chosen, tokens=config.tokens, talk=config.talk),
        "matrices": functools.partial(draw_matrices, tokens=config.tokens),
    }
    wanted = {family: draws[family] for family in config.family or FAMILIES}
    draw_families(subjects, config.out / subjects[0].model, wanted, why_not)
    print(f"drawn in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    run(main, DrawConfig)
