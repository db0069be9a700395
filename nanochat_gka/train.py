"""Pretraining, in run order: flags, device, data, model, horizon, optimiser, resume, loop.

    python -m nanochat_gka.train --data out/packed --depth 4 --attention gka
    torchrun --standalone --nproc-per-node 7 -m nanochat_gka.train --depth 20 --attention gka --target-param-data-ratio 8.25

A step is a fixed set of rows of the global stream, dealt to the ranks as evenly as possible; the loss is divided by the global token
count and gradients are summed, so any number of ranks computes the same step up to rounding.
"""

import math
import signal
import time
from dataclasses import asdict

import torch

from gka.runtime import checkpoint
from gka.runtime.cli import UserError, run
from gka.runtime.distributed import Runtime, setup, shutdown
from gka.runtime.files import locked
from gka.runtime.progress import RunLog, progress_bar
from gka.runtime.results import append_result
from nanochat_gka.accounting import flops_per_token, parameter_counts
from nanochat_gka.engine import generate
from nanochat_gka.eval_bpb import bits_per_byte
from nanochat_gka.gpt import GPT, build
from nanochat_gka.hardware import peak_flops
from nanochat_gka.loader import PackedData, Stream, micro_batches, to_device
from nanochat_gka.optim import MuonAdamW, parameter_groups
from nanochat_gka.schedule import Horizon, lr_multiplier, muon_momentum, plan, weight_decay_multiplier
from nanochat_gka.tokenizer import FILE_NAME
from nanochat_gka.train_config import TrainConfig

SAMPLE_PROMPT = "The "
LOSS_MEMORY = 0.9
WARMUP_STEPS_NOT_TIMED = 3


class Stop:
    """Set by SIGTERM or SIGINT; the loop finishes its step, saves and leaves. A Ctrl-C some seconds later ends the process at once.

    Not sooner: torchrun passes a signal on to processes that had it from the terminal already.
    """

    PATIENCE = 3.0  # seconds

    def __init__(self):
        self.since: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    @property
    def requested(self) -> bool:
        return self.since is not None

    def _request(self, number, frame):
        now = time.monotonic()
        if self.since is None:
            self.since = now
        elif number == signal.SIGINT and now - self.since > self.PATIENCE:
            raise KeyboardInterrupt


def accumulate_gradients(model, stream: Stream, step: int, rows: int, batch_size: int, runtime: Runtime) -> torch.Tensor:
    """Run this rank's rows of `step` forward and backward. Returns its part of the step's mean loss, still on the device."""
    tokens = rows * stream.rows.sequence_len
    mine = runtime.share(rows)
    total = torch.zeros((), device=runtime.device)
    for numbers in micro_batches(range(step * rows + mine.start, step * rows + mine.stop), batch_size):
        ids, targets = to_device(stream.batch(numbers), runtime.device)
        loss = model(ids, targets, reduction="sum") / tokens
        loss.backward()
        total += loss.detach()
    return total


