"""torch.compile: a check before a run starts that it works on this machine."""

import torch

from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.distributed import Runtime

OFF = "off"


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
