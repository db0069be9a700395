"""What is drawn: one model's attention on one text, and how its bandwidths got where they are.

subjects = subjects_of([run, its_twin], "The text that they read.")
figures = FAMILIES["rows"](subjects, folder)  # of families.py
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gka import KINDS
from nanochat_gka.figures.maps import LayerWeights, extract
from nanochat_gka.figures.words import printable, token_text
from nanochat_gka.model.checkpoints import Loaded, load, run_folder
from nanochat_gka.model.config import GPTConfig
from trainkit_gka.cli import UserError
from trainkit_gka.progress import read_events

QUOTED = 120  # characters of the text in a caption
OFFSETS = {"P": "before", "S": "after"}  # of the token whose value a head pairs with a key


@dataclass(frozen=True)
class SigmaRecord:
    """The bandwidths at one evaluation of a training run."""

    tokens: int  # trained on so far
    sigma: dict[int, list[float]]  # by layer from 0, one for every head


@dataclass(frozen=True)
class TextSubject:
    """One model's attention on one text."""

    model: str  # the name of its run, and of its folder of figures
    about: str  # model and weights, in words
    config: GPTConfig
    text: str
    words: list[str]  # every token as it is shown, T of them; the first one begins the document
    layers: list[LayerWeights]
    history: list[SigmaRecord]  # in order; empty without a log

    @property
    def num_heads(self) -> int:
        return self.config.n_head

    @property
    def has_sigma(self) -> bool:
        return any(layer.sigma is not None for layer in self.layers)

    @property
    def has_channel_scales(self) -> bool:
        return any(layer.channel_scales is not None for layer in self.layers)

    def head_names(self, layer: LayerWeights | None = None) -> list[str]:
        """1, 2, ... with P or S for a head's offset in `layer`, or in any layer."""
        letters = [""] * self.num_heads
        for one in self.layers if layer is None else [layer]:
            for letter, offsets in (("P", one.value_offsets), ("S", one.key_offsets)):
                letters = [letter if offset else known for known, offset in zip(letters, offsets.tolist())]
        return [f"{number} {letter}".strip() for number, letter in enumerate(letters, 1)]


def caption(subjects: Sequence[TextSubject], *sentences: str, of_weights: bool = True) -> str:
    """The models, the text, the sentences, and the meaning of letters at heads, where there are any.

    of_weights: whether the picture is of what the tokens read.
    """
    first = subjects[0]
    text = printable(textwrap.shorten(first.text, QUOTED, placeholder=" …"))
    read = f'Text: "{text}", {len(first.words)} tokens; the first one begins the document.'
    models = f"{'; '.join(subject.about for subject in subjects)}."
    return " ".join(filter(None, [models, read, *sentences, _explain_offsets(subjects, of_weights)]))


def _explain_offsets(subjects: Sequence[TextSubject], of_weights: bool) -> str:
    """A sentence about the letters at heads; empty without letters."""
    marks = {mark for subject in subjects for name in subject.head_names() for mark in name.split()[1:]}
    if not marks:
        return ""
    pairs = [f"heads marked {letter} with that of the token {OFFSETS[letter]} it" for letter in sorted(marks)]
    where = " Weights are shown at the token whose value is mixed." if of_weights else ""
    return f"A key goes with its own token's value, in {', in '.join(pairs)}.{where}"


def form(config: GPTConfig) -> str:
    """The attention of a model in words: its kind or pattern, and what is not the paper's form."""
    words = [KINDS[config.attention].label if config.attention in KINDS else f"pattern {config.attention.upper()}"]
    words += [f"head offsets {config.head_offsets.upper()}"] if config.head_offsets else []
    words += [f"values {config.gka_values}"] if config.gka_values != "rotated" else []
    words += ["channel bandwidths"] * config.channel_bandwidths + ["head gates"] * config.head_gates
    words += [f"value embeddings {config.value_embeds}"] if config.value_embeds != "auto" else []
    return ", ".join(words)


def subjects_of(paths: Sequence[Path], text: str, step: int = -1) -> list[TextSubject]:
    """What the models of some runs do with a text. step: the checkpoint of the first, -1 = the newest.

    paths: run folders, checkpoint folders or exported models. Raises UserError for anything else, for tokenizers that
    differ, for a text that is too long, and for attention whose W cannot be computed again.
    """
    loaded = [load(path, step if number == 0 else -1) for number, path in enumerate(paths)]
    for path, twin in zip(paths, loaded):
        if twin.tokenizer.sha256 != loaded[0].tokenizer.sha256:
            raise UserError(f"{path} has another tokenizer than {paths[0]}: they do not read the same tokens")
    return [_subject(path, model, text) for path, model in zip(paths, loaded)]


def _subject(path: Path, loaded: Loaded, text: str) -> TextSubject:
    ids, config = [loaded.tokenizer.bos_id, *loaded.tokenizer.encode(text)], loaded.model.config
    trained = f"{loaded.step:,} steps and {loaded.training['tokens']:,} tokens"
    return TextSubject(
        model=loaded.name,
        about=f"{loaded.name} ({form(config)}; depth {config.n_layer}), weights after {trained}",
        config=config,
        text=text,
        words=[token_text(loaded.tokenizer, token) for token in ids],
        layers=extract(loaded.model, ids),
        history=read_history(run_folder(path) / "log.jsonl", config),
    )


def read_history(log: Path, config: GPTConfig) -> list[SigmaRecord]:
    """The bandwidths at the evaluations in a run's log, in order; lines of other programs and shapes are left out."""
    wanted = [number for number in range(config.n_layer) if KINDS[config.layer_attention(number)].has_bandwidth]
    history = {}
    for event in read_events(log, "eval", "sigma", "tokens"):
        named = event["sigma"] if isinstance(event["sigma"], dict) else {}
        sigma = {number: named.get(f"layer_{number}") for number in wanted}
        if sigma and all(isinstance(values, list) and len(values) == config.n_head for values in sigma.values()):
            history[event["tokens"]] = SigmaRecord(event["tokens"], sigma)
    return [history[tokens] for tokens in sorted(history)]
