"""What `--head-offsets` says: which heads of a layer pair the key of one token with the value of another."""

import re
from functools import cache
from typing import NamedTuple

LETTERS = "NPS"


class HeadOffset(NamedTuple):
    """A slot of a head with letter P holds (k_j, v_j-tokens), with S (k_j-tokens, v_j), with N (k_j, v_j)."""

    letter: str
    tokens: int  # 0 for N


@cache
def parse(patterns: str) -> tuple[tuple[HeadOffset, ...], ...]:
    """What each pattern says of its heads; layers repeat the patterns, and heads the letters of theirs.

    Commas separate patterns. P and S have the number of tokens if it is not 1: "PS", "PSP2S2", "PS,N".
    Raises ValueError.
    """
    layers = [re.findall(r"([NPS])([0-9]*)", pattern) for pattern in patterns.upper().split(",")]
    heads = [head for layer in layers for head in layer]
    said = ",".join("".join(letter + number for letter, number in layer) for layer in layers)
    if said != patterns.upper() or not all(layers) or any(letter == "N" and number for letter, number in heads):
        form = "with a number of tokens after P or S (none: 1) and a comma between the patterns of layers"
        raise ValueError(f"head_offsets must be made of the letters {', '.join(LETTERS)}, {form}, got {patterns!r}")
    if any(number and int(number) < 1 for _, number in heads):
        raise ValueError(f"head_offsets must be of at least 1 token, got {patterns!r}; N is a head without")
    return tuple(
        tuple(HeadOffset(letter, 0 if letter == "N" else int(number or 1)) for letter, number in own) for own in layers
    )
