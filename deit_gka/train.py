"""Training a vision transformer: the command that trains one, or continues a run that was stopped.

    python -m deit_gka.train --data digits --input-size 32 --batch-size 64 --epochs 2 --warmup-epochs 1
    python -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- deit_gka.train --data /imagenet

In run order: data, model and optimiser; an update; the contents of a checkpoint; evaluations; the run's numbers. The
flags are in `training/config.py`, with the recipe; `trainkit_gka/loop.py` is the loop around all of it.

An update is a fixed set of images, dealt to the processes as evenly as possible and accumulated where they do not fit,
so any number of GPUs trains on the same batches; only the draws of stochastic depth depend on it.
"""

import math
import time
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from rich.progress import Progress
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deit_gka.accounting import cost_of, numel
from deit_gka.data.batch import ImageBatch
from deit_gka.data.workers import BatchLoader
from deit_gka.model.attention import operators_of
from deit_gka.model.checkpoints import build, find_model
from deit_gka.model.warm_start import check_same, warm_start, warnings_of
from deit_gka.training.compiled import compiled_by_blocks, has_blocks
from deit_gka.training.config import TrainConfig
from deit_gka.training.distillation import Objective, load_teacher
from deit_gka.training.engine import Mixer, accumulate_gradients, bandwidths, evaluate
from deit_gka.training.images import BrokenList, Fetch, Meter, RunImages, best, fitted
from deit_gka.training.optim import load_state_tensors, make_average, make_optimizer, make_schedule, state_tensors
from gka import bandwidth_warnings
from trainkit_gka import cli, compiling, hardware
from trainkit_gka.checkpoint import Checkpoint, fingerprint
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime, Stop
from trainkit_gka.loop import launch
from trainkit_gka.progress import RunLog, rate
from trainkit_gka.trainer import Contents, Evaluation
from trainkit_gka.trainer import Trainer as BaseTrainer

