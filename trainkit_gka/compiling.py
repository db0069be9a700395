"""torch.compile: whether it works here, asked before a run starts."""

import torch

from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.distributed import Runtime

OFF = "off"


def mode(flag: str, value: str, automatic: str, runtime: Runtime) -> str:
    """How to compile for `runtime`'s device: `value`, or `automatic` if that is "auto"; "off" is not at all.

    flag: whose value it is, such as "--compile". Where torch.compile fails "auto" becomes "off", with one printed line,
    and any other value raises UserError. Waits for no other process.
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
    """Why torch.compile fails on `device`, or None. It compiles a sum, for which it needs all that models need.

    Takes seconds; a model that is compiled afterwards takes as much less.
    """
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.zeros(8, device=device))
    except Exception as error:  # from the compiler, Triton or the system, without a type in common
        return reason_of(getattr(error, "inner_exception", error))
    return None
