"""The paper's figures for language models, drawn from a trained run and a text.

    python -m nanochat_gka.draw --run out/runs/d20-gka --twin out/runs/d20-softmax --text "The cat sat on the mat."
    python -m nanochat_gka.draw                                # the demo's runs

Writes OUT/<run>/<family>.png and a PDF beside each. Models named by --twin are drawn beside the run's.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from nanochat_gka.figures.bandwidths import draw_distances, draw_training
from nanochat_gka.figures.heads import draw_heads
from nanochat_gka.figures.maps import extract
from nanochat_gka.figures.matrices import draw_matrices
from nanochat_gka.figures.rows import draw_rows
from nanochat_gka.figures.subject import Evaluation, Subject, form, queries, shown
from nanochat_gka.model.checkpoints import Loaded, load, run_folder
from trainkit.cli import Bounds, CountOrAll, UserError, run
from trainkit.progress import read_events

Family = Literal["rows", "matrices", "heads", "sigma", "distances"]
FAMILIES: tuple[Family, ...] = ("rows", "matrices", "heads", "sigma", "distances")
DEFAULT_TEXT = "If the list is empty, the method raises an error. If the list has one item, the method returns it."


@dataclass
class DrawConfig:
    """Draw what the attention of a language model does with a text: of a run (--run), or else of the demo's runs."""

    run: Path | None = None
    """Run folder, one checkpoint folder in it, or an exported model. Without it: the demo's GKA run, and its other
    language runs as twins."""
    step: int = -1
    """Checkpoint to take of --run; -1 = the newest."""
    twin: tuple[Path, ...] = ()
    """Other runs of the same tokenizer, such as the softmax twin or other seeds, that are drawn beside it."""
    text: str | None = None
    """The text that the models read. Without it and --text-file: two sentences with the same words."""
    text_file: Path | None = None
    """A file with the text, in UTF-8."""
    query: tuple[str, ...] = ()
    """Tokens whose rows are drawn, as they read: the last one in the text. Without any: three are chosen, words that
    came before in the text if there are some."""
    layer: tuple[Annotated[int, Bounds(1)], ...] = ()
    """Layers whose rows are drawn, from 1. Without any: all, or of large models as many as fit, evenly spread."""
    tokens: CountOrAll = 64
    """Tokens of the text that are drawn as rows and matrices; numbers are of the whole text. -1 = all."""
    family: tuple[Family, ...] = ()
    """Which figures to draw. Without any: all."""
    out: Path = Path("out/figures")
    """The folder of the figures; every model has its own in it."""
    demo: Path = Path("out/demo")
    """Where the demo's runs are, for the default."""


def demo_runs(demo: Path) -> list[Path]:
    """The demo's GKA run in the paper's form, then its twins of the same depth and length; empty if there are none."""
    for first in sorted(demo.glob("runs/d*-gka-paper-*")):
        depth, steps = first.name.split("-gka-paper-")
        twins = [path for path in sorted(demo.glob(f"runs/{depth}-*-{steps}")) if path != first]
        return [first, *sorted(twins, key=lambda path: "softmax" not in path.name)]
    return []


def read_text(config: DrawConfig) -> str:
    """The text to draw. Raises UserError if there is none, or if it is not text."""
    if config.text is not None and config.text_file is not None:
        raise UserError("give either --text or --text-file")
    try:
        text = DEFAULT_TEXT if config.text is None else config.text
        text = text if config.text_file is None else config.text_file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{config.text_file} is not UTF-8 text") from None
    if not text.strip():
        raise UserError("the text is empty; give some words with --text or --text-file")
    return text


def load_all(config: DrawConfig) -> dict[Path, Loaded]:
    """The model of the run and its twins, by their paths. Raises UserError if their tokenizers differ."""
    paths = [config.run, *config.twin] if config.run else [*demo_runs(config.demo), *config.twin]
    if not paths or (config.run is None and paths == list(config.twin)):
        raise UserError(f"{config.demo} has no language runs: give --run, or train some with make demo")
    loaded = {path: load(path, config.step if number == 0 else -1) for number, path in enumerate(paths)}
    first = loaded[paths[0]]
    for path, twin in loaded.items():
        if twin.tokenizer.sha256 != first.tokenizer.sha256:
            raise UserError(f"{path} has another tokenizer than {paths[0]}: their tokens cannot be drawn side by side")
    return loaded