TRAINING = 3  # times the FLOPs of a forward pass: backward takes two
EVAL_KEYS = ("epoch", "images", "broken")  # of the record of a complete evaluation, beside its metric
ACCURACY_KEYS = ("top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "images", "broken")


class Trainer(BaseTrainer):
    """One vision run. Raises UserError for data or flags that cannot be trained with."""

    KIND, STEP, LOWER = "train_deit", "update", "a lower --lr"
    FINISH_KEYS = ("parameters", "flops", "top1", "images_per_second", "sigma")
    NOT_IN_BEST = ("optimizer",)

    def __init__(self, config: TrainConfig, runtime: Runtime, checkpoint: Checkpoint | None = None):
        super().__init__(config, runtime)
        # Data
        self.images = RunImages(config, runtime, self.folder)
        self.pieces, self.steps_per_epoch = self.images.order.pieces, self.images.order.steps_per_epoch
        self.steps = config.epochs * self.steps_per_epoch
        classes = self.images.classes
        # Model
        self.kwargs = config.timm_arguments()
        drop_path = config.drop_path_of(config.model)
        settings = {**({"drop_path_rate": drop_path} if drop_path else {}), **self.kwargs}
        self.model = build(config.model, len(classes), config.input_size, **settings).to(runtime.device)
        teacher = None
        if config.distillation_type != "none":
            if not hasattr(self.model, "set_distilled_training"):
                needs = "needs a model with a distillation token, such as deit_tiny_gka_distilled_patch16_224"
                raise UserError(f"--distillation-type {config.distillation_type} {needs}; --model is {config.model}")
            self.model.set_distilled_training(True)  # the outputs of both heads
            teacher = load_teacher(config, classes).to(runtime.device)
        if config.grad_checkpointing:
            self.model.set_grad_checkpointing(True)
        self.compile_mode = self._compile_mode()
        self.average = make_average(self.model, config)
        self.metric = "top1" if self.average is None else "ema_top1"  # of the best epoch
        # Optimiser
        self.optimizer = make_optimizer(self.model, config)
        self.schedule = make_schedule(self.optimizer, config, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=config.amp == "float16")
        self.mixer, self.objective = Mixer(config, len(classes)), Objective(config, teacher)
        # Progress so far; `meter` is of the whole run, `recent` since the last printed line
        self.state["broken"] = 0
        self.meter, self.recent = Meter(), Meter()
        self.broken = BrokenList(self.folder)
        self.saves_every.append(self.steps_per_epoch)
        every = config.eval_every * self.steps_per_epoch if config.eval_every > 0 else -1
        keys = (*EVAL_KEYS, self.metric)
        self.evaluations.append(Evaluation("eval", every, self._log_evaluation, keys))
        self.initial_weights: dict[str, str] | None = None  # where they came from, and their hash
        if checkpoint is not None:
            self._load(checkpoint)
        elif config.initial_weights:
            self._start_from(config.initial_weights)

    def _compile_mode(self) -> str:
        """How the model is compiled. Raises UserError if it cannot be as --compile says."""
        chosen, by_blocks = self.config.compile, has_blocks(self.model)
        if chosen == compiling.BLOCKS and not by_blocks:
            raise UserError(
                f"--compile {chosen}: {self.config.model} has no list of blocks; use max-autotune or default"
            )
        on_cuda = compiling.BLOCKS if by_blocks else "max-autotune"
        automatic = on_cuda if self.runtime.device.type == "cuda" else compiling.OFF
        return compiling.mode("--compile", chosen, automatic, self.runtime)

    def _load(self, checkpoint: Checkpoint) -> None:
        config, device = self.config, self.runtime.device
        self.images.check_same(checkpoint.state)
        self.initial_weights = checkpoint.state.get("initial_weights")
        check_same(config.initial_weights, self.initial_weights, self.folder)
        self.model.load_state_dict(checkpoint.tensors("model", device))
        if self.average is not None:
            self.average.module.load_state_dict(checkpoint.tensors("ema", device))
        load_state_tensors(self.optimizer, self.model, checkpoint.tensors("optimizer", device))
        self.scaler.load_state_dict(checkpoint.state["scaler"])
        self.state, self.meter = checkpoint.state["progress"], Meter(**checkpoint.state["meter"])

    def _start_from(self, source: str) -> None:
        """Take the weights in `source` that fit, and print which."""
        start = find_model(source, "--initial-weights")
        self.initial_weights = {"from": source, "hash": fingerprint(start.tensors)}
        done = warm_start(self.model, start.tensors, source, start.classes, self.images.classes)
        self.runtime.print(f"starting from {source}: {done}")
        for warning in warnings_of(start, source, self.images.classes, self.config):
            self.runtime.print(f"warning: {warning}")
        if self.average is not None:
            self.average.set(self.model)

    # Before the first update

    def announce(self) -> dict[str, Any]:
        config, images, order, device = self.config, self.images, self.images.order, self.runtime.device
        parameters, cost, operators = numel(self.model), cost_of(self.model), operators_of(self.model)
        attention = f", attention {config.attention}" if config.attention else ""
        flops = f", {cost.flops / 1e9:.4g} GFLOPs an image" if cost else ""
        counts = f"{len(images.train_set):,} training and {len(images.val_set):,} validation images"
        updates = f"{order.steps_per_epoch:,} updates of {config.batch_size:,} images"
        pieces = f"{len(order.pieces)} x {len(order.pieces[0].places)} images each"
        printed = self.runtime.print
        printed(f"{config.model}{attention}: {parameters:,} parameters{flops}")
        printed(f"{config.data}: {counts} in {len(images.classes)} classes, {config.input_size} pixels a side")
        printed(
            f"{config.epochs} epochs of {updates}: {self.runtime.world_size} x {device.type}, {pieces}; "
            f"peak learning rate {config.scaled_lr:.4g}; {images.num_workers} loading workers each"
        )
        if operators:
            printed(f"Gaussian kernel attention by {', '.join(operators)}")
        dtype = torch.bfloat16 if config.amp in ("auto", "bfloat16") and device.type == "cuda" else torch.float32
        if note := hardware.slow_bfloat16(dtype, device, "try --amp float16"):
            printed(note)
        return {"operators": operators, "initial_weights": self.initial_weights}

    # An update

    @cached_property
    def network(self) -> nn.Module:
        """`model` as it is trained, with the gradients of all processes: made, on all of them, for the first update."""
        network, device = self.model, self.runtime.device
        if self.compile_mode == compiling.BLOCKS:
            network = compiled_by_blocks(network)
        elif self.compile_mode != compiling.OFF:
            network = torch.compile(network, mode=self.compile_mode, dynamic=False)
        if self.runtime.world_size > 1:
            ids = [device.index] if device.type == "cuda" else None
            network = DistributedDataParallel(network, device_ids=ids, gradient_as_bucket_view=True)
        if len(self.pieces) > 1:  # gradients outlive a backward: not in memory that CUDA graphs use again
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        return network

    @cached_property
    def loaded(self) -> BatchLoader:
        """The training batches from where the run stands; their workers start for the first update."""
        return self.images.training_batches(self.state["step"], self.steps)

    def close(self) -> None:
        if "loaded" in vars(self):
            self.loaded.end()

    def step(self, asked_to_stop: bool) -> tuple[dict[str, float], bool]:
        config, runtime, step = self.config, self.runtime, self.state["step"]
        started, fetch = time.perf_counter(), Fetch(self.loaded)
        loss = self._gradients(step, fetch)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad or math.inf)
        # Sums over the processes, and each one's waiting in a place of its own. The loss must be finite before it may
        # touch the weights.
        waits = [fetch.waiting if rank == runtime.rank else 0.0 for rank in range(runtime.world_size)]
        counts = torch.tensor([float(asked_to_stop), len(fetch.broken), fetch.loading, *waits], device=norm.device)
        loss, stopping, broken, loading, *waits = runtime.sum(torch.cat([loss[None], counts])).tolist()
        norm = float(norm)
        # float16 overflows now and then, and its update is left out; below a scale of 1 the gradient is too large.
        may_overflow = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        if not math.isfinite(loss) or not (math.isfinite(norm) or may_overflow):
            raise self.diverged(f"the loss is {loss} and the gradient's norm {norm}")
        self.schedule.step_update(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state["step"] = step + 1
        if self.average is not None:
            self.average.update(self.model, step=step + 1 if config.model_ema_warmup else None)
        self.broken.report(fetch.broken, "a neighbour in the batch takes its place")
        self.state["broken"] += int(broken)
        if self.pace.step():
            for meter in (self.meter, self.recent):
                meter.add(config.batch_size, time.perf_counter() - started, max(waits), loading)
        return {"loss": loss, "grad_norm": norm}, stopping > 0

    def _gradients(self, step: int, fetch: Fetch) -> torch.Tensor:
        """Forward and backward of this process's part of the update. Returns its part of the mean loss."""
        network = self.network  # made before the gradients are set to zero: it may make them
        self.model.train()
        self.optimizer.zero_grad(set_to_none=len(self.pieces) == 1)
        try:
            return accumulate_gradients(
                network, self.pieces, fetch, self.mixer, step, self.runtime, self.scaler.scale, self.objective
            )
        except ValueError:  # on a CPU the operator refuses bandwidths that are not finite
            if self.is_finite():
                raise
            raise self.diverged("the weights are not finite") from None

    def diverged(self, reason: str, details: str = "", consequence: str = "") -> UserError:
        sigma = [value for *_, values in bandwidths(self.model) for value in values]
        spread = f", sigma between {min(sigma):.3g} and {max(sigma):.3g}" if sigma else ""
        lr = self.optimizer.param_groups[0]["lr"]
        return super().diverged(reason, f"{details} (learning rate {lr:.3g}{spread})", consequence)

    def status(self, numbers: dict[str, float]) -> str:
        epoch, speed = self.state["step"] / self.steps_per_epoch, self.speed(self.recent)["images_per_second"]
        return f"epoch {epoch:.1f}/{self.config.epochs}  loss {numbers['loss']:.4f}  {rate(speed, 'img/s')}"

    def describe(self, numbers: dict[str, float]) -> tuple[str, dict[str, Any]]:
        step = self.state["step"]
        epoch = self.state["step"] / self.steps_per_epoch
        lr = self.optimizer.param_groups[0]["lr"]  # of the last update
        text = f"update {step:06d}/{self.steps:06d} | epoch {epoch:.2f} | loss {numbers['loss']:.4f} | lr {lr:.3e}"
        text += f" | grad norm {numbers['grad_norm']:.2f}"
        speed, self.recent = self.speed(self.recent), Meter()
        text += self.speed_text(speed)
        if speed["waiting"] is not None:
            text += f" | {speed['waiting']:.0%} waiting for images"
        return text, {**numbers, "lr": lr, "weight_decay": self.config.weight_decay, "epoch": epoch, **speed}

    def work(self) -> tuple[str, int, float | None]:
        cost = cost_of(self.model)
        return "images", self.config.batch_size, TRAINING * cost.flops if cost else None

    # The contents of a checkpoint

    def contents(self) -> Contents:
        """All randomness is a function of the seed and the update's number: no state of a random generator is here."""
        config = self.config
        average = {} if self.average is None else {"ema": self.average.module.state_dict()}
        shape = {"num_classes": len(self.images.classes), "input_size": config.input_size}
        tensors = {"model": self.model.state_dict(), **average, "optimizer": state_tensors(self.optimizer, self.model)}
        about = {
            "model": {"name": config.model, **shape, "kwargs": self.kwargs},  # from which `load_run` builds it
            **self.images.about(),
            "initial_weights": self.initial_weights,
            "meter": asdict(self.meter),
            "scaler": self.scaler.state_dict(),
            "epoch": self.state["step"] / self.steps_per_epoch,
        }
        return Contents(tensors, about)

    def data_hashes(self) -> dict[str, str]:
        return self.images.data_hashes()

    # Evaluations

    def _log_evaluation(self, log: RunLog, stop: Stop, bar: Progress) -> None:
        """Evaluate after an epoch, and keep the weights if they are the best."""
        epoch, values = self.state["step"] // self.steps_per_epoch, self.evaluate(bar, stop)
        earlier = log.records("eval", *EVAL_KEYS, self.metric) if log.enabled else []
        is_best = values is best([*earlier, values], self.metric)
        if self.runtime.any(self.runtime.is_main and is_best):  # the others do not read the log
            self.save("best", leave_out=self.NOT_IN_BEST, keep=1, again=True)  # may hold an earlier history's
        speed, sigma, broken = self.speed(self.meter), self.sigma(), self.state["broken"]
        text = f"epoch {epoch}/{self.config.epochs} | {accuracy_text(values)}"
        if heads := [value for layer in sigma.values() for value in layer]:
            text += f" | sigma {min(heads):.2f}-{max(heads):.2f}"
        text += self.speed_text(speed)
        text += f"\nbroken training images replaced {broken} times so far" if broken else ""
        more = {"memory_mib": self.memory(), "sigma": sigma, "broken_train": broken}
        log.log("eval", self.state["step"], text, epoch=epoch, **values, **speed, **more)

    def evaluate(self, bar: Progress, stop: Stop | None = None) -> dict[str, Any]:
        """Accuracy of the raw weights and, as ema_*, of the average; how many images were judged, and were broken."""
        models = {"": self.model}
        if self.average is not None:
            models["ema_"] = self.average.module
        for model in models.values():  # a ViT has no buffers; where there are some, those of rank 0 are saved
            self.runtime.broadcast(model.buffers())
        total = -(-len(self.images.val_set) // self.runtime.world_size)
        task = bar.add_task("evaluating", total=total, status="")

        def advance(batch: ImageBatch) -> None:
            bar.advance(task, len(batch.labels))
            self.broken.report(batch.broken, "left out of the evaluation")

        with closing(self.images.validation_batches()) as loader:
            results = evaluate(models, loader, self.runtime, self.config.amp, advance, stop)
        bar.remove_task(task)
        values = {f"{prefix}{key}": value for prefix, result in results.items() for key, value in result.items()}
        return {key: values[key] for key in ACCURACY_KEYS if key in values}

    def warnings(self) -> dict[str, str]:
        warnings = {}
        for number, layer, sigma in bandwidths(self.model):
            warnings |= bandwidth_warnings(number, sigma, layer.head_dim, "--lr")
        return warnings

    # The run's numbers

    def summary(self, log: RunLog) -> tuple[dict[str, Any], str]:
        evaluations, cost = log.records("eval", *EVAL_KEYS, self.metric), cost_of(self.model)
        last, highest = evaluations[-1], best(evaluations, self.metric)
        numbers = {
            "parameters": numel(self.model),
            "flops": cost.flops if cost else None,
            **{key: last[key] for key in ACCURACY_KEYS if key in last},
            "best": {"metric": self.metric, "value": highest[self.metric], "epoch": highest["epoch"]},
            **self.speed(self.meter),
            "memory_mib": self.memory(),
            "broken_train": self.state["broken"],
            "sigma": self.sigma(),
        }
        return numbers, accuracy_text(numbers) + self.speed_text(numbers)

    def speed(self, meter: Meter) -> dict[str, float | None]:
        """Images per second and the part of the time spent waiting, over all processes."""
        return meter.rates(max(1, self.images.num_workers) * self.runtime.world_size)

    def speed_text(self, speed: dict[str, Any]) -> str:
        """Speed and peak GPU memory, where they are known."""
        text = f" | {rate(speed['images_per_second'], 'img/s')}" if speed["images_per_second"] else ""
        return text + (f" | {memory:,.0f} MiB" if (memory := self.memory()) else "")

    def memory(self) -> float:
        """Peak GPU memory of this process in MiB; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**20 if self.runtime.device.type == "cuda" else 0.0

    def sigma(self) -> dict[str, list[float]]:
        """Learned bandwidths of the GKA layers, per head."""
        return {f"layer_{layer}": [round(value, 4) for value in values] for layer, _, values in bandwidths(self.model)}


def accuracy_text(values: dict[str, Any]) -> str:
    """Accuracy and loss of the raw weights and, in the same order, of the average; and how many images are broken."""
    text = f"top-1 {values['top1']:.2f} top-5 {values['top5']:.2f} loss {values['loss']:.3f}"
    if "ema_top1" in values:
        text += f" | EMA {values['ema_top1']:.2f} {values['ema_top5']:.2f} {values['ema_loss']:.3f}"
    return text + (f" | on {values['images']:,} images, {values['broken']} more are broken" if values["broken"] else "")


def main(config: TrainConfig) -> None:
    config.check()  # before its images are looked at
    launch(fitted(config), Trainer)


if __name__ == "__main__":
    cli.run(main, TrainConfig)
