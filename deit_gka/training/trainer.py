"""What a vision run holds while it trains: data, model, optimiser, progress; resuming, saving, and one update.

An update is a fixed set of images, dealt to the processes as evenly as possible and accumulated where they do not fit, so any number of
GPUs trains on the same batches; only the draws of stochastic depth depend on it.
"""

import math
import os
import sys
import time
from dataclasses import asdict

import torch
from torch.nn.parallel import DistributedDataParallel

from deit_gka.data.images import Batch, Images, assemble
from deit_gka.data.order import Order
from deit_gka.data.sources import Stream, check_classes, located
from deit_gka.data.transforms import train_transform
from deit_gka.data.workers import batches, default_workers, worker_context
from deit_gka.model.checkpoints import build, describe, open_data, trained_on
from deit_gka.model.warm_start import check_same, fingerprint, read_weights, warm_start
from deit_gka.training.config import TrainConfig
from deit_gka.training.distillation import Objective, load_teacher, prepare_student
from deit_gka.training.engine import Mixer, accumulate_gradients, bandwidths
from deit_gka.training.meter import UPDATES_NOT_TIMED, Meter
from deit_gka.training.optim import load_state_tensors, make_average, make_optimizer, make_schedule, state_tensors
from trainkit import checkpoint
from trainkit.cli import UserError
from trainkit.distributed import Runtime, Stop

BROKEN_LIST = "broken_images.txt"
RUINED = "an earlier update has ruined the weights"
FILE_NAMES = {"encoding": "utf-8", "errors": "surrogateescape"}  # they may be any bytes