class Trainer:
    """Everything a run holds while it trains. `state` is what a checkpoint needs beside tensors."""

    def __init__(self, config: TrainConfig, runtime: Runtime):
        self.config, self.runtime, self.folder = config, runtime, config.out / config.tag
        self.stop = Stop()
        # Data
        self.data = PackedData(config.data, verify=config.verify_data and runtime.is_main)
        sequence_len = self.data.sequence_len
        if config.max_seq_len not in (-1, sequence_len):
            raise UserError(
                f"--max-seq-len {config.max_seq_len} but {config.data} holds rows of {sequence_len} tokens; pack again with --sequence-len"
            )
        self.stream = Stream(self.data.split("train"), config.seed)
        # Model
        vocab_size = self.data.tokenizer.vocab_size
        self.model: GPT = build(config.shape(config.depth, sequence_len, vocab_size), runtime.device)
        compiled = config.compile == "on" or (config.compile == "auto" and runtime.device.type == "cuda")
        self.compiled = torch.compile(self.model, dynamic=False) if compiled else self.model
        # Horizon
        self.horizon = self._plan(sequence_len, vocab_size)
        self.rows = self.horizon.total_batch_size // sequence_len
        # Optimiser
        groups = parameter_groups(self.model, config.optim(), self.horizon.lr_scale, self.horizon.weight_decay_scale)
        self.optimizer = MuonAdamW(groups, runtime, compile=compiled)
        # Progress so far
        self.token_bytes = self.data.tokenizer.token_bytes()
        self.state = {"step": 0, "loss_average": 0.0, "seconds": 0.0, "timed_tokens": 0, "train_bpb": None, "val_bpb": None, "min_val_bpb": None}

    def _plan(self, sequence_len: int, vocab_size: int) -> Horizon:
        config = self.config
        try:
            horizon = plan(self.model, lambda depth: config.shape(depth, sequence_len, vocab_size), ratio=config.target_param_data_ratio,
                           total_batch_size=config.total_batch_size, num_iterations=config.num_iterations, target_flops=config.target_flops)  # fmt: skip
        except ValueError as error:
            raise UserError(str(error)) from None
        if horizon.total_batch_size % sequence_len:
            raise UserError(f"--total-batch-size must be a multiple of the context length {sequence_len}, got {horizon.total_batch_size}")
        if horizon.total_batch_size // sequence_len < self.runtime.world_size:
            raise UserError(
                f"a step has {horizon.total_batch_size // sequence_len} rows for {self.runtime.world_size} processes; raise --total-batch-size"
            )
        return horizon

    # Checkpoints

    def resume(self) -> bool:
        """Continue from the newest intact checkpoint, if there is one."""
        found = checkpoint.load_newest(self.folder / "checkpoints", warn=lambda message: self.runtime.print(f"warning: {message}"))
        if found is None:
            return False
        self.config.check_resumes(found.state["train_config"])
        for key, words in (("tokenizer_sha256", "another tokenizer"), ("source", "another corpus")):
            if found.state["data"][key] != self.data.manifest[key]:
                raise UserError(f"{self.config.data} was packed with {words} than the run in {self.folder}; use its data, or another --model-tag")
        device = self.runtime.device
        self.model.load_state_dict(found.tensors("model", device))
        self.optimizer.load_state_dict(found.tensors("optimizer", device))
        self.state = found.state["progress"]
        return True

    def save(self) -> None:
        optimizer_state = self.optimizer.state_dict()  # a collective: on every rank
        if self.runtime.is_main:
            state = {
                "model_config": asdict(self.model.config),
                "train_config": self.config.identity(),
                "data": {key: self.data.manifest[key] for key in ("tokenizer_sha256", "source", "sequence_len")},
                "progress": self.state,
                "tokens": self.state["step"] * self.horizon.total_batch_size,
                "steps": self.horizon.steps,
            }
            tensors = {"model": self.model.state_dict(), "optimizer": optimizer_state}
            files = {FILE_NAME: self.data.folder / FILE_NAME}
            checkpoint.save(self.folder / "checkpoints", self.state["step"], tensors, state, files, self.config.keep)
        self.runtime.barrier()

    def newest_checkpoint(self) -> str:
        paths = sorted((self.folder / "checkpoints").glob("step_*"))
        return str(paths[-1]) if paths else "none was saved yet"

    # One step, one evaluation

    def step(self) -> tuple[float, bool]:
        """Train one step. Returns the mean loss over all ranks and whether any rank was asked to stop."""
        step, steps = self.state["step"], self.horizon.steps
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = accumulate_gradients(self.compiled, self.stream, step, self.rows, self.config.device_batch_size, self.runtime)
        # The one wait for the device in a step: the loss must be finite before it may touch the weights.
        stop_flag = torch.tensor(float(self.stop.requested), device=loss.device)
        mean_loss, stop = self.runtime.sum(torch.stack([loss, stop_flag])).tolist()
        if not math.isfinite(mean_loss):
            raise UserError(f"the loss is {mean_loss} at step {step}; the weights were not touched. Last good checkpoint: {self.newest_checkpoint()}. "
                            "Start a new --model-tag with lower learning rates")  # fmt: skip
        config = self.config
        multiplier = lr_multiplier(step, steps, config.warmup_ratio, config.warmdown_ratio, config.final_lr_frac)
        self.optimizer.step(multiplier, muon_momentum(step), weight_decay_multiplier(step, steps))
        self.runtime.synchronize()
        seconds = time.perf_counter() - started
        self.state["step"] = step + 1
        self.state["loss_average"] = LOSS_MEMORY * self.state["loss_average"] + (1 - LOSS_MEMORY) * mean_loss
        if step >= WARMUP_STEPS_NOT_TIMED:
            self.state["seconds"] += seconds
            self.state["timed_tokens"] += self.horizon.total_batch_size
        return mean_loss, stop > 0

    def evaluate(self) -> dict[str, float]:
        """Bits per byte on both splits."""
        self.model.eval()
        bpb = {
            f"{split}_bpb": bits_per_byte(
                self.model, self.data.split(split), self.token_bytes, self.runtime, self.config.device_batch_size, self.config.eval_tokens
            )
            for split in ("train", "val")
        }
        self.model.train()
        best = self.state["min_val_bpb"]
        self.state |= {**bpb, "min_val_bpb": bpb["val_bpb"] if best is None else min(best, bpb["val_bpb"])}
        return bpb

    def throughput(self) -> tuple[float, float | None]:
        """Tokens per second over all ranks since the start, and the model FLOPs utilisation if the device's peak is known."""
        speed = self.state["timed_tokens"] / self.state["seconds"] if self.state["seconds"] else 0.0
        peak = peak_flops(self.runtime.device)
        return speed, speed * flops_per_token(self.model) / (peak * self.runtime.world_size) if peak else None

    def bandwidth_statistics(self) -> dict[str, list[float]]:
        return {f"layer_{layer}": [round(v, 4) for v in sigma.tolist()] for layer, sigma in self.model.bandwidths().items()}

    # The loop

    def train(self, log: RunLog) -> bool:
        """Train to the horizon. Returns False if a signal (or --stop-after) ended it early; the state is saved either way."""
        config, steps = self.config, self.horizon.steps
        with progress_bar() as bar:
            task = bar.add_task(config.tag, total=steps, completed=self.state["step"], status="")
            if self.state["step"] == 0:
                self.report(log, self.evaluate())
            while self.state["step"] < steps:
                loss, stop = self.step()
                step, last = self.state["step"], self.state["step"] == steps
                stop = stop or step == config.stop_after
                speed, mfu = self.throughput()
                smooth = self.state["loss_average"] / (1 - LOSS_MEMORY**step)
                bar.update(task, completed=step, status=f"loss {smooth:.4f}  {speed:,.0f} tok/s")
                if step % config.log_every == 0 or step == 1 or last:
                    multiplier = lr_multiplier(step - 1, steps, config.warmup_ratio, config.warmdown_ratio, config.final_lr_frac)
                    text = f"step {step:05d}/{steps:05d} | loss {smooth:.4f} | lr x{multiplier:.2f} | {speed:,.0f} tok/s" + (
                        f" | mfu {mfu:.1%}" if mfu else ""
                    )
                    log.log("train", step, text, loss=loss, smooth_loss=smooth, lr_multiplier=multiplier, tokens_per_second=speed, mfu=mfu)
                if last or (config.eval_every > 0 and step % config.eval_every == 0):
                    self.report(log, self.evaluate())
                if self.runtime.is_main and config.sample_every > 0 and (step % config.sample_every == 0 or last):
                    text = generate(self.model, self.data.tokenizer, SAMPLE_PROMPT, max_tokens=32, temperature=0)[0]
                    log.log("sample", step, f"sample: {SAMPLE_PROMPT}{text!r}", prompt=SAMPLE_PROMPT, text=text)
                if last or stop or (config.save_every > 0 and step % config.save_every == 0):
                    self.save()
                if stop and not last:
                    return False
        return True

    def report(self, log: RunLog, bpb: dict[str, float]) -> None:
        step, sigma = self.state["step"], self.bandwidth_statistics()
        mean = {layer: round(sum(values) / len(values), 3) for layer, values in sigma.items()}
        text = f"step {step:05d} | train bpb {bpb['train_bpb']:.6f} | validation bpb {bpb['val_bpb']:.6f}"
        log.log("eval", step, text + (f" | mean sigma {mean}" if mean else ""), **bpb, sigma=sigma, tokens=step * self.horizon.total_batch_size)

    def summary(self) -> dict:
        """The numbers of a finished run: the paper's columns."""
        per_token, speed = flops_per_token(self.model), self.throughput()
        return {
            "parameters": parameter_counts(self.model)["total"],
            "flops_per_token": per_token,
            "train_tokens": self.horizon.tokens,
            "train_flops": self.horizon.tokens * per_token,
            "train_bpb": self.state["train_bpb"],
            "val_bpb": self.state["val_bpb"],
            "gap": self.state["val_bpb"] - self.state["train_bpb"],
            "min_val_bpb": self.state["min_val_bpb"],
            "tokens_per_second": speed[0],
            "mfu": speed[1],
            "sigma": self.bandwidth_statistics(),
        }


