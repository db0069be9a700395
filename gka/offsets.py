"""Head offsets: a head pairs the key of one token with the value of another.

A letter per head, tiled. Slot j of a head holds

    N    (k_j, v_j)
    P    (k_j, v_{j-1})    the value of the token before the key's
    S    (k_{j-1}, v_j)    the value of the token after the key's

The first token, which has no predecessor, takes its own place. No parameters, no FLOPs. An operator without projections
has one feature as query, key and value, so that its heads can say "tokens like me" but not "the token before me" or
"what followed the last time". Not the paper's: a fixed case of KV shifting attention, Xu et al., ICML 2025, arXiv
2411.19574. Softmax attention gains from it too. A slot is hidden where its later token is, so that no causal head sees
the future.
"""

from collections.abc import Sequence

import torch
from torch import nn

DELAYS = {"N": (0, 0), "P": (0, 1), "S": (1, 0)}  # of a head's keys and of its values, in tokens


class HeadOffsets(nn.Module):
    """Keys or values of whole heads some tokens later.

    key_delays, value_delays: by how many tokens each head is late, (H,). reach: the most of them. moves_keys: whether
    a slot's key is not its token's.
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
    """Every head as late as it is, (B, n, H, D); token 0 fills the places before, or the first of the document."""
    if not any(delays):
        return x
    moved = x.clone()
    if starts is not None:
        is_first = (starts == torch.arange(starts.shape[0], device=starts.device))[:, None, None]
        for first, tokens in enumerate(delays[:period]):
            heads = slice(first, None, period)
            for _ in range(tokens):
                late = moved[:, :, heads]
                moved[:, :, heads] = torch.where(is_first, late, late.roll(1, dims=1))
        return moved
    for first, tokens in enumerate(delays[:period]):
        heads = slice(first, None, period)
        if tokens > 1:
            moved[:, 1:tokens, heads] = x[:, :1, heads]
        if tokens:
            moved[:, tokens:, heads] = x[:, :-tokens, heads]
    return moved


def head_offsets(letters: str, num_heads: int) -> HeadOffsets | None:
    """The offsets of a layer's heads by a pattern such as PS, upper or lower case; None where no head is late.

    Raises ValueError for other letters.
    """
    if not isinstance(letters, str) or any(letter not in DELAYS for letter in letters.upper()):
        raise ValueError(f"head_offsets must be made of the letters {', '.join(DELAYS)}, got {letters!r}")
    return HeadOffsets(letters.upper(), num_heads) if letters[:num_heads].upper().strip("N") else None
