"""When a call of the library must be seen as a torch operator, and how such an operator is registered."""

from collections.abc import Callable

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)
REVISION = 6  # part of the operators' names: torch keeps compiled programs, and finds them again by names and arguments


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these are numbers in memory, and nothing traces, fakes or transforms what is done with them."""
    watched = (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
    return not watched and all(t is None or (type(t) in PLAIN and not t.is_neg()) for t in tensors)


def operator(name: str, schema: str) -> Callable:
    """Register a function as operator gka::name_vN, for CPU tensors: torch.library.custom_op without its checks, which
    take as long as a small kernel.

    Whoever changes what an operator takes or gives back raises `REVISION`: a program that was compiled before would go
    on to expect what it was.
    """
    name = f"{name}_v{REVISION}"
    torch.library.define(f"gka::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))

    def register(function: Callable):
        torch.library.impl(f"gka::{name}", "CPU", function)
        return getattr(torch.ops.gka, name).default

    return register
