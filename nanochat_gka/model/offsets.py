"""Head offsets (`--head-offsets`): a head pairs the key of one token with the value of another.

A letter per head, tiled. Slot j of a head holds

    N    (k_j, v_j)
    P    (k_j, v_j-1)    the predecessor's value
    S    (k_j-1, v_j)    the value of the successor

Token 0 is its own predecessor. No parameters. For gka layers k is the feature (rotated, then normalised per head) and v
what `gka_values` says. An operator without projections has one feature as query, key and value, so that its heads can
say "tokens like me" but not "the token before me" or "what followed the last time". A fixed case of KV shifting
attention, Xu et al., ICML 2025, arXiv 2411.19574. Softmax attention gains from it too.
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

    def __init__(self, pattern: Sequence[tuple[int, int]], num_heads: int):
        """pattern: delays of keys and of values, which the heads repeat; at least one is not 0."""
        super().__init__()
        self.period = len(pattern)
        tiled = [pattern[head % self.period] for head in range(num_heads)]
        self.key_delays, self.value_delays = zip(*tiled)
        self.reach, self.moves_keys = max(self.key_delays + self.value_delays), any(self.key_delays)

    def forward(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of n slots, of those of n tokens, (B, n, H, D) each."""
        values = self._later(values, self.value_delays)
        return self._later(keys, self.key_delays), values

    def _later(self, x: torch.Tensor, delays: tuple[int, ...]) -> torch.Tensor:
        """Every head as late as it is; token 0 fills the places before."""
        if not any(delays):
            return x
        moved = x.clone()
        for first, tokens in enumerate(delays[: self.period]):
            heads = slice(first, None, self.period)
            if tokens > 1:
                moved[:, 1:tokens, heads] = x[:, :1, heads]
            if tokens:
                moved[:, tokens:, heads] = x[:, :-tokens, heads]
        return moved


def head_offsets(pattern: Sequence[tuple[int, int]], num_heads: int) -> HeadOffsets | None:
    """The offsets of a layer's heads; None where no head is late."""
    return HeadOffsets(pattern, num_heads) if any(map(any, pattern[:num_heads])) else None
