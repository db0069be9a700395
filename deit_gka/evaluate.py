"""Top-1 and top-5 accuracy of a trained run, or of any timm model, on any of the data sources.

python -m deit_gka.evaluate --run out/runs/deit_tiny_gka_patch16_224 --data /imagenet
python -m deit_gka.evaluate --model deit_tiny_patch16_224 --checkpoint deit_tiny_patch16_224-a1311bcf.pth \
    --crop-pct 0.875 --data /imagenet
"""

import functools
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from timm.data import resolve_input_data_config
from torch import nn

from deit_gka.accounting import cost_of, numel
from deit_gka.data import workers
from deit_gka.data.batch import ImageBatch
from deit_gka.data.sources import FORMS, DataParts, ImageSource, located, open_source
from deit_gka.data.sources.base import ignored_text
from deit_gka.data.sources.classes import numbers_in_model, one_class_text
from deit_gka.data.transforms import eval_transform, in_words
from deit_gka.data.workers import WorkerCount, evaluation_batches
from deit_gka.model import checkpoints
from deit_gka.model.checkpoints import SavedModel, find_model
from deit_gka.training.engine import evaluate
from trainkit_gka.checkpoint import run_folder
from trainkit_gka.cli import Bounds, Count, Group, UserError, flag_of, run
from trainkit_gka.distributed import Runtime, running
from trainkit_gka.progress import progress_bar, rate
from trainkit_gka.results import append_result


@dataclass(frozen=True)
class EvaluateConfig(DataParts):
    """Measure top-1 and top-5 accuracy of a run (--run), or of a timm model (--model with its weights)."""

    run: Path | None = None
    """The run's folder, one checkpoint folder in it, or an exported folder."""
    weights: list[Literal["ema", "model"]] = field(default_factory=lambda: list(checkpoints.WEIGHTS))
    """Which weights of the run: the average, the raw ones, or both."""
    best: bool = False
    """Take the run's checkpoint with the best accuracy instead of the newest."""
    model: str = ""
    """A timm name, when there is no --run."""
    model_kwargs: tuple[str, ...] = ()
    """Arguments for timm, e.g. img_size=64 attention=GGGA."""
    checkpoint: Path | None = None
    """Weights for --model: a .safetensors or .pth file, DeiT's own too."""
    pretrained: bool = False
    """Take timm's weights for --model."""
    data: Annotated[str, Group.DATA] = ""
    """A folder with train/ and val/ (class folders or tars) or of parquet, hf:NAME, hf-stream:NAME, wds:FOLDER, digits,
    cifar10; empty = the run's."""
    split: Annotated[Literal["val", "train"], Group.DATA] = "val"
    """Which images to evaluate on."""
    crop_pct: Annotated[float, Bounds(0, 1, open_least=True, other=(-1, "the run's"))] = -1.0
    """Part of the resized image that is looked at; -1 = the run's, or timm's for --model (DeiT's figures: 0.875)."""
    device_batch_size: Count = 256
    """Images per process at once."""
    num_workers: WorkerCount = -1
    """Processes that load images. -1 = this process's share of the cores."""
    amp: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """The autocast type. auto = bfloat16 on CUDA, float32 on CPU."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute; auto takes CUDA if there is one."""
    results: Path = Path("out/results.jsonl")
    """The file to append the numbers to."""


def check(config: EvaluateConfig) -> None:
    """Raises UserError for flags that do not go together."""
    if not config.data and config.run is None:
        raise UserError(f"--data is missing; it is {FORMS}")
    if (config.run is None) == (not config.model):
        raise UserError("give either --run (a trained run) or --model (a timm name)")
    if config.run is not None and not config.run.is_dir():
        raise UserError(f"--run {config.run} is not a folder; give the folder of a run, or an exported one")
    if config.model and config.checkpoint is None and not config.pretrained:
        raise UserError("--model needs weights: --checkpoint FILE, or --pretrained for timm's")
    if not config.weights:
        raise UserError("--weights needs ema, model or both")


def completed(config: EvaluateConfig, saved: SavedModel | None) -> tuple[EvaluateConfig, str]:
    """The config with the data that the run was trained on where none is named, and a warning. saved: --run's model.

    Their parts (splits, columns) are the run's too. Raises UserError for an exported folder without data.
    """
    run, chosen = config.run, config.given_parts()
    if saved is None or (config.data and saved.checkpoint is None):
        return config, ""
    if saved.checkpoint is None:
        raise UserError(f"--data is missing: {run} is an exported model, which does not say where its images are")
    data, parts = saved.checkpoint.state["trained_on"], saved.checkpoint.state["parts"]
    if config.data and located(config.data) != data:
        unused = " ".join(f"{flag_of(name)} {value}" for name, value in parts.items() if name not in chosen)
        note = f"{config.data} is not the data that {run} was trained on ({data}); its {unused} is not taken over"
        return config, f"warning: {note}" if unused else ""
    return replace(config, data=config.data or data, **{**parts, **chosen}), ""


