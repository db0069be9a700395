"""torch.compile: a check before a run starts that it works on this machine, and blocks compiled one by one."""

import copy
import itertools
from collections.abc import Iterable

import torch
from torch import nn

from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.distributed import Runtime

OFF = "off"
BLOCKS = "blocks"  # a mode of compilation: a model's blocks one by one, in seconds
MOST_PROGRAMS = 64  # of one piece of code; after eight, torch's own limit, it goes on without compiling


def mode(flag: str, value: str, automatic: str, runtime: Runtime) -> str:
    """The mode of torch.compile on `runtime`'s device: `value`, or `automatic` if that is "auto"; "off" = none.

    flag: the name for messages, such as "--compile". Where torch.compile fails "auto" becomes "off", with one printed
    line, and any other value raises UserError. Waits for no other process.
    """
    chosen = automatic if value == "auto" else value
    reason = None if chosen == OFF else obstacle(runtime.device)
    if reason is None:
        return chosen
    if value != "auto":
        raise UserError(f"{flag} {value}: torch.compile fails here: {reason}; install g++, or use {flag} {OFF}")
    runtime.print(f"{flag} auto: nothing is compiled, torch.compile fails here: {reason}")
    return OFF


def obstacle(device: torch.device) -> str | None:
    """Why torch.compile fails on `device`, or None. Compiles a sum; the model's compilation saves those seconds."""
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(8, device=device))
    except Exception as error:  # from the compiler, Triton or the system, without a type in common
        return reason_of(getattr(error, "inner_exception", error))
    return None


def twin(model: nn.Module) -> nn.Module:
    """Another model with the same parameters and buffers, which can be compiled while `model` stays as it is."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, memo={id(tensor): tensor for tensor in shared})


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile modules in place, each by itself.

    One program serves all that differ in nothing but their tensors. A Python number that differs, such as the rate of a
    dropout, makes a program for each of its values.
    """
    allow_many_programs()
    for block in blocks:
        block.compile(dynamic=False)


def allow_many_programs() -> None:
    """Raise torch's limit of programs for one piece of code, which twins and blocks share, to MOST_PROGRAMS."""
    torch._dynamo.config.recompile_limit = MOST_PROGRAMS
