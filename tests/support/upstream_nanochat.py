"""Run inside a checkout of upstream nanochat: what its models compute, as a file of tensors for the tests to compare.

python upstream_nanochat.py OUT.safetensors '{"attention": "gka"}'
"""

import json
import os
import sys

sys.path.insert(0, os.getcwd())

import torch
from nanochat.engine import KVCache
from nanochat.gpt import GPT, GPTConfig
from safetensors.torch import save_file

SHAPE = dict(sequence_len=32, vocab_size=100, n_layer=4, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SSL")
RATES = dict(unembedding_lr=0.004, embedding_lr=0.3, matrix_lr=0.02, weight_decay=0.2, scalar_lr=0.5)
CACHE_CHUNKS = [9, 1, 1, 20, 1, 3]  # tokens per pass, beyond the short and the long window


def ids() -> torch.Tensor:
    row, column = torch.arange(3)[:, None], torch.arange(35)[None]
    return (7 * row + 3 * column + column * column) % 100


def main(out: str, form: str) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**SHAPE, **json.loads(form)))
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    model.init_weights()
    tensors = {f"init.{name}": value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():  # away from the zeros that hide most of the model
            parameter.add_(0.1 * torch.randn_like(parameter))
    tensors |= {f"start.{name}": value.clone() for name, value in model.state_dict().items()}

    tokens = ids()
    tensors["logits"] = model(tokens).detach()
    cache = KVCache(batch_size=3, num_heads=2, seq_len=40, head_dim=32, num_layers=4, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        tensors["cached"] = torch.cat(
            [model(part, kv_cache=cache) for part in tokens.split(CACHE_CHUNKS, dim=1)], dim=1
        )
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


if __name__ == "__main__":
    main(*sys.argv[1:])
