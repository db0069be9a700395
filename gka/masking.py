"""Who may look at whom: the only definition of the attention masks in the project.

Query row i and key row j are positions counted from the END of their sequences being aligned: with Tq queries and Tk >=
Tq keys, query row r sits at position i = r + (Tk - Tq), so one decode query sees the whole cache.

- causal: j <= i.
- window W >= 0: at most W tokens away. Causal: i - W <= j <= i, i.e. W earlier tokens plus the token itself, W + 1 keys
  (the convention of nanochat and FlashAttention). Not causal: |i - j| <= W.

The paper (section 3.3) writes i - W' < j <= i, which is W' keys: its W' is our window W = W' - 1.
Every mask keeps the diagonal, so no row is ever empty.

A new condition is a field of `Mask`, None or False where it is not set, and a line of `visible`, which counts tokens:
padding between them is packed first. An implementation serves it once its name is in `Serves.options` of it.

In packed sequences a query sees the keys that the mask says and that are of its own document (`document_bounds`).
"""

from dataclasses import dataclass, replace

import torch


def names_set(owner: object, names: tuple[str, ...]) -> list[str]:
    """Those of the names that the owner has, with a value that is neither None nor False."""
    return [name for name in names if (value := getattr(owner, name, None)) is not None and value is not False]


@dataclass(frozen=True)
class Mask:
    """A causal flag and an optional window; `causal=False, window=None` hides nothing."""

    causal: bool = False
    window: int | None = None

    @property
    def conditions(self) -> list[str]:
        """The names of those that are set."""
        return names_set(self, self.__match_args__)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(before, after): position i sees i - before <= j <= i + after; None: no limit. Of causal and window alone."""
        return self.window, 0 if self.causal else self.window

    @property
    def is_reach(self) -> bool:
        """Whether `reach` says which keys are visible: no other condition is set."""
        return {"causal", "window"}.issuperset(self.conditions)

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
        return replace(self, causal=self.causal and num_queries > 1, window=window)

    def first_visible_key(self, num_queries: int, num_keys: int) -> int:
        """Index of the first key that any query sees: those before it can be dropped without changing a result."""
        return max(0, num_keys - num_queries - self.window) if self.window is not None and self.is_reach else 0

    def dense(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
        """The mask as a (Tq, Tk) bool tensor, True = visible."""
        i = torch.arange(num_keys - num_queries, num_keys, device=device)
        j = torch.arange(num_keys, device=device)
        return self.visible(i[:, None], j[None, :])


def document_bounds(cu_seqlens: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts, ends) of the document of every token, (N,) int32 each, on the device of cu_seqlens, without waiting for
    it: token i sees keys starts[i] <= j < ends[i].

    cu_seqlens: (documents + 1,) int32, from 0 to N, never falling; a document without tokens repeats a number. Wrong
    numbers, which cannot be refused on a GPU, give bounds with 0 <= starts[i] <= i < ends[i] <= N all the same.
    """
    places = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, places, right=True).clamp(1, cu_seqlens.shape[0] - 1)
    starts, ends = cu_seqlens[document - 1], cu_seqlens[document]
    return torch.minimum(starts, places).clamp(min=0), torch.maximum(ends, places + 1).clamp(max=num_tokens)
