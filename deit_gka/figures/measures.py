"""Where the tokens of an image are, and how far its patches look.

Tokens are the prefix (class, distillation, registers: timm puts them first) and then the patches row by row, so that
the patch in row r and column c is token prefix + columns * r + c.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Tokens:
    """The layout of a ViT's tokens."""

    grid: tuple[int, int]  # rows, columns of patches
    patch: tuple[int, int]  # height, width in pixels
    prefix: int = 1
    has_class: bool = True  # the first token of the prefix is the class token

    @classmethod
    def of(cls, model: nn.Module) -> "Tokens":
        """The layout of one of timm's vision transformers."""
        embed, prefix = model.patch_embed, model.num_prefix_tokens
        return cls(embed.grid_size, embed.patch_size, prefix, prefix > 0 and model.has_class_token)

    @property
    def count(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def reader(self) -> str:
        """Whose row `read` gives, in words."""
        return "CLS row" if self.has_class else "mean row of the patches (the model has no class token)"

    def place(self, patch: int) -> str:
        """The row and column of a patch, counted from 1, as pictures and pages name it. patch: from 0."""
        row, column = divmod(patch, self.grid[1])
        return f"row {row + 1}, column {column + 1}"

    def token(self, row: int, column: int) -> int:
        """The number of the token of a patch."""
        return self.prefix + self.grid[1] * row + column

    def read(self, weights: torch.Tensor) -> torch.Tensor:
        """The row that stands for the image, (..., N, N) -> (..., N): the class token's, else the patches' mean."""
        return weights[..., 0, :] if self.has_class else weights[..., self.prefix :, :].mean(-2)

    def patches(self, rows: torch.Tensor) -> torch.Tensor:
        """The weights of the patches where these are in the image, (..., N) -> (..., *grid)."""
        return rows[..., self.prefix :].unflatten(-1, self.grid)

    def queries(self) -> list[tuple[int, int]]:
        """The paper's four patches, (row, column): upper left, centre, lower right, upper right."""
        quarter, half, three = ([side * part // 4 for side in self.grid] for part in (1, 2, 3))
        return [(quarter[0], quarter[1]), (half[0], half[1]), (three[0], three[1]), (quarter[0], three[1])]

    def query_names(self) -> list[str]:
        """The names of `queries`."""
        return [self.place(self.token(*query) - self.prefix) for query in self.queries()]

    def distances(self) -> torch.Tensor:
        """Pixels between the centres of any two patches, (R * C, R * C)."""
        rows, columns = (torch.arange(side) * pixels for side, pixels in zip(self.grid, self.patch))
        centres = torch.cartesian_prod(rows, columns).float()
        return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")


def attended_distance(weights: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """How far patches look, in pixels: the distance to the patches, weighted by W. (..., N, N) -> (...).

    W is normalised over the patches, and the mean is over the queries. Weight on the query itself is at distance 0.
    """
    among = weights[..., tokens.prefix :, tokens.prefix :]
    among = among / among.sum(-1, keepdim=True).clamp(min=torch.finfo(among.dtype).tiny)
    return (among * tokens.distances()).sum(-1).mean(-1)
