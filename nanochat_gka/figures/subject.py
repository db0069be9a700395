"""What is drawn: one model's attention on one text, the tokens as one can print them, and how σ got where it is."""

import textwrap
from dataclasses import dataclass
from functools import cache

import numpy as np

from gka import KINDS
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.figures.maps import LayerMaps
from nanochat_gka.model.config import OFFSET_LETTERS, GPTConfig

LONGEST_WORD = 16  # characters of a token that are shown
QUOTED = 120  # characters of the text in a caption
FONT = "DejaVu Sans Mono"  # comes with Matplotlib
SHOWN_AS = {"\n": "↵", "\r": "↵", "\t": "→"}


@dataclass(frozen=True)
class Evaluation:
    """The bandwidths at one evaluation of a training run."""

    tokens: int  # trained on so far
    sigma: dict[int, list[float]]  # by layer from 0, one for every head


@dataclass(frozen=True)
class Subject:
    """One model's attention on one text."""

    name: str  # of the run; the folder of its figures
    about: str  # model and weights, in words
    config: GPTConfig
    text: str
    words: list[str]  # every token as it is shown, T of them
    layers: list[LayerMaps]
    history: list[Evaluation]

    @property
    def num_heads(self) -> int:
        return self.config.n_head

    @property
    def has_sigma(self) -> bool:
        return any(layer.sigma is not None for layer in self.layers)

    def head_names(self, layer: LayerMaps | None = None) -> list[str]:
        """1, 2, ..., and the letter of a head's offset, unless `layer` is of a kind that has none."""
        letters = {meaning: letter for letter, meaning in OFFSET_LETTERS.items() if letter != "N"}
        names = [str(head) for head in range(1, self.num_heads + 1)]
        if layer is None or layer.kind == "gka":
            for meaning, letter in letters.items():
                for heads in self.config.heads_with(meaning):
                    names[heads] = [f"{name} {letter}" for name in names[heads]]
        return names

    def caption(self, *sentences: str) -> str:
        """Model, weights and text, then the sentences."""
        short = textwrap.shorten(self.text, QUOTED, placeholder=" …")
        text = f'Text: "{short}", {len(self.words)} tokens; the first one begins the document.'
        return " ".join(filter(None, [f"{self.about}.", text, *sentences]))


OFFSETS = (
    "Heads marked P pair a key with the value of the token before it, heads marked S with the value of the token after "
    "it; weights are shown at the token whose value is mixed."
)


def offsets_note(*subjects: Subject) -> str:
    """What the letters at heads mean, where there are any."""
    return OFFSETS if any(subject.config.head_offsets for subject in subjects) else ""


def form(config: GPTConfig) -> str:
    """The attention of a model in words: its kind or pattern, and what is not the paper's form."""
    words = [KINDS[config.attention].label if config.attention in KINDS else f"pattern {config.attention.upper()}"]
    words += [f"head offsets {config.head_offsets.upper()}"] if config.head_offsets else []
    words += [f"values {config.gka_values}"] if config.gka_values != "rotated" else []
    words += [f"value embeddings {config.value_embeds}"] if config.value_embeds != "auto" else []
    return ", ".join(words)


def shown(tokenizer: Tokenizer, token: int) -> str:
    """A token as it is printed: line breaks and tabs as arrows, other bytes as \\x.., glyphs the font lacks as ▯."""
    data = tokenizer.encoding.decode_single_token_bytes(token)
    text = data.decode(errors="backslashreplace")
    text = "".join(SHOWN_AS.get(character, character) for character in text)
    text = "".join(character if ord(character) in _glyphs() else "▯" for character in text)
    return text if len(text) <= LONGEST_WORD else text[: LONGEST_WORD - 1] + "…"


@cache
def _glyphs() -> frozenset[int]:
    """The characters of the font, of one width each."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family=FONT))).get_charmap())


def queries(words: list[str], asked: tuple[str, ...], most: int = 3) -> list[int]:
    """The tokens whose rows are drawn, in order: the last ones that read as `asked`.

    Without any: of the words that came before in the text, the longest ones; and evenly spread tokens for the rest.
    Raises KeyError for a word that the text does not have as a token.
    """
    places = {word.strip(): place for place, word in enumerate(words)}
    if asked:
        return sorted({places[word.strip()] for word in asked})
    repeated = [place for word, place in places.items() if word.isalpha() and words.index(words[place]) < place]
    chosen = sorted(repeated, key=lambda place: (-len(words[place]), -place))[:most]
    spread = np.linspace(len(words) - 1, 0, most, endpoint=False).round().astype(int).tolist()
    chosen += [place for place in spread if place not in chosen][: most - len(chosen)]
    return sorted(chosen)
