"""The kinds of attention, one row each. A new kind is a row here and a class in each trainer's `model/attention.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """What accounting, command lines, tables and pictures need to know of a kind."""

    name: str  # in flags, configurations and timm's names
    letter: str  # in patterns by layer, such as GGGA
    label: str  # in tables and pictures
    colour: str  # in pictures: one of Okabe and Ito's, which people tell apart who see red and green alike
    input_projections: str  # the letters of the W_Q, W_K, W_V it learns; every kind has W_O
    operator_tensors: int  # (B, T, C) tensors that a fused operator reads and writes in a forward pass
    cached_tensors: int  # (B, T, C) tensors that decoding keeps
    has_bandwidth: bool = False  # one learned sigma per head


KINDS = {
    kind.name: kind
    for kind in (
        Kind("softmax", "A", "softmax", "#000000", "QKV", operator_tensors=4, cached_tensors=2),  # q, k, v -> y
        Kind("vlt", "V", "VLT", "#cc79a7", "QK", operator_tensors=4, cached_tensors=2),  # q, k, x -> y
        Kind("gka", "G", "GKA", "#d55e00", "", operator_tensors=2, cached_tensors=1, has_bandwidth=True),  # x -> y
    )
}


def layer_kinds(pattern: str, num_layers: int) -> list[str]:
    """The name of every layer's kind.

    pattern: a kind's name, for all layers, or letters that are tiled over the layers: GGGA, upper or lower case.
    Raises ValueError, naming what is allowed, for any other pattern.
    """
    if pattern in KINDS:
        return [pattern] * num_layers
    names = {kind.letter: kind.name for kind in KINDS.values()}
    if not pattern or any(letter not in names for letter in pattern.upper()):
        kinds = ", ".join(f"{kind.name} ({kind.letter})" for kind in KINDS.values())
        raise ValueError(
            f"attention must be one of {kinds}, or a pattern of their letters such as GGGA, got {pattern!r}"
        )
    return [names[pattern[layer % len(pattern)].upper()] for layer in range(num_layers)]
