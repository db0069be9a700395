"""Training a vision transformer: the loop, what it reports, and the entry point. `trainer.py` has the updates.

python -m deit_gka.train --data digits --input-size 32 --batch-size 64 --epochs 2 --warmup-epochs 1
torchrun --standalone --nproc-per-node 7 -m deit_gka.train --data /imagenet
"""

from contextlib import closing

from deit_gka.data.images import Batch
from deit_gka.data.transforms import eval_transform
from deit_gka.data.workers import evaluation_batches
from deit_gka.model.accounting import cost_of
from deit_gka.model.attention import operators_of
from deit_gka.training.config import TrainConfig
from deit_gka.training.engine import evaluate
from deit_gka.training.meter import Meter
from deit_gka.training.trainer import BROKEN_LIST, Trainer
from trainkit.cli import command_line, run
from trainkit.distributed import Stop
from trainkit.progress import RunLog, progress_bar
from trainkit.results import append_result
from trainkit.training import launch

# What is read back from the log, beside the metric that makes the best; a line without does not count.
EVAL_KEYS, FINISH_KEYS = ("epoch", "images", "broken"), ("parameters", "flops", "top1", "images_per_second", "sigma")
BROKEN_SHARE = 0.01  # of the validation images


def train(trainer: Trainer, log: RunLog, stop: Stop) -> bool:
    """Train to the last epoch. Returns False if a signal (or --stop-after) ended it early; the state is saved either way."""
    config = trainer.config
    trainer.start()
    try:
        with progress_bar() as bar:
            task = bar.add_task(config.tag, total=trainer.steps, completed=trainer.state["step"], status="")
            report_if_due(trainer, log, bar)
            while trainer.state["step"] < trainer.steps:
                loss, norm, stopping = trainer.step(stop)
                step = trainer.state["step"]
                stopping = (stopping or step == config.stop_after) and step < trainer.steps
                epoch, speed = step / trainer.steps_per_epoch, trainer.speed(trainer.recent)
                timed = f"  {speed['images_per_second']:,.0f} img/s" if trainer.recent.images else ""
                bar.update(task, completed=step, status=f"epoch {epoch:.1f}/{config.epochs}  loss {loss:.4f}{timed}")
                if step % config.log_every == 0 or step in (1, trainer.steps):
                    lr = trainer.optimizer.param_groups[0]["lr"]
                    text = f"update {step:06d}/{trainer.steps:06d} | epoch {epoch:.2f} | loss {loss:.4f} | lr {lr:.3e} | grad norm {norm:.2f}"
                    if trainer.recent.images:
                        text += f" | {speed['images_per_second']:,.0f} img/s, {speed['waiting']:.0%} waiting for images{memory_text(trainer)}"
                    log.log(
                        "train",
                        step,
                        text,
                        loss=loss,
                        lr=lr,
                        weight_decay=config.weight_decay,
                        grad_norm=norm,
                        epoch=epoch,
                        **speed,
                    )
                    trainer.recent = Meter()
                # Before an evaluation too: it is long, and a signal's patience is short.
                if (
                    stopping
                    or step % trainer.steps_per_epoch == 0
                    or (config.save_every > 0 and step % config.save_every == 0)
                ):
                    trainer.save()
                if stopping:
                    return False
                report_if_due(trainer, log, bar)
        return True
    finally:
        trainer.loaded.end()


def report_if_due(trainer: Trainer, log: RunLog, bar) -> None:
    """After an epoch: evaluate, unless that is in the log already (the run was killed after it), and keep the best weights."""
    config, runtime, (epoch, within) = (
        trainer.config,
        trainer.runtime,
        divmod(trainer.state["step"], trainer.steps_per_epoch),
    )
    due = (
        epoch and not within and (epoch == config.epochs or (config.eval_every > 0 and epoch % config.eval_every == 0))
    )
    if not due or not runtime.any(
        log.enabled and not log.has("eval", trainer.state["step"], *EVAL_KEYS, trainer.metric)
    ):
        return
    values, speed = evaluate_now(trainer, bar), trainer.speed(trainer.meter)
    evaluated = log.records("eval", *EVAL_KEYS, trainer.metric) if runtime.is_main else []
    earlier = trusted(evaluated, values)
    best = max((record[trainer.metric] for record in earlier), default=-1.0)
    believed = not runtime.is_main or bool(trusted([values], *evaluated))
    if runtime.any(runtime.is_main and believed and values[trainer.metric] > best):
        trainer.save("best", with_optimizer=False)
    sigma = trainer.sigma()
    text = f"epoch {epoch}/{config.epochs} | {epoch_text(values, speed, sigma)}{memory_text(trainer)}"
    text += (
        f"\nbroken training images replaced {trainer.state['broken']} times so far" if trainer.state["broken"] else ""
    )
    log.log("eval", trainer.state["step"], text, epoch=epoch, **values, **speed, memory_mib=trainer.memory(), sigma=sigma,
            broken_train=trainer.state["broken"])  # fmt: skip
    if not believed:
        runtime.print(f"warning: {values['broken']} validation images could not be read, many more than before: this epoch cannot be the best. "
                      f"They are in {trainer.folder / BROKEN_LIST}")  # fmt: skip