def main(config: TrainConfig) -> None:
    config.check()
    runtime = setup(config.device_type, config.seed)
    try:
        if runtime.is_main:
            with locked(config.out / config.tag, "training in"):
                _train(config, runtime)
        else:
            _train(config, runtime)
    finally:
        shutdown()


def _train(config: TrainConfig, runtime: Runtime) -> None:
    trainer = Trainer(config, runtime)
    resumed = trainer.resume()
    step, horizon, model = trainer.state["step"], trainer.horizon, trainer.model
    if step >= horizon.steps:
        runtime.print(f"{trainer.folder}: already trained to its {horizon.steps} steps, validation bpb {trainer.state['val_bpb']:.6f}")
        return
    counts = parameter_counts(model)
    runtime.print(
        f"{config.tag}: {counts['total']:,} parameters, {flops_per_token(model):,} FLOPs per token, {trainer.data.tokenizer.vocab_size} tokens in the vocabulary"
    )
    runtime.print(
        f"horizon: {horizon.steps:,} steps of {horizon.total_batch_size:,} tokens = {horizon.tokens:,} tokens, {horizon.tokens * flops_per_token(model):.4e} FLOPs, "
        f"{horizon.steps * trainer.rows / len(trainer.stream.rows):.2f} epochs, on {runtime.world_size} x {runtime.device.type}"
    )
    if resumed:
        runtime.print(f"resuming at step {step} of {horizon.steps}")
    log = RunLog(
        trainer.folder / "log.jsonl", resume_step=step, wandb_mode=config.wandb, name=config.tag, config=asdict(config), enabled=runtime.is_main
    )
    log.log("start", step, config=config.identity(), world_size=runtime.world_size)
    finished = trainer.train(log)
    if not finished:
        runtime.print(f"stopped at step {trainer.state['step']} of {horizon.steps}, saved; run the same command again to continue")
    elif runtime.is_main:
        summary = trainer.summary()
        log.log("finish", horizon.steps, **summary)
        append_result(config.results, "pretrain", {**config.identity(), "model_tag": config.tag}, summary, runtime.device, runtime.world_size)
        runtime.print(
            f"{trainer.folder}: finished, validation bpb {summary['val_bpb']:.6f}, train bpb {summary['train_bpb']:.6f}, {summary['tokens_per_second']:,.0f} tok/s"
        )
    log.close()


if __name__ == "__main__":
    run(main, TrainConfig)
