"""What --dry-run shows: the settings of a training, and what it would take in steps, disk and hours."""

import shutil
from dataclasses import asdict
from typing import Any

from trainkit_gka.cli import flag_of
from trainkit_gka.hardware import peak_flops
from trainkit_gka.results import hardware_of, read_results
from trainkit_gka.trainer import Trainer

UTILISATION = 0.4  # of a GPU's peak, where no finished run says how fast it is


def show_plan(trainer: Trainer) -> None:
    """Print the plan on rank 0. A collective: optimisers gather their state to be measured."""
    tensors = trainer.kept().tensors
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    if not tensors.get("optimizer", True):  # torch's AdamW makes its two moments at the first step
        size += 2 * sum(parameter.nbytes for parameter in trainer.model.parameters())
    if not trainer.runtime.is_main:
        return
    for name, value in asdict(trainer.config).items():
        print(f"{flag_of(name):<28} {'none' if value in ('', None, ()) else value}")
    print()
    for name, value in plan(trainer, size).items():
        print(f"{name:<28} {value}")


def plan(trainer: Trainer, size: int) -> dict[str, Any]:
    """What the training would take. size: the bytes of a checkpoint's tensors."""
    config, runtime, (unit, per_step, flops) = trainer.config, trainer.runtime, trainer.work()
    steps = trainer.steps - trainer.state["step"]
    kept = size * (config.keep + 1)  # an old one goes when a new one is complete
    out = config.out.absolute()
    free = shutil.disk_usage(next(folder for folder in (out, *out.parents) if folder.exists())).free
    seen = f"{steps * per_step:,} {unit}, {per_step:,} a step"
    short = "" if kept <= free else "; that is too little: free some, or lower --keep"
    return {
        "run": f"{config.folder}, on {runtime.world_size} x {runtime.device.type}",
        "parameters": f"{sum(parameter.numel() for parameter in trainer.model.parameters()):,}",
        f"{trainer.STEP}s": f"{steps:,}"
        + (f" of {trainer.steps:,}, the rest of the run" if trainer.state["step"] else ""),
        **({} if per_step == 1 else {unit: seen}),
        "FLOPs": f"{steps * per_step * flops:.4g}" if flops else "not known",
        "a checkpoint": f"{size / 1e9:,.3f} GB",
        "disk": f"{kept / 1e9:,.3f} GB for {config.keep} checkpoints and one more, {free / 1e9:,.1f} GB free{short}",
        "hours": hours(trainer, steps * per_step, unit, flops),
    }


def hours(trainer: Trainer, amount: int, unit: str, flops: float | None) -> str:
    """How long `amount` of tokens or images takes, and what that is estimated from."""
    config, runtime, name = trainer.config, trainer.runtime, f"{unit}_per_second"
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    for row in reversed(read_results(config.results, "parameters", name)):
        done = row["metrics"]
        same = row.get("kind") == trainer.KIND and row.get("processes") == runtime.world_size
        if same and done["parameters"] == parameters and done[name]:
            source = (
                f"the run of {row.get('date')} in {config.results}, on {hardware_of(row)}: {done[name]:,.0f} {unit}/s"
            )
            return f"{amount / done[name] / 3600:,.2f}, an estimate from {source}"
    peak = peak_flops(runtime.device)
    if not peak or not flops:
        missing = "the FLOPs of the model are" if peak else "the peak of this device is"
        return f"not known: {config.results} has no run of this size, and {missing} not known either"
    speed = UTILISATION * peak * runtime.world_size
    return f"{amount * flops / speed / 3600:,.2f}, an estimate from FLOPs alone, at {UTILISATION:.0%} of the peak"
