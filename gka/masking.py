"""Who may look at whom: the only definition of the attention masks in the project.

Query row i and key row j are positions counted from the END of their sequences being aligned: with Tq queries and Tk >=
Tq keys, query row r sits at position i = r + (Tk - Tq), so one decode query sees the whole cache.

- causal: j <= i.
- window W >= 0: at most W tokens away. Causal: i - W <= j <= i, i.e. W earlier tokens plus the token itself, W + 1 keys
  (the convention of nanochat and FlashAttention). Not causal: |i - j| <= W.

The paper (section 3.3) writes i - W' < j <= i, which is W' keys: its W' is our window W = W' - 1.
Every mask keeps the diagonal, so no row is ever empty.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mask:
    """A causal flag and an optional window; `causal=False, window=None` hides nothing."""

    causal: bool = False
    window: int | None = None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(before, after): position i sees i - before <= j <= i + after; None: no limit."""
        return self.window, 0 if self.causal else self.window

    def visible(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """True where the query at position `i` may see the key at position `j` (integer tensors that broadcast)."""
        before, after = self.reach
        keep = (i == i) & (j == j)
        if before is not None:
            keep = keep & (j >= i - before)
        if after is not None:
            keep = keep & (j <= i + after)
        return keep

    def simplify(self, num_queries: int, num_keys: int) -> "Mask":
        """The same mask without the conditions that hide nothing at these lengths, so fast paths can be recognised."""
        window = self.window if self.window is not None and self.window < num_keys - 1 else None
        return Mask(self.causal and num_queries > 1, window)

    def first_visible_key(self, num_queries: int, num_keys: int) -> int:
        """Index of the first key that any query sees: those before it can be dropped without changing a result."""
        return 0 if self.window is None else max(0, num_keys - num_queries - self.window)

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        """The mask as a (Tq, Tk) bool tensor, True = visible."""
        i = torch.arange(num_keys - num_queries, num_keys, device=device)
        j = torch.arange(num_keys, device=device)
        return self.visible(i[:, None], j[None, :])
