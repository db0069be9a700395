"""The subjects of figures: one model's attention on one text, and its bandwidths over training.

subjects = subjects_of([run, its_twin], "The text that they read.")
figures = FAMILIES["rows"](subjects, folder)  # of families.py
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gka import KINDS
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.figures.maps import LayerWeights, extract
from nanochat_gka.model.checkpoints import load
from nanochat_gka.model.config import GPTConfig
from trainkit_gka.checkpoint import run_folder
from trainkit_gka.cli import UserError
from trainkit_gka.figures.subjects import AttentionSubject
from trainkit_gka.progress import read_events

FONT = "DejaVu Sans Mono"  # comes with Matplotlib
LONGEST_WORD = 16  # characters of a token that are printed
ARROWS = {"\n": "↵", "\r": "↵", "\t": "→"}
QUOTED = 120  # characters of the text in a caption
OFFSETS = {"P": "before", "S": "after"}  # of the token whose value a head pairs with a key


History = dict[int, dict[int, list[float]]]  # σ of every head, by training tokens and by layer from 0


@dataclass(frozen=True, eq=False)
class TextSubject(AttentionSubject):
    """One model's attention on one text."""

    model: str  # the name of its run, and of its folder of figures
    about: str  # model and weights, in words
    config: GPTConfig
    text: str
    words: list[str]  # every token as text, T of them; the first one begins the document
    layers: list[LayerWeights]
    history: History  # of the evaluations in order; empty without a log

    def head_names(self, layer: LayerWeights | None = None) -> list[str]:
        """1, 2, ... with P or S for a head's offset in `layer`, or in any layer."""
        letters = [""] * self.num_heads
        for one in self.layers if layer is None else [layer]:
            for letter, offsets in (("P", one.value_offsets), ("S", one.key_offsets)):
                letters = [letter if offset else known for known, offset in zip(letters, offsets.tolist())]
        return [f"{number} {letter}".strip() for number, letter in enumerate(letters, 1)]


def rows_by_head(
    subjects: Sequence[TextSubject],
    numbers: Callable[[TextSubject, int, int], dict[str, float]],
    tensor: str = "weights",
    more: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """The table of a figure: a row for every head of the layers that have `tensor`, and for `more` after the last head.

    numbers(subject, layer, head): the columns after model, layer and head; both count from 0.
    """
    return [
        {"model": subject.model, "layer": layer + 1, "head": name, **numbers(subject, layer, head)}
        for subject in subjects
        for layer in subject.layers_with(tensor)
        for head, name in enumerate([*subject.head_names(subject.layers[layer]), *more])
    ]


def caption(subjects: Sequence[TextSubject], *sentences: str, of_weights: bool = True) -> str:
    """The models, the text, the sentences, and the meaning of letters at heads, where there are any.

    of_weights: whether the picture is of weights.
    """
    first = subjects[0]
    parts = [f"{'; '.join(subject.about for subject in subjects)}."]
    text = printable(textwrap.shorten(first.text, QUOTED, placeholder=" …"))
    parts += [f'Text: "{text}", {len(first.words)} tokens; the first one begins the document.', *sentences]
    if marks := {mark for subject in subjects for name in subject.head_names() for mark in name.split()[1:]}:
        pairs = [f"heads marked {letter} with that of the token {OFFSETS[letter]} it" for letter in sorted(marks)]
        parts.append(f"A key goes with its own token's value, in {', in '.join(pairs)}.")
        parts += ["Weights are shown at the token whose value is mixed."] * of_weights
    return " ".join(filter(None, parts))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as it is printed: line breaks and tabs as arrows, other bytes as \\x.., glyphs the font lacks as ▯."""
    text = printable(tokenizer.encoding.decode_single_token_bytes(token).decode(errors="backslashreplace"))
    return text if len(text) <= LONGEST_WORD else text[: LONGEST_WORD - 1] + "…"


def printable(text: str) -> str:
    """The text with arrows for line breaks and tabs, and ▯ for every character that the font lacks."""
    arrows = "".join(ARROWS.get(character, character) for character in text)
    return "".join(character if ord(character) in _glyphs() else "▯" for character in arrows)


@cache
def _glyphs() -> frozenset[int]:
    """The characters of the font, all of one width."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family=FONT))).get_charmap())


def subjects_of(paths: Sequence[Path], text: str, step: int = -1) -> list[TextSubject]:
    """The attention of some runs' models on a text. step: the checkpoint of the first, -1 = the newest.

    paths: run folders, checkpoint folders or exported models. Raises UserError for anything else, for tokenizers that
    differ, for a text that is too long, and for attention whose W cannot be computed again.
    """
    loaded = [load(path, step if number == 0 else -1) for number, path in enumerate(paths)]
    for path, twin in zip(paths, loaded):
        if twin.tokenizer.sha256 != loaded[0].tokenizer.sha256:
            raise UserError(f"{path} has another tokenizer than {paths[0]}: they do not read the same tokens")
    ids = [loaded[0].tokenizer.bos_id, *loaded[0].tokenizer.encode(text)]
    words = [token_text(loaded[0].tokenizer, token) for token in ids]
    subjects = []
    for path, one in zip(paths, loaded):
        config = one.model.config
        trained = f"{one.step:,} steps and {one.training['tokens']:,} tokens"
        about = f"{one.name} ({config.form}; depth {config.n_layer}), weights after {trained}"
        history = read_history(run_folder(path) / "log.jsonl", config)
        subjects.append(TextSubject(one.name, about, config, text, words, extract(one.model, ids), history))
    return subjects


def read_history(log: Path, config: GPTConfig) -> History:
    """The bandwidths at the evaluations in a run's log, in order; lines of other programs and shapes are left out."""
    wanted = [number for number in range(config.n_layer) if KINDS[config.layer_attention(number)].has_bandwidth]
    history: History = {}
    for event in read_events(log, "eval", "sigma", "tokens"):
        named = event["sigma"] if isinstance(event["sigma"], dict) else {}
        sigma = {number: named.get(f"layer_{number}") for number in wanted}
        if sigma and all(isinstance(values, list) and len(values) == config.n_head for values in sigma.values()):
            history[event["tokens"]] = sigma
    return dict(sorted(history.items()))
