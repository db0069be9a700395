"""Run inside a checkout of upstream nanochat.

python upstream_nanochat.py OUT.safetensors FORM     its model's numbers, as a file of tensors for the tests to compare
python upstream_nanochat.py RANKS FORM STORE         patched: AdamW on several processes moves parameters as on one

FORM: JSON such as {"attention": "gka"}.
"""

import json
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.getcwd())

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nanochat.engine import KVCache
from nanochat.gpt import GPT, GPTConfig
from safetensors.torch import save_file

SHAPE = dict(sequence_len=32, vocab_size=100, n_layer=4, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SSL")
# Ten heads, as at depth 20, which are not divisible among the ranks.
RANKS_SHAPE = dict(sequence_len=8, vocab_size=64, n_layer=1, n_head=10, n_kv_head=10, n_embd=1040)
RATES = dict(unembedding_lr=0.004, embedding_lr=0.3, matrix_lr=0.02, weight_decay=0.2, scalar_lr=0.5)
CACHE_CHUNKS = [9, 1, 1, 20, 1, 3]  # tokens per pass, beyond the short and the long window


def moved(model):
    """The parameters away from the zeros that hide most of the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def numbers(out: str, form: dict) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**SHAPE, **form))
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.init_weights()
    tensors = {f"init.{name}": value.clone() for name, value in model.state_dict().items()}
    tensors |= {f"start.{name}": value.clone() for name, value in moved(model).state_dict().items()}
    row, column = torch.arange(3)[:, None], torch.arange(35)[None]
    tokens = (7 * row + 3 * column + column * column) % 100
    tensors["logits"] = model(tokens).detach()
    cache = KVCache(batch_size=3, num_heads=2, seq_len=40, head_dim=32, num_layers=4, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        parts = [model(part, kv_cache=cache) for part in tokens.split(CACHE_CHUNKS, dim=1)]
        tensors["cached"] = torch.cat(parts, dim=1)
    inputs, targets = tokens[:, :32], tokens[:, 1:33].contiguous()
    optimizer = model.setup_optimizer(**RATES)
    for step in range(2):
        loss = model(inputs, targets)
        loss.backward()
        tensors[f"loss.{step}"] = loss.detach()
        optimizer.step()
        model.zero_grad()
        tensors |= {f"step{step}.{name}": value.clone() for name, value in model.state_dict().items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, out)


def stepped(form: dict) -> dict[str, torch.Tensor]:
    """The parameters that AdamW trains, after two steps."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**RANKS_SHAPE, **form))
    model.init_weights()
    optimizer = moved(model).setup_optimizer()
    optimizer.param_groups = [group for group in optimizer.param_groups if group["kind"] == "adamw"]
    mine = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    ids = torch.arange(18).view(2, 9) % 7
    for _ in range(2):
        model(ids[:, :8], ids[:, 1:].contiguous()).backward()
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters() if id(parameter) in mine}


def waited(operator):
    """gloo has no futures of reduce_scatter: it is waited for at once."""

    def call(*arguments, async_op, **keywords):
        operator(*arguments, **keywords)
        return SimpleNamespace(get_future=lambda: SimpleNamespace(wait=lambda: None))

    return call


def rank(number: int, count: int, form: dict, store: str, alone: dict[str, torch.Tensor]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(count))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=count)
    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, waited(getattr(dist, name)))
    for name, parameter in stepped(form).items():
        torch.testing.assert_close(parameter, alone[name], rtol=1e-5, atol=1e-6, msg=name)


def main(first: str, form: str, store: str = "") -> None:
    if not store:
        return numbers(first, json.loads(form))
    alone = stepped(json.loads(form))
    mp.spawn(rank, (int(first), json.loads(form), store, alone), nprocs=int(first))
    print("alike", *alone)


if __name__ == "__main__":
    main(*sys.argv[1:])