def read_history(path: Path, heads: int) -> list[Evaluation]:
    """The bandwidths at every evaluation that the run's log has; none of an exported model."""
    history = {}
    for event in read_events(run_folder(path) / "log.jsonl", "eval", "sigma", "tokens"):
        sigma = event["sigma"] if isinstance(event["sigma"], dict) else {}
        layers = {name: re.fullmatch(r"layer_(\d+)", name) for name in sigma}
        values = {int(match[1]): sigma[name] for name, match in layers.items() if match and len(sigma[name]) == heads}
        if values:
            history[event["tokens"]] = Evaluation(event["tokens"], values)
    return [history[tokens] for tokens in sorted(history)]


def subject_of(path: Path, loaded: Loaded, text: str) -> Subject:
    """What the model does with the text. Raises UserError for a text that is too long."""
    ids = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text)]
    layers = extract(loaded.model, ids)
    about = (
        f"{loaded.name} ({form(loaded.model.config)}; depth {len(layers)}), weights after {loaded.step:,} steps and "
        f"{loaded.training['tokens']:,} tokens"
    )
    error = max(layer.error for layer in layers)
    print(f"{about}: W of {len(layers)} layers gives the model's output, relative error up to {error:.1e}")
    return Subject(
        name=loaded.name,
        about=about,
        config=loaded.model.config,
        text=text,
        words=[shown(loaded.tokenizer, token) for token in ids],
        layers=layers,
        history=read_history(path, loaded.model.config.n_head),
    )


def chosen_queries(config: DrawConfig, words: list[str]) -> list[int]:
    """The tokens whose rows are drawn. Raises UserError, naming those that there are, if the text lacks one."""
    drawn = words if config.tokens < 0 else words[: config.tokens]
    try:
        return queries(drawn, config.query)
    except KeyError as error:
        known = " ".join(dict.fromkeys(word.strip() for word in drawn))
        raise UserError(f"--query {error} is not a token that is drawn; there are: {known}") from None


def draw(family: Family, subjects: list[Subject], asked: list[int], config: DrawConfig, folder: Path) -> list[Path]:
    """Draw one family. Returns its files; prints why if there is nothing to draw."""
    with_sigma = [subject for subject in subjects if subject.has_sigma]
    with_history = [subject for subject in with_sigma if subject.history]
    if family == "rows":
        return draw_rows(subjects, folder, asked, config.tokens, [layer - 1 for layer in config.layer])
    if family == "matrices":
        return draw_matrices(subjects, folder, config.tokens)
    if family == "heads":
        return draw_heads(subjects, folder)
    if not with_sigma:
        print(f"{family}: not drawn, {subjects[0].name} has no layer with a bandwidth")
    elif family == "distances":
        return draw_distances(with_sigma, folder)
    elif with_history:
        return draw_training(with_history, folder)
    else:
        print(f"{family}: not drawn, the log of {with_sigma[0].name} has no evaluations")
    return []


def main(config: DrawConfig) -> None:
    started = time.perf_counter()
    text, models = read_text(config), load_all(config)
    subjects = [subject_of(path, loaded, text) for path, loaded in models.items()]
    depth = max(len(subject.layers) for subject in subjects)
    if max(config.layer, default=1) > depth:
        raise UserError(f"--layer is at most {depth}, got {max(config.layer)}")
    asked, folder = chosen_queries(config, subjects[0].words), config.out / subjects[0].name
    for family in config.family or FAMILIES:
        for path in draw(family, subjects, asked, config, folder):
            print(f"{path} and .pdf")
    print(f"drawn in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    run(main, DrawConfig)