def trusted(records: list[dict], *others: dict) -> list[dict]:
    """The evaluations among `records` that may be the best. Files broken for good are left out of every evaluation; one that left out many more
    than the best-read of all (`others` too) met another trouble."""
    fewest = min((record["broken"] for record in [*records, *others]), default=0)
    return [
        record
        for record in records
        if record["broken"] - fewest <= BROKEN_SHARE * (record["images"] + record["broken"])
    ]


def evaluate_now(trainer: Trainer, bar) -> dict[str, float]:
    """Accuracy of the raw weights and, as ema_*, of the average."""
    config, models = trainer.config, {"": trainer.model}
    trainer.runtime.broadcast(
        trainer.model.buffers()
    )  # a ViT has none; where there are some, those of rank 0 are saved
    if trainer.average is not None:
        models["ema_"] = trainer.average.module
        trainer.runtime.broadcast(trainer.average.module.buffers())
    task = bar.add_task("evaluating", total=-(-len(trainer.val_set) // trainer.runtime.world_size), status="")

    def advance(batch: Batch) -> None:
        bar.advance(task, len(batch.labels))
        trainer.report_broken(batch.broken, "left out of the evaluation")

    transform = eval_transform(config.input_size, config.crop_pct)
    with closing(
        evaluation_batches(trainer.val_set, transform, trainer.runtime, config.device_batch_size, trainer.num_workers)
    ) as loader:
        found = evaluate(models, loader, trainer.runtime, config.amp, advance)
    bar.remove_task(task)
    return {**{f"{prefix}{key}": value for prefix, values in found.items() for key, value in values.items() if key not in ("images", "broken")},
            "images": found[""]["images"], "broken": found[""]["broken"]}  # fmt: skip


def memory_text(trainer: Trainer) -> str:
    return f" | {trainer.memory():,.0f} MiB" if trainer.runtime.device.type == "cuda" else ""


def summary(trainer: Trainer, log: RunLog) -> dict:
    """The numbers of a finished run. On rank 0."""
    evaluations, cost = log.records("eval", *EVAL_KEYS, trainer.metric), cost_of(trainer.model)
    last, best = evaluations[-1], max(trusted(evaluations), key=lambda record: record[trainer.metric])
    accuracy = {
        key: last[key]
        for key in ("top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "images", "broken")
        if key in last
    }
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "flops": cost.flops if cost else None,
        **accuracy,
        "best": {"metric": trainer.metric, "value": best[trainer.metric], "epoch": best["epoch"]},
        **trainer.speed(trainer.meter),
        "memory_mib": trainer.memory(),
        "broken_train": trainer.state["broken"],
        "sigma": trainer.sigma(),
    }


def accuracy_text(values: dict[str, float]) -> str:
    """Accuracy and loss on the validation images, of the raw weights and, in the same order, of the average; and how many images could not be judged."""
    text = f"top-1 {values['top1']:.2f} top-5 {values['top5']:.2f} loss {values['loss']:.3f}"
    if "ema_top1" in values:
        text += f" | EMA {values['ema_top1']:.2f} {values['ema_top5']:.2f} {values['ema_loss']:.3f}"
    return text + (f" | on {values['images']:,} images, {values['broken']} more are broken" if values["broken"] else "")


def epoch_text(values: dict[str, float], speed: dict[str, float], sigma: dict[str, list[float]]) -> str:
    """What an epoch's line says in 130 columns: accuracy and loss, how far the bandwidths spread, the speed. The rest is in log.jsonl."""
    heads = [value for layer in sigma.values() for value in layer]
    text = accuracy_text(values) + (f" | sigma {min(heads):.2f}-{max(heads):.2f}" if heads else "")
    return text + (f" | {speed['images_per_second']:,.0f} img/s" if speed["images_per_second"] else "")


def run_to_the_end(trainer: Trainer, log: RunLog) -> None:
    """Announce the run, train what is left of it, and record its numbers once."""
    config, runtime, step = trainer.config, trainer.runtime, trainer.state["step"]
    if runtime.any(log.enabled and log.has("finish", trainer.steps, *FINISH_KEYS)):
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
    if operators := operators_of(trainer.model):
        runtime.print(f"Gaussian kernel attention by {', '.join(operators)}")
    if config.repeated_aug > 1:
        runtime.print(
            f"repeated augmentation: an epoch draws {config.repeated_aug} versions each of a 1/{config.repeated_aug} of the images"
        )
    if step:
        runtime.print(f"resuming at update {step} of {trainer.steps}")
    log.log(
        "start",
        step,
        config=config.identity(),
        world_size=runtime.world_size,
        operators=operators,
        initial_weights=trainer.initial_weights,
    )
    if not train(trainer, log, Stop()):
        runtime.print(
            f"stopped at update {trainer.state['step']} of {trainer.steps}, saved; continue with: {command_line()}"
        )
    elif runtime.is_main:
        numbers = summary(trainer, log)
        settings = {**config.identity(), "model_tag": config.tag, "data": config.data}
        append_result(config.results, "train_deit", settings, numbers, runtime.device, runtime.world_size)
        log.log("finish", trainer.steps, **numbers)
        speed = f" | {numbers['images_per_second']:,.0f} img/s" if numbers["images_per_second"] else ""
        print(f"{trainer.folder}: finished | {accuracy_text(numbers)}{speed}")


def main(config: TrainConfig) -> None:
    launch(config, Trainer, run_to_the_end)


if __name__ == "__main__":
    run(main, TrainConfig)
