"""Training a vision transformer, in run order: flags, data, model, optimiser, resume, loop.

    python -m deit_gka.train --data digits --model deit_tiny_gka_patch16_224
    torchrun --standalone --nproc-per-node 7 -m deit_gka.train --data /imagenet

An update is a fixed set of images, dealt to the processes as evenly as possible and accumulated where they do not fit, so any number of
GPUs trains on the same batches; only the draws of stochastic depth depend on it.
"""

import math
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel

from deit_gka.accounting import cost_of
from deit_gka.engine import Mixer, Update, accumulate_gradients, bandwidths, evaluate
from deit_gka.loader import Images, Order, batches, default_workers, eval_transform, evaluation_batches, train_transform
from deit_gka.model_io import build, describe, parse_kwargs
from deit_gka.optim import load_state_tensors, make_average, make_optimizer, make_schedule, state_tensors
from deit_gka.sources import Stream, check_classes, open_source
from deit_gka.train_config import TrainConfig
from gka.runtime import checkpoint
from gka.runtime.cli import UserError, command_line, run
from gka.runtime.distributed import Runtime, Stop
from gka.runtime.progress import RunLog, progress_bar
from gka.runtime.results import append_result
from gka.runtime.training import launch

UPDATES_NOT_TIMED = 3
BROKEN_LIST = "broken_images.txt"


