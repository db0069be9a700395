"""Offsets: a head pairs the key of one token with the value of another. Letters name how, one per head, tiled.

Head offsets are of tokens in a row. Slot j of a head holds

    N    (k_j, v_j)
    P    (k_j, v_{j-1})    the value of the token before the key's
    S    (k_{j-1}, v_j)    the value of the token after the key's

The first token, which has no predecessor, takes its own place. No parameters, no FLOPs. An operator without projections
has one feature as query, key and value, so that its heads can say "tokens like me" but not "the token before me" or
"what followed the last time". Not the paper's: a fixed case of KV shifting attention, Xu et al., ICML 2025, arXiv
2411.19574. Softmax attention gains from it too. A slot is hidden where its later token is, so that no causal head sees
the future.

Spatial offsets are of patches on a grid: the value of a token is that of a neighbouring patch,

    N  the patch itself      L  left of it      R  right of it      U  above it      B  below it
    D  diagonally, above and left of it

and the key stays: "what stands left of tokens like me". A patch without that neighbour, at the border, keeps its own.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

DELAYS = {"N": (0, 0), "P": (0, 1), "S": (1, 0)}  # of a head's keys and of its values, in tokens, one at most
NEIGHBOURS = {"N": (0, 0), "L": (0, -1), "R": (0, 1), "U": (-1, 0), "B": (1, 0), "D": (-1, -1)}  # rows, columns


class HeadOffsets(nn.Module):
    """Keys or values of whole heads a token later.

    key_delays, value_delays: by how many tokens each head is late, 0 or 1, (H,). reach: the most of them. moves_keys:
    whether a slot's key is not its token's.
    """

    def __init__(self, letters: str, num_heads: int):
        """letters: keys of DELAYS, at least one of them not N."""
        super().__init__()
        self.period = len(letters)
        self.key_delays, self.value_delays = zip(*(DELAYS[letters[head % self.period]] for head in range(num_heads)))
        self.reach, self.moves_keys = max(self.key_delays + self.value_delays), any(self.key_delays)

    def forward(
        self, keys: torch.Tensor, values: torch.Tensor, starts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of n slots, of those of n tokens, (B, n, H, D) each.

        starts: in packed sequences where the document of every token begins, (n,) integers
        (`masking.document_bounds`); the first token of each document takes its own place.
        """
        return later(keys, self.key_delays, self.period, starts), later(values, self.value_delays, self.period, starts)


@torch.fx.wrap  # one node: it assigns to slices
def later(x: torch.Tensor, delays: Sequence[int], period: int, starts: torch.Tensor | None = None) -> torch.Tensor:
    """Heads with a delay one token later, (B, n, H, D); the first token of all, or of a document, stays."""
    if not any(delays):
        return x
    moved = x.clone()
    for first, is_late in enumerate(delays[:period]):
        if is_late:
            heads = slice(first, None, period)
            moved[:, 1:, heads] = x[:, :-1, heads]
    if starts is None:
        return moved
    is_first = starts == torch.arange(starts.shape[0], device=starts.device)
    return torch.where(is_first[:, None, None], x, moved)


def head_offsets(letters: str, num_heads: int) -> HeadOffsets | None:
    """The offsets of a layer's heads by a pattern such as PS, upper or lower case; None where no head is late.

    Raises ValueError for other letters.
    """
    if not isinstance(letters, str) or any(letter not in DELAYS for letter in letters.upper()):
        raise ValueError(f"head_offsets must be made of the letters {', '.join(DELAYS)}, got {letters!r}")
    return HeadOffsets(letters.upper(), num_heads) if letters[:num_heads].upper().strip("N") else None


def spatial_pattern(letters: str, num_heads: int) -> str:
    """The letters of NEIGHBOURS in upper case. Raises ValueError for others, for none, and for more than heads."""
    pattern = str(letters).upper()
    if not pattern or set(pattern) - NEIGHBOURS.keys():
        names = ", ".join(NEIGHBOURS)
        raise ValueError(f"spatial_offsets must be letters of {names}, one for each head, got {letters!r}")
    if (count := len(pattern)) > num_heads:
        raise ValueError(f"spatial_offsets {letters} has {count} letters but there are {num_heads} heads")
    return pattern


def neighbours(
    values: torch.Tensor,
    pattern: str,
    grid: tuple[int, int] | None,
    prefix: int,
    hidden: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values that tokens hold, (B, T, H, D), where T are `prefix` tokens and then patches, row by row.

    A patch without that neighbour, at the border, keeps its own value; so does one whose neighbour is hidden, and the
    tokens before the patches (class, distillation, registers).

    pattern: of `spatial_pattern`. grid: (rows, columns); None: a square. hidden: (B, T) bool, True for padding. Raises
    ValueError for another number of tokens.
    """
    num_tokens = values.shape[1]
    if grid is None:
        side = int(math.sqrt(max(0, num_tokens - prefix)))
        if prefix + side * side != num_tokens:
            patches = f"{num_tokens} tokens without the first {prefix}"
            raise ValueError(f"spatial_offsets need grid=(rows, columns): {patches} are no square of patches")
        grid = side, side
    rows, columns = grid
    if num_tokens != prefix + rows * columns:
        expected = f"{prefix} tokens and {rows} x {columns} patches"
        raise ValueError(f"spatial_offsets need {expected}, got {num_tokens} tokens")
    moved = _moved(values, pattern, (rows, columns), prefix)
    if hidden is None:
        return moved
    hides = hidden[:, :, None, None].expand(-1, -1, values.shape[2], 1)
    return torch.where(_moved(hides, pattern, (rows, columns), prefix), values, moved)


def _moved(t: torch.Tensor, pattern: str, grid: tuple[int, int], prefix: int) -> torch.Tensor:
    """What each patch's neighbour has, or what it has itself at the border, (B, T, H, ...)."""
    rows, columns = grid
    moved = t.clone()
    here, there = (tokens[:, prefix:].unflatten(1, (rows, columns)) for tokens in (moved, t))

    def side(step: int, size: int) -> slice:
        """The places that remain when `step` are taken off the front, or -step off the end."""
        return slice(max(0, step), size + min(0, step))

    for place, letter in enumerate(pattern):
        down, right = NEIGHBOURS[letter]
        if down or right:
            heads = slice(place, None, len(pattern))
            source = there[:, side(down, rows), side(right, columns), heads]
            here[:, side(-down, rows), side(-right, columns), heads] = source
    return moved
