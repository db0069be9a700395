"""Run inside a checkout of patched nanochat: the AdamW of several processes moves GKA's parameters as that of one.

python upstream_ranks.py RANKS '{"attention": "gka"}' STORE

Ten heads, as at depth 20, which are not divisible among the ranks. gloo has no futures of reduce_scatter, so that is
waited for at once.
"""

import json
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.getcwd())

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nanochat.gpt import GPT, GPTConfig

SHAPE = dict(sequence_len=8, vocab_size=64, n_layer=1, n_head=10, n_kv_head=10, n_embd=1040)


def waited(operator):
    def call(*arguments, async_op, **keywords):
        operator(*arguments, **keywords)
        return SimpleNamespace(get_future=lambda: SimpleNamespace(wait=lambda: None))

    return call


def stepped(form: dict) -> dict[str, torch.Tensor]:
    """The parameters that AdamW trains, after two steps."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SHAPE, **form))
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():  # away from the zeros that hide most of the model
            parameter.add_(0.1 * torch.randn_like(parameter))
    optimizer = model.setup_optimizer()
    optimizer.param_groups = [group for group in optimizer.param_groups if group["kind"] == "adamw"]
    mine = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    ids = torch.arange(18).view(2, 9) % 7
    for _ in range(2):
        model(ids[:, :8], ids[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters() if id(parameter) in mine}


def rank(number: int, ranks: int, form: dict, store: str, alone: dict[str, torch.Tensor]) -> None:
    torch.set_num_threads(1)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    os.environ.update(zip(names, map(str, (number, number, ranks))))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=ranks)
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, waited(getattr(dist, name)))
    for name, parameter in stepped(form).items():
        torch.testing.assert_close(parameter, alone[name], rtol=1e-5, atol=1e-6, msg=name)


def main(ranks: str, form: str, store: str) -> None:
    alone = stepped(json.loads(form))
    mp.spawn(rank, (int(ranks), json.loads(form), store, alone), nprocs=int(ranks))
    print("alike", *alone)


if __name__ == "__main__":
    main(*sys.argv[1:])
