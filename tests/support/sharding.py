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
    plain = copy.deepcopy(model).to(torch.bfloat16)
    wanted = loss(plain)
    wanted.backward()
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    for sharded, policy in (
        (model, MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        (narrow, MixedPrecisionPolicy()),
    ):
        for part in (*blocks(sharded), sharded):
            fully_shard(part, mp_policy=policy)
        value = loss(sharded)
        value.backward()
        assert torch.equal(value, wanted)
        for (name, p), q in zip(sharded.named_parameters(), plain.parameters(), strict=True):
            assert p.dtype == p.grad.dtype and torch.equal(p.grad.full_tensor().bfloat16(), q.grad), name
        named = {name: p for name, p in sharded.named_parameters() if name.endswith("log_sigma")}
        stepped = {name: p.full_tensor() - p.grad.full_tensor() for name, p in named.items()}
        torch.optim.SGD(sharded.parameters(), lr=1.0).step()
        assert stepped and all(torch.equal(named[name].full_tensor(), stepped[name]) for name in stepped)
