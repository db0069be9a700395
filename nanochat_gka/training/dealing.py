"""One tensor dealt out to the ranks along its first dimension, in equal shares; zeros pad the end."""

import torch
import torch.distributed as dist

from trainkit_gka.distributed import Runtime

# Newer torch renames the two collectives and warns about the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Dealer:
    """Shares of tensors. `padded` is what `pad` gave: its length is a multiple of the number of ranks."""

    def __init__(self, runtime: Runtime):
        self.rank, self.ranks = runtime.rank, runtime.world_size

    def share(self, count: int) -> int:
        """A rank's part of a dimension of `count`; the last ranks may hold padding."""
        return -(-count // self.ranks)

    def pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or a copy with zeros after it if the shares would not be equal."""
        padding = self.share(len(tensor)) * self.ranks - len(tensor)
        return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor

    def own(self, padded: torch.Tensor) -> torch.Tensor:
        """This rank's share, a view."""
        share = self.share(len(padded))
        return padded[self.rank * share : (self.rank + 1) * share]

    def reduce(self, padded: torch.Tensor):
        """(this rank's share of the sum over ranks, the transfers to wait for)."""
        if self.ranks == 1:
            return padded, []
        own = torch.empty_like(self.own(padded))
        return own, [reduce_scatter(own, padded, async_op=True)]

    def gather(self, padded: torch.Tensor):
        """The transfers that bring every rank's share of `padded` to all of them, in place."""
        return [] if self.ranks == 1 else [all_gather(padded, self.own(padded).clone(), async_op=True)]

    def whole(self, own: torch.Tensor, count: int) -> torch.Tensor:
        """What the ranks' shares are together, without the padding (a collective)."""
        if self.ranks == 1:
            return own
        whole = own.new_empty(len(own) * self.ranks, *own.shape[1:])
        all_gather(whole, own)
        return whole[:count]


def wait(works) -> None:
    """Wait for transfers."""
    for work in works:
        work.wait()