class Trainer:
    """Everything a run holds while it trains. `state` is what a checkpoint needs beside tensors."""

    def __init__(self, config: TrainConfig, runtime: Runtime):
        self.config, self.runtime, self.folder = config, runtime, config.folder
        # Data
        self.train_set, self.val_set = open_source(config.data, "train"), open_source(config.data, "val")
        for warning in check_classes(self.train_set, self.val_set):
            runtime.print(f"warning: {warning}")
        self.num_workers = default_workers() if config.num_workers < 0 else config.num_workers
        self.order = Order(self.train_set, config, runtime, config.device_batch_size)
        self.steps_per_epoch = self.order.steps_per_epoch
        self.steps = config.epochs * self.steps_per_epoch
        # Model
        self.kwargs, classes = parse_kwargs(config.model_kwargs), len(self.train_set.classes)
        drop_path = {} if "drop_path_rate" in self.kwargs else {"drop_path_rate": config.drop_path_of(config.model)}
        self.model = build(config.model, classes, config.input_size, **drop_path, **self.kwargs).to(runtime.device)
        if config.grad_checkpointing:
            self.model.set_grad_checkpointing(True)
        self.average = make_average(self.model, config)
        # Optimiser
        self.optimizer = make_optimizer(self.model, config)
        self.schedule = make_schedule(self.optimizer, config, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=config.amp == "float16")
        self.mixer = Mixer(config, classes)
        # Progress so far; the seconds are of training alone, `waiting` the part of them without a batch, `loading` what workers spent
        self.state = {"step": 0, "images": 0, "seconds": 0.0, "waiting": 0.0, "loading": 0.0, "broken": 0}
        self.untimed = UPDATES_NOT_TIMED
        self.broken: set[str] = set()

    # Checkpoints

    def resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is one."""
        found = checkpoint.load_newest(self.folder / "checkpoints", warn=lambda message: self.runtime.print(f"warning: {message}"))
        if found is None:
            return
        self.config.check_resumes(found.state["train_config"])
        for key, value in self.about_data().items():
            if found.state["data"][key] != value:
                raise UserError(f"{self.config.data} has {value} {key} where the run in {self.folder} had {found.state['data'][key]}; "
                                "give it its own data, or another --model-tag")  # fmt: skip
        if found.state["classes"] != self.train_set.classes:
            raise UserError(f"{self.config.data} has other classes than the run in {self.folder}; give it its own data, or another --model-tag")
        device = self.runtime.device
        self.model.load_state_dict(found.tensors("model", device))
        if self.average is not None:
            self.average.module.load_state_dict(found.tensors("ema", device))
        load_state_tensors(self.optimizer, self.model, found.tensors("optimizer", device))
        self.scaler.load_state_dict(found.state["scaler"])
        self.state = found.state["progress"]

    def about_data(self) -> dict[str, int]:
        """What must be the same for the stream of images to go on exactly."""
        processes = {"processes": self.runtime.world_size} if isinstance(self.train_set, Stream) else {}
        return {"training images": len(self.train_set), "validation images": len(self.val_set), **processes}

    def save(self, folder: str = "checkpoints", with_optimizer: bool = True) -> None:
        """All randomness is a function of the seed and the update's number, so these two are the state of the random generators."""
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
                "progress": self.state,
                "scaler": self.scaler.state_dict(),
                "epoch": self.state["step"] / self.steps_per_epoch,
            }
            checkpoint.save(self.folder / folder, self.state["step"], tensors, state, keep=self.config.keep if with_optimizer else 1)
        self.runtime.barrier()

    # One update

    def start(self) -> None:
        """Compile, join the processes' gradients and start the workers. Weights are shared with `model` and the average stays outside."""
        config, device = self.config, self.runtime.device
        mode = ("max-autotune" if device.type == "cuda" else "off") if config.compile == "auto" else config.compile
        self.network = self.model if mode == "off" else torch.compile(self.model, mode=mode, dynamic=False)
        if self.runtime.world_size > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.network = DistributedDataParallel(self.network, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)
        keys = self.order.batches(self.state["step"], self.steps)
        self.batches = iter(batches(Images(self.train_set, train_transform(config), training=True), keys, self.num_workers, device))

    def next_batch(self):
        started = time.perf_counter()
        batch = next(self.batches)
        self.waited += time.perf_counter() - started
        return batch

    def step(self, stop: Stop) -> tuple[float, float, bool]:
        """One update. Returns the batch's mean loss, the gradient's norm, and whether any process was asked to stop."""
        config, runtime, step = self.config, self.runtime, self.state["step"]
        started, self.waited = time.perf_counter(), 0.0
        self.model.train()
        self.optimizer.zero_grad()
        update = accumulate_gradients(self.network, self.order.pieces, self.next_batch, self.mixer, step, runtime, self.scaler.scale)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad or math.inf)
        # The one wait for the device in an update: the loss must be finite before it may touch the weights.
        flags = torch.tensor([float(stop.requested), float(len(update.broken))], device=update.loss.device)
        loss, stopping, broken = runtime.sum(torch.cat([update.loss[None], flags])).tolist()
        norm = float(norm)
        if not math.isfinite(loss) or not (math.isfinite(norm) or self.scaler.is_enabled()):
            raise UserError(self.diverged(loss, norm))
        self.schedule.step_update(step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state["step"] = step + 1
        if self.average is not None:
            self.average.update(self.model, step=step + 1 if config.model_ema_warmup else None)
        runtime.synchronize()
        self.report_broken(update)
        self.state["broken"] += int(broken)
        if self.untimed:  # compilation and the workers' start
            self.untimed -= 1
        else:
            for key, value in (("images", config.batch_size), ("seconds", time.perf_counter() - started), ("waiting", self.waited),
                               ("loading", update.loading * runtime.world_size)):  # fmt: skip
                self.state[key] += value
        return loss, norm, stopping > 0

    def diverged(self, loss: float, norm: float) -> str:
        paths = sorted((self.folder / "checkpoints").glob("step_*"))
        sigma = [value for _, values in bandwidths(self.model) for value in values]
        about = f", sigma between {min(sigma):.3g} and {max(sigma):.3g}" if sigma else ""
        return (
            f"the loss is {loss} and the gradient's norm {norm} at update {self.state['step']} (learning rate {self.optimizer.param_groups[0]['lr']:.3g}{about}); "
            f"the weights were not touched. Last good checkpoint: {paths[-1] if paths else 'none was saved yet'}. Start a new --model-tag with a lower --lr"
        )

    def report_broken(self, update: Update) -> None:
        """Each broken file once: a warning, and a line in the run's list."""
        for name, reason in update.broken:
            if name not in self.broken:
                self.broken.add(name)
                print(f"warning: {name} cannot be read ({reason}); a neighbour in the batch takes its place", file=sys.stderr)
                with open(self.folder / BROKEN_LIST, "a") as file:
                    file.write(f"{name}\t{reason}\n")

    # The loop

    def train(self, log: RunLog, stop: Stop) -> bool:
        """Train to the last epoch. Returns False if a signal (or --stop-after) ended it early; the state is saved either way."""
        config = self.config
        self.start()
        with progress_bar() as bar:
            task = bar.add_task(config.tag, total=self.steps, completed=self.state["step"], status="")
            self.report_if_due(log, bar)
            while self.state["step"] < self.steps:
                loss, norm, stopping = self.step(stop)
                step = self.state["step"]
                stopping = (stopping or step == config.stop_after) and step < self.steps
                epoch, speed = step / self.steps_per_epoch, self.speed()
                bar.update(
                    task, completed=step, status=f"epoch {epoch:.1f}/{config.epochs}  loss {loss:.4f}  {speed['images_per_second']:,.0f} img/s"
                )
                if step % config.log_every == 0 or step in (1, self.steps):
                    lr = self.optimizer.param_groups[0]["lr"]
                    text = (f"update {step:06d}/{self.steps:06d} | epoch {epoch:.2f} | loss {loss:.4f} | lr {lr:.3e} | grad norm {norm:.2f} | "
                            f"{speed['images_per_second']:,.0f} img/s, {speed['waiting']:.0%} waiting for images")  # fmt: skip
                    log.log("train", step, text, loss=loss, lr=lr, weight_decay=config.weight_decay, grad_norm=norm, epoch=epoch, **speed)
                # Before an evaluation too: it is long, and a signal's patience is short.
                if stopping or step % self.steps_per_epoch == 0 or (config.save_every > 0 and step % config.save_every == 0):
                    self.save()
                if stopping:
                    return False
                self.report_if_due(log, bar)
        return True

    def speed(self) -> dict[str, float]:
        """Over all processes: images per second of training, of the model alone, and of the loading workers; the part of the time spent waiting."""
        images, seconds, waiting, loading = (self.state[key] for key in ("images", "seconds", "waiting", "loading"))
        workers = max(1, self.num_workers) * self.runtime.world_size
        return {
            "images_per_second": images / seconds if seconds else 0.0,
            "model_images_per_second": images / (seconds - waiting) if seconds > waiting else 0.0,
            "loader_images_per_second": workers * images / loading if loading else 0.0,
            "waiting": waiting / seconds if seconds else 0.0,
        }

    def report_if_due(self, log: RunLog, bar) -> None:
        """After an epoch: evaluate, unless that is in the log already (the run was killed after it), and keep the best weights."""
        config, runtime, (epoch, within) = self.config, self.runtime, divmod(self.state["step"], self.steps_per_epoch)
        due = epoch and not within and (epoch == config.epochs or (config.eval_every > 0 and epoch % config.eval_every == 0))
        if not due or not runtime.any(log.enabled and not log.has("eval", self.state["step"])):
            return
        values = self.evaluate(bar)
        metric, speed = "ema_top1" if self.average is not None else "top1", self.speed()
        better = runtime.any(runtime.is_main and values[metric] > max((record[metric] for record in log.records("eval")), default=-1.0))
        if better:
            self.save("best", with_optimizer=False)
        sigma = self.sigma()
        mean = " ".join(f"{sum(values) / len(values):.2f}" for values in sigma.values())
        text = f"epoch {epoch}/{config.epochs} | top-1 {values['top1']:.2f} top-5 {values['top5']:.2f}"
        if self.average is not None:
            text += f" | EMA top-1 {values['ema_top1']:.2f} top-5 {values['ema_top5']:.2f}"
        text += (f" | {speed['images_per_second']:,.0f} img/s (model {speed['model_images_per_second']:,.0f}, loader {speed['loader_images_per_second']:,.0f})"
                 + (f" | {self.memory():,.0f} MiB" if runtime.device.type == "cuda" else "")
                 + (f" | mean sigma {mean}" if mean else "")
                 + (f" | {self.state['broken']} broken images replaced so far" if self.state["broken"] else ""))  # fmt: skip
        log.log(
            "eval", self.state["step"], text, epoch=epoch, **values, **speed, memory_mib=self.memory(), sigma=sigma, broken_train=self.state["broken"]
        )

    def evaluate(self, bar) -> dict[str, float]:
        """Accuracy of the raw weights and, as ema_*, of the average."""
        config, models = self.config, {"": self.model}
        if self.average is not None:
            models["ema_"] = self.average.module
        task = bar.add_task("evaluating", total=len(models) * -(-len(self.val_set) // self.runtime.world_size), status="")
        values = {}
        for prefix, model in models.items():
            loader = evaluation_batches(self.val_set, eval_transform(config.input_size, config.crop_pct), self.runtime, config.device_batch_size,
                                        self.num_workers)  # fmt: skip
            found = evaluate(model, loader, self.runtime, config.amp, lambda images: bar.advance(task, images))
            values |= {f"{prefix}{key}": value for key, value in found.items()}
        bar.remove_task(task)
        return values

    def memory(self) -> float:
        """Peak GPU memory of this process in MiB; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**20 if self.runtime.device.type == "cuda" else 0.0

    def sigma(self) -> dict[str, list[float]]:
        """Learned bandwidths of the gka layers, per head."""
        return {f"layer_{layer}": [round(value, 4) for value in values] for layer, values in bandwidths(self.model)}

    def summary(self, log: RunLog) -> dict:
        """The numbers of a finished run. On rank 0."""
        evaluations, cost = log.records("eval"), cost_of(self.model)
        last, metric = evaluations[-1], "ema_top1" if self.average is not None else "top1"
        best = max(evaluations, key=lambda record: record[metric])
        accuracy = {key: last[key] for key in ("top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "images") if key in last}
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "flops": cost.flops if cost else None,
            **accuracy,
            "best": {"metric": metric, "value": best[metric], "epoch": best["epoch"]},
            **self.speed(),
            "memory_mib": self.memory(),
            "broken_train": self.state["broken"],
            "sigma": self.sigma(),
        }


def run_to_the_end(trainer: Trainer, log: RunLog) -> None:
    """Announce the run, train what is left of it, and record its numbers once."""
    config, runtime, step = trainer.config, trainer.runtime, trainer.state["step"]
    if runtime.any(log.enabled and log.has("finish", trainer.steps)):
        runtime.print(f"{trainer.folder}: already trained for its {config.epochs} epochs")
        return
    cost, parameters = cost_of(trainer.model), sum(parameter.numel() for parameter in trainer.model.parameters())
    about = f", {cost.flops / 1e9:.4g} GFLOPs an image" if cost else ""
    pieces = trainer.order.pieces
    runtime.print(f"{config.model}: {parameters:,} parameters{about}")
    runtime.print(
        f"{config.data}: {len(trainer.train_set):,} training and {len(trainer.val_set):,} validation images in {len(trainer.train_set.classes)} classes"
    )
    runtime.print(
        f"{config.epochs} epochs of {trainer.steps_per_epoch:,} updates of {config.batch_size:,} images: {runtime.world_size} x {runtime.device.type}, "
        f"{len(pieces)} x {len(pieces[0].places)} images each; peak learning rate {config.scaled_lr:.4g}; {trainer.num_workers} loading workers each"
    )
    if config.repeated_aug > 1:
        runtime.print(f"repeated augmentation: an epoch draws {config.repeated_aug} versions each of a 1/{config.repeated_aug} of the images")
    if step:
        runtime.print(f"resuming at update {step} of {trainer.steps}")
    log.log("start", step, config=config.identity(), world_size=runtime.world_size)
    if not trainer.train(log, Stop()):
        runtime.print(f"stopped at update {trainer.state['step']} of {trainer.steps}, saved; continue with: {command_line()}")
    elif runtime.is_main:
        summary = trainer.summary(log)
        append_result(
            config.results,
            "train_deit",
            {**config.identity(), "model_tag": config.tag, "data": config.data},
            summary,
            runtime.device,
            runtime.world_size,
        )
        log.log("finish", trainer.steps, **summary)
        ema = f", EMA {summary['ema_top1']:.2f}" if "ema_top1" in summary else ""
        print(f"{trainer.folder}: finished, top-1 {summary['top1']:.2f}{ema}, {summary['images_per_second']:,.0f} img/s")


def main(config: TrainConfig) -> None:
    launch(config, Trainer, run_to_the_end)


if __name__ == "__main__":
    run(main, TrainConfig)
