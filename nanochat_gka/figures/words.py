"""The tokens of a text as one can print them, and which of them are looked at."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from nanochat_gka.data.tokenizer import Tokenizer

FONT = "DejaVu Sans Mono"  # comes with Matplotlib
LONGEST_WORD = 16  # characters of a token that are shown
SHOWN_AS = {"\n": "↵", "\r": "↵", "\t": "→"}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as it is printed: line breaks and tabs as arrows, other bytes as \\x.., glyphs the font lacks as ▯."""
    text = printable(tokenizer.encoding.decode_single_token_bytes(token).decode(errors="backslashreplace"))
    return text if len(text) <= LONGEST_WORD else text[: LONGEST_WORD - 1] + "…"


def printable(text: str) -> str:
    """The text with arrows for line breaks and tabs, and ▯ for every character that the font lacks."""
    arrows = "".join(SHOWN_AS.get(character, character) for character in text)
    return "".join(character if ord(character) in _glyphs() else "▯" for character in arrows)


@cache
def _glyphs() -> frozenset[int]:
    """The characters of the font, all of one width."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family=FONT))).get_charmap())


def find(words: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """The last token that reads as each of `asked`, in the order of the text.

    Raises KeyError for a word that is not one of the tokens.
    """
    places = {word.strip(): place for place, word in enumerate(words)}
    return sorted({places[word.strip()] for word in wanted})


def choose(words: Sequence[str], most: int = 3) -> list[int]:
    """Tokens whose rows tell something: the longest words that came before in the text, else evenly spread tokens."""
    stripped = [word.strip() for word in words]
    last = {word: place for place, word in enumerate(stripped)}
    repeated = [place for word, place in last.items() if word.isalpha() and stripped.index(word) < place]
    chosen = sorted(repeated, key=lambda place: (-len(words[place]), -place))[:most]
    spread = np.linspace(len(words) - 1, 0, most, endpoint=False).round().astype(int).tolist()
    chosen += [place for place in dict.fromkeys(spread) if place not in chosen][: most - len(chosen)]
    return sorted(chosen)
