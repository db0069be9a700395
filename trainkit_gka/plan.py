"""--dry-run: prints the settings of a training, and its steps, disk space and hours."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from trainkit_gka.cli import flag_of
from trainkit_gka.hardware import peak_flops
from trainkit_gka.progress import LOG, read_events
from trainkit_gka.results import describe_hardware, hardware_of, read_results
from trainkit_gka.trainer import Trainer

UTILISATION = 0.4  # of a GPU's peak, where no run says how fast it is


def show_plan(trainer: Trainer, checked: dict[str, str]) -> None:
    """Print the plan, `Trainer.check`'s lines last, on rank 0. A collective: optimisers gather their state for it."""
    sizes = checkpoint_sizes(trainer)
    if not trainer.runtime.is_main:
        return
    for name, value in asdict(trainer.config).items():
        print(f"{flag_of(name):<28} {'none' if value in ('', None, ()) else value}")
    print()
    for name, value in (plan(trainer, sizes) | checked).items():
        print(f"{name:<28} {value}")


def checkpoint_sizes(trainer: Trainer) -> dict[str, int]:
    """The bytes of a checkpoint's tensors, by file; its other files are small. A collective."""
    tensors = trainer.contents().tensors
    sizes = {name: sum(tensor.nbytes for tensor in group.values()) for name, group in tensors.items()}
    if sizes.get("optimizer") == 0:  # torch's AdamW makes its state, two moments, at the first step
        sizes["optimizer"] = 2 * sum(parameter.nbytes for parameter in trainer.model.parameters())
    return sizes


def plan(trainer: Trainer, sizes: dict[str, int]) -> dict[str, Any]:
    """The lines of the plan, by name. sizes: from `checkpoint_sizes`."""
    config, runtime, (unit, per_step, flops) = trainer.config, trainer.runtime, trainer.work()
    steps = trainer.steps - trainer.state["step"]
    rest = f" of {trainer.steps:,}, the rest of the run" if trainer.state["step"] else ""
    parts = ", ".join(f"{name} {gigabytes(part)}" for name, part in sizes.items())
    return {
        "run": f"{config.folder}, on {runtime.world_size} x {runtime.device.type}",
        "parameters": f"{parameters(trainer):,}",
        f"{trainer.STEP}s": f"{steps:,}{rest}",
        **({} if per_step == 1 else {unit: f"{steps * per_step:,} {unit}, {per_step:,} a step"}),
        "FLOPs": f"{steps * per_step * flops:.4g}" if flops else "not known",
        "a checkpoint": f"{sum(sizes.values()):,} bytes: {parts}",
        "disk": disk(trainer, sizes),
        "hours": hours(trainer, steps * per_step, unit, flops),
    }


def parameters(trainer: Trainer) -> int:
    return sum(parameter.numel() for parameter in trainer.model.parameters())


def disk(trainer: Trainer, sizes: dict[str, int]) -> str:
    """The bytes of the checkpoints that stay, the most while another one is written, and whether the disk has room."""
    config, size = trainer.config, sum(sizes.values())
    total, words = config.keep * size, f"--keep {config.keep}"
    if trainer.NOT_IN_BEST is not None:
        total += sum(part for name, part in sizes.items() if name not in trainer.NOT_IN_BEST)
        words += " and the best weights"
    out, most = config.out.absolute(), total + size  # an old one goes when a new one is complete
    free = shutil.disk_usage(next(folder for folder in (out, *out.parents) if folder.exists())).free
    there = sum(path.stat().st_size for path in config.folder.glob("*/step_*/*.safetensors"))  # of this run already
    short = "" if most <= free + there else "; that is too little: free some, or lower --keep"
    return f"{total:,} bytes for {words}, {gigabytes(most)} while one is written, {gigabytes(free)} free{short}"


def gigabytes(size: int) -> str:
    """Bytes as GB, or MB where they are fewer."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"


def hours(trainer: Trainer, amount: int, unit: str, flops: float | None) -> str:
    """The hours for `amount` tokens or images, and the source of that estimate."""
    peak = peak_flops(trainer.runtime.device)
    devices = trainer.runtime.world_size
    on = f"{devices} x {describe_hardware(trainer.runtime.device)}"
    alone = f"FLOPs alone, at {UTILISATION:.0%} of the peak of"
    estimates = [(UTILISATION * peak * devices / flops, alone)] if peak and flops else []
    for speed, source in (*measured(trainer, f"{unit}_per_second"), *estimates):
        return f"{amount / speed / 3600:,.2f}, an estimate from {source} {on}: {speed:,.5g} {unit}/s"
    missing = "the FLOPs of the model are" if peak else "the peak of this device is"
    return f"not known: no run of this size on {on} is in {trainer.config.results}, and {missing} not known either"


def measured(trainer: Trainer, name: str) -> Iterator[tuple[float, str]]:
    """Speeds of this hardware and number of processes with their sources: this run, then finished runs of its size."""
    config = trainer.config
    here = (trainer.runtime.world_size, describe_hardware(trainer.runtime.device))
    *_, start = [{}, *read_events(config.folder / LOG, "start", "world_size", "hardware")]
    *_, last = [{}, *read_events(config.folder / LOG, "train", name)]
    if start and (start["world_size"], start["hardware"]) == here and last.get(name):
        yield last[name], "this run so far, on"
    run = (trainer.KIND, parameters(trainer), *here)
    for row in reversed(read_results(config.results, "parameters", name)):
        numbers = row["metrics"]
        if (row.get("kind"), numbers["parameters"], row.get("processes"), hardware_of(row)) == run and numbers[name]:
            yield numbers[name], f"the run of {row.get('date')} in {config.results}, on"
