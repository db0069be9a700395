"""Top-1 and top-5 accuracy of a trained run, or of any timm model, on any of the data sources.

python -m deit_gka.evaluate --run out/runs/deit_tiny_gka_patch16_224 --data /imagenet
python -m deit_gka.evaluate --model deit_tiny_patch16_224 --checkpoint deit_tiny_patch16_224-a1311bcf.pth --crop-pct 0.875 --data /imagenet
"""

import json
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from timm.data import resolve_input_data_config
from torch import nn

from deit_gka.model.accounting import cost_of
from deit_gka.data.sources import FORMS
from deit_gka.data.transforms import eval_transform
from deit_gka.data.workers import WorkerCount, default_workers, evaluation_batches, worker_context
from deit_gka.model.checkpoints import (
    WEIGHTS,
    build,
    find_checkpoint,
    load_file,
    load_run,
    open_data,
    parse_kwargs,
    trained_on,
)
from deit_gka.training.engine import evaluate
from trainkit.cli import Bounds, Count, UserError, run
from trainkit.distributed import Runtime, running
from trainkit.progress import progress_bar
from trainkit.results import append_result


@dataclass
class EvaluateConfig:
    """Top-1 and top-5 accuracy of a run (--run) or of a timm model (--model with --checkpoint or --pretrained)."""

    run: Path | None = None
    """run folder, or one checkpoint folder in it"""
    weights: list[Literal["ema", "model"]] = field(default_factory=lambda: list(WEIGHTS))
    """of the run: the average, the raw weights, or both"""
    best: bool = False
    """of the run: the checkpoint with the best accuracy instead of the newest"""
    model: str = ""
    """timm name, when there is no --run"""
    model_kwargs: tuple[str, ...] = ()
    """arguments for timm, e.g. img_size=64"""
    checkpoint: Path | None = None
    """weights for --model: .safetensors or .pth (DeiT's own too)"""
    pretrained: bool = False
    """timm's weights for --model"""
    data: str = ""
    """a folder with train/ and val/ (class folders, or webdataset tars), hf:NAME_OR_PATH, hf-stream:NAME_OR_PATH, wds:FOLDER or digits; empty = what
    the run was trained on"""
    split: Literal["val", "train"] = "val"
    """which images"""
    crop_pct: Annotated[float, Bounds(0, 1, open_least=True, other=(-1, "the run's"))] = -1.0
    """part of the resized image that is looked at; -1 = the run's, or timm's for --model (DeiT's own figures: 0.875)"""
    device_batch_size: Count = 256
    """images per process at once"""
    num_workers: WorkerCount = -1
    """processes that load images; -1 = this process's share of the cores"""
    amp: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """autocast type; auto = bfloat16 on CUDA, float32 on CPU"""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes CUDA if there is one"""
    results: Path = Path("out/results.jsonl")
    """file to append the numbers to"""


def check(config: EvaluateConfig) -> None:
    """Raises UserError for values that make no sense."""
    if not config.data and config.run is None:
        raise UserError(f"--data is missing; it is {FORMS}")
    if (config.run is None) == (not config.model):
        raise UserError("give either --run (a trained run) or --model (a timm name)")
    if config.model and config.checkpoint is None and not config.pretrained:
        raise UserError("--model needs weights: --checkpoint FILE, or --pretrained for timm's")
    if not config.weights:
        raise UserError("--weights needs ema, model or both")


def candidates(config: EvaluateConfig, classes: list[str], device) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """name -> (model, transform settings) of everything to evaluate. Raises UserError if the classes do not match."""
    if config.run is not None:
        found = find_checkpoint(config.run, config.best)
        check_same_classes(found.state["classes"], classes, config)
        recipe = found.state["train_config"]
        settings = {"input_size": recipe["input_size"], "crop_pct": recipe["crop_pct"]}
        available = [
            weights for weights in config.weights if (found.path / f"{weights}.safetensors").exists()
        ] or config.weights
        return {weights: (load_run(found, weights, device), settings) for weights in available}
    model = build(config.model, pretrained=config.pretrained, **parse_kwargs(config.model_kwargs))
    if config.checkpoint is not None:
        load_file(config.checkpoint, model)
    if model.num_classes != len(classes):
        raise UserError(f"{config.model} tells {model.num_classes} classes apart but {config.data} has {len(classes)}")
    timms = resolve_input_data_config(model)
    settings = {
        "input_size": tuple(timms["input_size"][-2:]),
        **{key: timms[key] for key in ("crop_pct", "crop_mode", "interpolation", "mean", "std")},
    }
    return {config.model: (model.to(device).eval(), settings)}


def check_same_classes(trained: list[str], there: list[str], config: EvaluateConfig) -> None:
    """UserError if the data's classes cannot be the run's; a warning if only their number says they are (folder names against numbers or words)."""
    if len(trained) != len(there):
        raise UserError(f"{config.run} was trained on {len(trained)} classes but {config.data} has {len(there)}")
    if trained != there and set(trained) & set(there):
        number = next(number for number, (ours, theirs) in enumerate(zip(trained, there)) if ours != theirs)
        raise UserError(
            f"class {number} is '{trained[number]}' for {config.run} but '{there[number]}' in {config.data}; the two must agree"
        )
    if trained != there and os.environ.get("RANK", "0") == "0":
        print(
            f"warning: {config.data} calls its classes otherwise ('{there[0]}' for '{trained[0]}'); taken to be the same in the same order",
            file=sys.stderr,
        )


def data_of(run: Path) -> str:
    """The data a run was trained on. Raises UserError if it did not write that down."""
    state = find_checkpoint(run).state
    if "trained_on" not in state:
        raise UserError(f"--data is missing, and {run} did not write down where its data is: {trained_on(state)}")
    return state["trained_on"]


def measure(config: EvaluateConfig, runtime: Runtime) -> dict[str, dict]:
    """Accuracy of every candidate, by name."""
    config.data = config.data or runtime.agree(lambda: data_of(config.run))
    num_workers = default_workers() if config.num_workers < 0 else config.num_workers
    if num_workers:
        worker_context(config.data)
    source = runtime.agree(lambda: open_data(config.data, config.split, config.run))
    models = runtime.agree(lambda: candidates(config, source.classes, runtime.device))
    metrics = {}
    for settings in {
        json.dumps(settings): settings for _, settings in models.values()
    }.values():  # the raw weights and the average in one pass
        together = {name: model for name, (model, theirs) in models.items() if theirs == settings}
        used = {**settings, **({"crop_pct": config.crop_pct} if config.crop_pct != -1 else {})}
        loader = evaluation_batches(source, eval_transform(**used), runtime, config.device_batch_size, num_workers)
        broken: list[tuple[str, str]] = []
        started = time.perf_counter()
        with closing(loader), progress_bar() as bar:
            task = bar.add_task(
                f"evaluating {' and '.join(together)}", total=-(-len(source) // runtime.world_size), status=""
            )

            def advance(batch, bar=bar, task=task, broken=broken):
                bar.advance(task, len(batch.labels))
                broken += batch.broken

            results = evaluate(together, loader, runtime, config.amp, advance)
        seconds = time.perf_counter() - started
        for name, reason in broken:
            print(f"warning: {name} cannot be read ({reason}); left out", file=sys.stderr)
        for name, values in results.items():
            speed, cost = values["images"] / seconds, cost_of(together[name])
            metrics[name] = {**values, "images_per_second": speed, "parameters": sum(p.numel() for p in together[name].parameters()),
                             "flops": cost.flops if cost else None, "crop_pct": used["crop_pct"]}  # fmt: skip
            skipped = f" ({values['broken']} broken images left out)" if values["broken"] else ""
            runtime.print(
                f"{name}: top-1 {values['top1']:.3f} top-5 {values['top5']:.3f} loss {values['loss']:.4f} on {values['images']:,} images{skipped}"
            )
        runtime.print(f"{seconds:.0f} s, {speed:,.0f} img/s")
    return metrics


def main(config: EvaluateConfig) -> None:
    check(config)
    with running(config.device_type) as runtime:
        metrics = measure(config, runtime)
        if runtime.is_main:
            what = {
                "run": config.run.name if config.run else None,
                "model": config.model or None,
                "data": config.data,
                "split": config.split,
            }
            append_result(config.results, "evaluate_deit", what, metrics, runtime.device, runtime.world_size)


if __name__ == "__main__":
    run(main, EvaluateConfig)
