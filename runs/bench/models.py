"""What the benchmarks of whole models share: compilation, a kernel held fixed, and the gate on logits or gradients."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka.testing import disagreement

# Logits and gradients pass many layers; in float32 twice plain PyTorch's error may be less than a different order of additions makes.
FLOAT32_ROUNDINGS = 32


class HeldToCudnn(nn.Module):
    """A model whose softmax attention is cuDNN's. In `forward`, as torch.compile would else share one program with the unheld twin."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *arguments, **options):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.model(*arguments, **options)


def compiled(model: nn.Module, mode: str) -> Callable:
    """The model under torch.compile; "off" leaves it as it is.

    max-autotune is torch's without its CUDA graphs: the benchmark captures the whole step itself, alike for every candidate, which also lets one
    see how much memory each takes (torch's own graphs of several models share one pool).
    """
    if mode == "off":
        return model
    # Twins share the compiler's memory of a piece of code, and torch stops at eight programs for one.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(model, mode="max-autotune-no-cudagraphs" if mode == "max-autotune" else mode, dynamic=False)


def gradient(model: nn.Module, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The gradient of all parameters as one float64 vector, in main memory: three of a large model's would crowd an accelerator."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    found = torch.cat([p.grad.double().flatten().cpu() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def model_gate(name: str, got: torch.Tensor, want: torch.Tensor, plain: torch.Tensor, half: bool) -> str | None:
    """Why logits or gradients are wrong, or None. plain: the same in the candidate's arithmetic, uncompiled and by the literal equations."""
    floor = torch.finfo(torch.bfloat16).eps if half else FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps
    return disagreement({name: got}, {name: want}, {name: plain}, {name: floor})


def tensors_mib(tensors: Iterable[torch.Tensor]) -> float:
    """Memory of tensors on the accelerator, MiB, each storage once."""
    return (
        sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}.values())
        / 2**20
    )
