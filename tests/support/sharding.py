"""A model under FSDP2 in a process group of one, which gathers and casts its parameters as a large one does."""

import copy
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@contextmanager
def process_group(folder: Path):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_trains_as_in_bfloat16(
    model: nn.Module, blocks: Callable[[nn.Module], Iterable[nn.Module]], loss: Callable[[nn.Module], torch.Tensor]
) -> None:
    """Float32 weights whose passes FSDP runs in bfloat16, and bfloat16 weights under FSDP, have the gradients of the
    model in bfloat16, to the bit; a step moves the bandwidths. `model` is float32, and sharded in place.
    """
    plain, narrow = (copy.deepcopy(model).to(torch.bfloat16) for _ in range(2))
    expected = loss(plain)
    expected.backward()
    for sharded, dtype in ((model, torch.bfloat16), (narrow, None)):
        for part in (*blocks(sharded), sharded):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        value = loss(sharded)
        value.backward()
        assert torch.equal(value, expected)
        for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert p.dtype == p.grad.dtype and torch.equal(p.grad.full_tensor().bfloat16(), q.grad), name
        bandwidths = [p for name, p in sharded.named_parameters() if name.endswith("log_sigma")]
        stepped = [p.full_tensor() - p.grad.full_tensor() for p in bandwidths]
        torch.optim.SGD(sharded.parameters(), lr=1.0).step()
        assert stepped and all(torch.equal(p.full_tensor(), moved) for p, moved in zip(bandwidths, stepped))