class Trainer:
    """Everything a run holds while it trains. `state` is what a checkpoint needs beside tensors."""

    def __init__(self, config: TrainConfig, runtime: Runtime):
        self.config, self.runtime, self.folder = config, runtime, config.folder
        # Data
        self.num_workers = default_workers() if config.num_workers < 0 else config.num_workers
        if self.num_workers:
            worker_context(config.data)
        self.train_set, self.val_set = (open_data(config.data, split, self.folder) for split in ("train", "val"))
        for warning in check_classes(self.train_set, self.val_set):
            runtime.print(f"warning: {warning}")
        self.images = Images(self.train_set, train_transform(config), training=True)
        self.order = Order(self.train_set, config, runtime, config.device_batch_size)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.steps = config.epochs * self.steps_per_epoch
        # Model
        self.kwargs, classes = config.timm_arguments(), len(self.train_set.classes)
        drop_path = config.drop_path_of(config.model)
        settings = {**({"drop_path_rate": drop_path} if drop_path else {}), **self.kwargs}
        self.model = build(config.model, classes, config.input_size, **settings).to(runtime.device)
        prepare_student(self.model, config, config.model)
        teacher = None
        if config.distillation_type != "none":
            teacher = load_teacher(config.teacher_model, config.teacher_path, self.train_set.classes).to(runtime.device)
        self.objective = Objective(config, teacher)
        if config.grad_checkpointing:
            self.model.set_grad_checkpointing(True)
        self.average = make_average(self.model, config)
        # Optimiser
        self.optimizer = make_optimizer(self.model, config)
        self.schedule = make_schedule(self.optimizer, config, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=config.amp == "float16")
        self.mixer = Mixer(config, classes)
        # Progress so far; `meter` is of the whole run, `recent` since the last printed line
        self.state = {"step": 0, "broken": 0}
        self.initial_weights: dict[str, str] | None = None  # where they came from, and their hash
        self.meter, self.recent, self.untimed = Meter(), Meter(), UPDATES_NOT_TIMED
        self.broken: set[str] = set()
        if (self.folder / BROKEN_LIST).exists():
            self.broken = {
                line.split("\t")[0] for line in (self.folder / BROKEN_LIST).read_text(**FILE_NAMES).splitlines()
            }

    # Checkpoints

    def resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is one."""
        found = checkpoint.load_newest(
            self.folder / "checkpoints", warn=lambda message: self.runtime.print(f"warning: {message}")
        )
        if found is None:
            self.start_from_weights()
            return
        self.config.check_resumes(found.state["train_config"])
        own = f"give it its own data, {trained_on(found.state)}, or another --model-tag"
        for key, value in self.about_data().items():
            had = found.state["data"].get(key)
            if (had is None) != (value is None):
                raise UserError(f"{self.config.data} is read {'at random' if value is None else 'as a stream'}, the data of the run in {self.folder} were not: "
                                f"the images would come in another order; {own}")  # fmt: skip
            if had != value:
                raise UserError(f"{self.config.data} has {value} {key} where the run in {self.folder} had {had}; {own}")
        if found.state["classes"] != self.train_set.classes:
            raise UserError(f"{self.config.data} has other classes than the run in {self.folder}; {own}")
        self.initial_weights = found.state.get("initial_weights")
        check_same(self.config.initial_weights, self.initial_weights, self.folder)
        device = self.runtime.device
        self.model.load_state_dict(found.tensors("model", device))
        if self.average is not None:
            self.average.module.load_state_dict(found.tensors("ema", device))
        load_state_tensors(self.optimizer, self.model, found.tensors("optimizer", device))
        self.scaler.load_state_dict(found.state["scaler"])
        self.state, self.meter = found.state["progress"], Meter(**found.state["meter"])

    def start_from_weights(self) -> None:
        """Take what fits of --initial-weights, if they are given, and say what that is."""
        source = self.config.initial_weights
        if source:
            weights = read_weights(source)
            self.initial_weights = {"from": source, "hash": fingerprint(weights)}
            self.runtime.print(f"starting from {source}: {warm_start(self.model, weights, source)}")
            if self.average is not None:
                self.average.set(self.model)

    def about_data(self) -> dict[str, int | None]:
        """What must be the same for the images to go on exactly; processes: that share a stream, None without one."""
        processes = self.runtime.world_size if isinstance(self.train_set, Stream) else None
        return {"processes": processes, "training images": len(self.train_set), "validation images": len(self.val_set)}

    def save(self, folder: str = "checkpoints", with_optimizer: bool = True) -> None:
        """All randomness is a function of the seed and the update's number, so these two are the state of the random generators.

        Raises UserError for weights that are not finite, before they take the place of some that are.
        """
        if not self.is_finite():
            raise UserError(self.diverged("the weights are not finite", "they were not saved"))
        if self.runtime.is_main:
            tensors = {"model": self.model.state_dict()}
            if self.average is not None:
                tensors["ema"] = self.average.module.state_dict()
            if with_optimizer:
                tensors["optimizer"] = state_tensors(self.optimizer, self.model)
            state = {
                "model": describe(self.config.model, len(self.train_set.classes), self.config, self.kwargs),
                "train_config": self.config.identity(),
                "classes": self.train_set.classes,
                "data": self.about_data(),
                "trained_on": located(self.config.data),
                "initial_weights": self.initial_weights,
                "progress": self.state,
                "meter": asdict(self.meter),
                "scaler": self.scaler.state_dict(),
                "epoch": self.state["step"] / self.steps_per_epoch,
            }
            checkpoint.save(
                self.folder / folder, self.state["step"], tensors, state, keep=self.config.keep if with_optimizer else 1
            )
        self.runtime.barrier()

    # One update

    def start(self) -> None:
        """Compile, join the processes' gradients and start the workers. Weights are shared with `model` and the average stays outside."""
        config, device = self.config, self.runtime.device
        mode = ("max-autotune" if device.type == "cuda" else "off") if config.compile == "auto" else config.compile
        self.network = self.model if mode == "off" else torch.compile(self.model, mode=mode, dynamic=False)
        if self.runtime.world_size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.network = DistributedDataParallel(self.network, device_ids=ids, gradient_as_bucket_view=True)
        if (
            len(self.order.pieces) > 1
        ):  # gradients that outlive a backward must not lie in memory that CUDA graphs use again
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        keys = self.order.batches(self.state["step"], self.steps)
        self.loaded = batches(self.images, keys, self.num_workers, device)

    def next_batch(self, size: int) -> Batch:
        started = time.perf_counter()
        batch = assemble(self.loaded, size)
        self.waited += time.perf_counter() - started
        return batch

    def step(self, stop: Stop) -> tuple[float, float, bool]:
        """One update. Returns the batch's mean loss, the gradient's norm, and whether any process was asked to stop."""
        config, runtime, step = self.config, self.runtime, self.state["step"]
        started, self.waited = time.perf_counter(), 0.0
        self.model.train()
        self.optimizer.zero_grad(set_to_none=len(self.order.pieces) == 1)
        try:
            update = accumulate_gradients(
                self.network,
                self.order.pieces,
                self.next_batch,
                self.mixer,
                step,
                runtime,
                self.scaler.scale,
                self.objective,
            )
        except ValueError:  # on a CPU the operator refuses bandwidths that are not finite
            if self.is_finite():
                raise
            raise UserError(self.diverged("the weights are not finite", RUINED)) from None
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad or math.inf)
        # Sums over processes, and every process's own waiting in a place of its own. The loss must be finite before it may touch the weights.
        waits = [self.waited if rank == runtime.rank else 0.0 for rank in range(runtime.world_size)]
        mine = torch.tensor([float(stop.requested), len(update.broken), update.loading, *waits], device=norm.device)
        loss, stopping, broken, loading, *waits = runtime.sum(torch.cat([update.loss[None], mine])).tolist()
        norm = float(norm)
        # float16 overflows now and then, and its update is left out; below a scale of 1 it is the gradient itself that is too large.
        if not math.isfinite(loss) or not (
            math.isfinite(norm) or (self.scaler.is_enabled() and self.scaler.get_scale() >= 1)
        ):
            left = "the weights were not touched" if self.is_finite() else RUINED
            raise UserError(self.diverged(f"the loss is {loss} and the gradient's norm {norm}", left))
        self.schedule.step_update(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state["step"] = step + 1
        if self.average is not None:
            self.average.update(self.model, step=step + 1 if config.model_ema_warmup else None)
        self.report_broken(update.broken, "a neighbour in the batch takes its place")
        self.state["broken"] += int(broken)
        if self.untimed:
            self.untimed -= 1
        else:
            for meter in (self.meter, self.recent):
                meter.add(config.batch_size, time.perf_counter() - started, max(waits), loading)
        return loss, norm, stopping > 0

    def is_finite(self) -> bool:
        """Whether every weight is; once one is not, it stays so."""
        return all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def diverged(self, what: str, consequence: str) -> str:
        paths = sorted((self.folder / "checkpoints").glob("step_*"))
        sigma = [value for _, values in bandwidths(self.model) for value in values]
        about = f", sigma between {min(sigma):.3g} and {max(sigma):.3g}" if sigma else ""
        return (
            f"{what} at update {self.state['step']} (learning rate {self.optimizer.param_groups[0]['lr']:.3g}{about}); {consequence}. "
            f"Last checkpoint: {paths[-1] if paths else 'none was saved yet'}. Start a new --model-tag with a lower --lr"
        )

    def report_broken(self, broken: list[tuple[str, str]], consequence: str) -> None:
        """Each broken file once for every process that meets it: a warning, and a line in the run's list."""
        for name, reason in broken:
            if name not in self.broken:
                self.broken.add(name)
                print(
                    f"warning: {os.fsencode(name).decode(errors='replace')} cannot be read ({reason}); {consequence}",
                    file=sys.stderr,
                )
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(self.folder / BROKEN_LIST, "a", **FILE_NAMES) as file:
                    file.write(f"{name}\t{reason}\n")

    # What it can say about itself

    def speed(self, meter: Meter) -> dict[str, float]:
        return meter.rates(max(1, self.num_workers) * self.runtime.world_size)

    @property
    def metric(self) -> str:
        """What makes an epoch the best."""
        return "ema_top1" if self.average is not None else "top1"

    def memory(self) -> float:
        """Peak GPU memory of this process in MiB; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**20 if self.runtime.device.type == "cuda" else 0.0

    def sigma(self) -> dict[str, list[float]]:
        """Learned bandwidths of the gka layers, per head."""
        return {f"layer_{layer}": [round(value, 4) for value in values] for layer, values in bandwidths(self.model)}