def load_models(
    config: EvaluateConfig, saved: SavedModel | None, device: torch.device
) -> tuple[dict[str, nn.Module], dict[str, Any], Sequence[str]]:
    """(models by name, arguments of `eval_transform`, names of their classes, in their order, if they are known).

    Of a run there is one with each of --weights that it has; else there is one model. Raises UserError.
    """
    if saved is not None and saved.checkpoint is not None:
        available = [name for name in config.weights if name in checkpoints.weights_in(saved.checkpoint)]
        models, about = {name: saved.model(name) for name in available or config.weights}, saved.about
        classes = saved.classes
    else:
        if saved is not None:
            name, model, classes = config.run.name, saved.model(), saved.classes
        else:
            name, file = config.model, config.checkpoint
            model = checkpoints.timm_model(name, config.model_kwargs, file, pretrained=file is None)
            known = model.pretrained_cfg.get("label_names") or ()
            classes = checkpoints.find_model(file, "--checkpoint").classes if file else known
        models, about = {name: model}, resolve_input_data_config(model)
    models = {name: model.to(device) for name, model in models.items()}
    return models, {"input_size": tuple(about["input_size"][-2:]), **checkpoints.eval_settings(about)}, classes


def measure(config: EvaluateConfig, saved: SavedModel | None, runtime: Runtime, data_note: str) -> dict[str, dict]:
    """Accuracy, speed and cost of every model, by name, from one pass over the images. Prints the note, too."""
    num_workers = workers.default_workers() if config.num_workers < 0 else config.num_workers
    if num_workers:
        workers.worker_context(config.data)
    source = runtime.agree(lambda: open_source(config.data, config.split, config))
    models, settings, classes = runtime.agree(lambda: load_models(config, saved, runtime.device))
    name = config.run or config.model
    count = len(classes) or next(iter(models.values())).num_classes

    def numbers_of_classes() -> tuple[list[int], str]:
        if count != len(source.classes):
            raise UserError(f"{name} was trained on {count} classes but {config.data} has {len(source.classes)}")
        workers.check_shared_memory(num_workers, settings["input_size"], config.device_batch_size, source)
        return numbers_in_model(source.classes, config.data, classes, str(name))

    numbers, note = runtime.agree(numbers_of_classes)
    if config.crop_pct != -1:
        settings["crop_pct"] = config.crop_pct
    warnings = [one_class_text(source.classes), ignored_text(source) if isinstance(source, ImageSource) else ""]
    for text in (data_note, note, *(f"warning: {text}" for text in warnings if text)):
        if text and runtime.is_main:
            print(text, file=sys.stderr)
    transform = eval_transform(**settings)
    loader = evaluation_batches(source, transform, runtime, config.device_batch_size, num_workers, numbers)
    started = time.perf_counter()
    with closing(loader), progress_bar() as bar:
        total = -(-len(source) // runtime.world_size)
        task = bar.add_task(f"evaluating {' and '.join(models)}", total=total, status="")

        def advance(batch: ImageBatch) -> None:
            bar.advance(task, len(batch.labels))
            for image, reason in batch.broken:
                print(f"warning: {image} cannot be read ({reason}); left out", file=sys.stderr)

        results = evaluate(models, loader, runtime, config.amp, advance, timed=True)
    seconds = time.perf_counter() - started
    metrics = {}
    for name, values in results.items():
        cost, loading = cost_of(models[name]), values.pop("loading") / (max(1, num_workers) * runtime.world_size)
        metrics[name] = {
            **values,
            "loader_images_per_second": values["images"] / loading if loading else None,
            "parameters": numel(models[name]),
            "flops": cost.flops if cost else None,
            "crop_pct": settings["crop_pct"],
            "preprocessing": in_words(transform),
        }
        accuracy = f"top-1 {values['top1']:.3f} top-5 {values['top5']:.3f} loss {values['loss']:.4f}"
        skipped = f" ({values['broken']} broken images left out)" if values["broken"] else ""
        text = f"{name}: {accuracy} on {values['images']:,} images{skipped}"
        runtime.print(", ".join(filter(None, (text, rate(values["images_per_second"], "img/s")))))
    loaded = rate(metrics[name]["loader_images_per_second"], "img/s loaded")
    runtime.print(", ".join(filter(None, (f"{in_words(transform)}; {seconds:.3g} s", loaded))))
    return metrics


def main(config: EvaluateConfig) -> None:
    check(config)
    with running(config.device_type) as runtime:
        saved = runtime.agree(lambda: find_model(config.run, "--run", config.best) if config.run else None)
        config, data_note = runtime.agree(functools.partial(completed, config, saved))
        metrics = measure(config, saved, runtime, data_note)
        if runtime.is_main:
            about = {"run": run_folder(config.run).name if config.run else None, "model": config.model or None}
            about |= {"data": config.data, "split": config.split, **config.given_parts()}
            append_result(config.results, "evaluate_deit", about, metrics, runtime.device, runtime.world_size)


if __name__ == "__main__":
    run(main, EvaluateConfig)
