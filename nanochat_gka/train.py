"""Pretraining, in run order: flags, device, data, model, horizon, optimiser, resume, loop.

    python -m nanochat_gka.train --data out/packed --depth 4 --attention gka
    torchrun --standalone --nproc-per-node 7 -m nanochat_gka.train --depth 20 --attention gka --target-param-data-ratio 8.25

A step is a fixed set of rows of the global stream, dealt to the ranks as evenly as possible; the loss is divided by the global token
count and gradients are summed, so any number of ranks computes the same step up to rounding.
"""

import math
import time
from dataclasses import asdict

import torch
from rich.progress import Progress

from nanochat_gka.accounting import Horizon, flops_per_token, parameter_counts, plan
from nanochat_gka.core_metric.measure import BATCH_TOKENS, Examinee
from nanochat_gka.core_metric.training import CoreMetric
from nanochat_gka.data.loader import PackedData, Stream, micro_batches, to_device
from nanochat_gka.data.tokenizer import FILE_NAME
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.model.gpt import GPT, build
from nanochat_gka.training import memory
from nanochat_gka.training.bits_per_byte import bits_per_byte
from nanochat_gka.training.config import TrainConfig
from nanochat_gka.training.hardware import peak_flops
from nanochat_gka.training.optim import MuonAdamW, check_decay, parameter_groups
from nanochat_gka.training.schedule import lr_multiplier, muon_momentum, weight_decay_multiplier
from trainkit import checkpoint
from trainkit.cli import UserError, command_line, run
from trainkit.distributed import Runtime, Stop
from trainkit.progress import Pace, RunLog, clock_text, progress_bar
from trainkit.results import append_result, git_commit, peak_memory
from trainkit.training import launch

LOSS_MEMORY = 0.9
WARMUP_STEPS_NOT_TIMED = 3
# What is read back from the log; a line without does not count.
EVAL_KEYS, CORE_KEYS = ("train_bpb", "val_bpb"), ("name", "metric", "standard_error")
FINISH_KEYS = (
    "parameters",
    "flops_per_token",
    "train_tokens",
    "train_flops",
    *EVAL_KEYS,
    "gap",
    "tokens_per_second",
    "sigma",
)


def accumulate_gradients(
    model, stream: Stream, step: int, rows: int, batch_size: int, runtime: Runtime
) -> torch.Tensor:
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
        self.config, self.runtime, self.folder = config, runtime, config.folder
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
        shape = config.shape(config.depth, sequence_len, vocab_size)
        memory.check_fits(shape, runtime.device, runtime.world_size)
        self.model: GPT = build(shape, runtime.device)
        compiled = config.compile == "on" or (config.compile == "auto" and runtime.device.type == "cuda")
        self.compiled = torch.compile(self.model, dynamic=False) if compiled else self.model
        # Horizon
        self.horizon = self._plan(sequence_len, vocab_size)
        self.rows = self.horizon.total_batch_size // sequence_len
        self.batch_size = config.device_batch_size
        if self.batch_size == "auto":
            fitting = memory.rows_at_once(
                shape, runtime.device.type, memory.device_bytes(runtime.device), runtime.world_size
            )
            self.batch_size = min(fitting, -(-self.rows // runtime.world_size))
        # Optimiser
        groups = parameter_groups(self.model, config, self.horizon.lr_scale, self.horizon.weight_decay_scale)
        check_decay(groups)
        self.optimizer = MuonAdamW(groups, runtime, compile=compiled)
        # Progress so far
        self.token_bytes = self.data.tokenizer.token_bytes()
        self.state = {"step": 0, "loss_average": 0.0, "seconds": 0.0, "timed_tokens": 0}
        self.untimed, self.commit = WARMUP_STEPS_NOT_TIMED, git_commit()
        self.pace, self.core = Pace(WARMUP_STEPS_NOT_TIMED), None

    def _plan(self, sequence_len: int, vocab_size: int) -> Horizon:
        config = self.config
        horizon = plan(self.model, lambda depth: config.shape(depth, sequence_len, vocab_size), ratio=config.target_param_data_ratio,
                       total_batch_size=config.total_batch_size, num_iterations=config.num_iterations, target_flops=config.target_flops)  # fmt: skip
        if horizon.total_batch_size % sequence_len:
            raise UserError(
                f"--total-batch-size must be a multiple of the context length {sequence_len}, got {horizon.total_batch_size}"
            )
        if horizon.total_batch_size // sequence_len < self.runtime.world_size:
            raise UserError(
                f"a step has {horizon.total_batch_size // sequence_len} rows for {self.runtime.world_size} processes; raise --total-batch-size"
            )
        return horizon

    # Checkpoints

    def resume(self) -> None:
        """Continue from the newest intact checkpoint, if there is one."""
        found = checkpoint.load_newest(
            self.folder / "checkpoints", warn=lambda message: self.runtime.print(f"warning: {message}")
        )
        if found is None:
            return
        self.config.check_resumes(found.state["train_config"])
        for key, words in (
            ("tokenizer_sha256", "another tokenizer"),
            ("sequence_len", "another context length"),
            ("source", "another corpus"),
        ):
            if found.state["data"][key] != self.data.manifest[key]:
                raise UserError(
                    f"{self.config.data} was packed with {words} than the run in {self.folder}; use its data, or another --model-tag"
                )
        device = self.runtime.device
        self.model.load_state_dict(found.tensors("model", device))
        self.optimizer.load_state_dict(found.tensors("optimizer", device))
        self.state = found.state["progress"]

    def save(self) -> None:
        optimizer_state = self.optimizer.state_dict()  # a collective: on every rank
        if self.runtime.is_main:
            state = {
                "commit": self.commit,
                "model_config": asdict(self.model.config),
                "train_config": self.config.identity(),
                "data": self.data.identity(self.folder),
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

    def fit_memory(self) -> None:
        """On CUDA, where the number of rows at once was left to us: try it, and halve it while it does not fit (a collective)."""
        if self.config.device_batch_size == "auto" and self.runtime.device.type == "cuda":
            self.batch_size = memory.largest_that_runs(self.batch_size, self.dry_step, self.runtime)

    def dry_step(self, rows: int) -> None:
        """Forward and backward of a step's largest micro-batch, of `rows` at most, on no text.

        Twice if a step has several: from the second on the gradients are in memory before its activations are. Weights,
        state and random numbers stay as they are.
        """
        pieces = list(map(len, micro_batches(range(-(-self.rows // self.runtime.world_size)), rows)))
        ids = torch.zeros(max(pieces), self.stream.rows.sequence_len, dtype=torch.int64, device=self.runtime.device)
        targets = torch.zeros_like(ids)  # one tensor for both would be compiled apart from training's two
        try:
            for _ in pieces[:2]:
                self.compiled(ids, targets, reduction="sum").backward()
        finally:
            self.optimizer.zero_grad()

    def step(self, stop: Stop) -> tuple[float, bool]:
        """Train one step. Returns the mean loss over all ranks and whether any rank was asked to stop."""
        step, steps, config = self.state["step"], self.horizon.steps, self.config
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = accumulate_gradients(self.compiled, self.stream, step, self.rows, self.batch_size, self.runtime)
        # The one wait for the device in a step: loss and gradients must be finite before they may touch the weights.
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf).float()
        stop_flag = torch.tensor(float(stop.requested), device=loss.device)
        mean_loss, stopping, largest = self.runtime.sum(torch.stack([loss, stop_flag, largest])).tolist()
        if not (math.isfinite(mean_loss) and math.isfinite(largest)):
            what = f"the loss is {mean_loss}" if not math.isfinite(mean_loss) else "the gradient is not finite"
            finite = all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())
            left = "the weights were not touched" if finite else "an earlier step has ruined the weights"
            raise UserError(f"{what} at step {step}; {left}. Last checkpoint: {self.newest_checkpoint()}. "
                            "Start a new --model-tag with lower learning rates")  # fmt: skip
        multiplier = lr_multiplier(step, steps, config.warmup_ratio, config.warmdown_ratio, config.final_lr_frac)
        self.optimizer.step(multiplier, muon_momentum(step), weight_decay_multiplier(step, steps))
        self.runtime.synchronize()
        self.state["step"] = step + 1
        self.state["loss_average"] = LOSS_MEMORY * self.state["loss_average"] + (1 - LOSS_MEMORY) * mean_loss
        if self.untimed:  # compilation and caches
            self.untimed -= 1
        else:
            self.state["seconds"] += time.perf_counter() - started
            self.state["timed_tokens"] += self.horizon.total_batch_size
        self.pace.step()
        return mean_loss, stopping > 0

    def prepare_core(self) -> CoreMetric:
        """Fetch and read the bundle. A collective. Raises UserError, now and not in 2,000 steps, for one with anything wrong in it."""
        config, runtime = self.config, self.runtime
        bundle = config.open_on_all(config.out.parent / "core", runtime)
        examinee = Examinee(
            self.model, self.data.tokenizer, runtime, self.model.rotary.length, BATCH_TOKENS[runtime.device.type]
        )
        return runtime.agree(lambda: CoreMetric(examinee, bundle, config.core_metric_max_per_task))

    def evaluate(self) -> dict[str, float]:
        """Bits per byte on both splits."""
        config = self.config
        return {
            f"{split}_bpb": bits_per_byte(
                self.compiled,
                self.data.eval_rows(split, config.eval_tokens, config.eval_rows),
                self.token_bytes,
                self.runtime,
                self.batch_size,
            )
            for split in ("train", "val")
        }

    def throughput(self) -> tuple[float, float | None]:
        """Tokens per second over all ranks since the start, and the model FLOPs utilisation if the device's peak is known."""
        speed = self.state["timed_tokens"] / self.state["seconds"] if self.state["seconds"] else 0.0
        peak = peak_flops(self.runtime.device)
        return speed, speed * flops_per_token(self.model) / (peak * self.runtime.world_size) if peak else None

    # The loop

    def train(self, log: RunLog, stop: Stop) -> bool:
        """Train to the horizon. Returns False if a signal (or --stop-after) ended it early; the state is saved either way."""
        config, steps = self.config, self.horizon.steps
        with progress_bar() as bar:
            task = bar.add_task(config.tag, total=steps, completed=self.state["step"], status="")
            if not self.report_if_due(log, stop, bar):
                return False
            while self.state["step"] < steps:
                loss, stopping = self.step(stop)
                step = self.state["step"]
                stopping = (stopping or step == config.stop_after) and step < steps
                speed, _ = self.throughput()
                smooth = self.state["loss_average"] / (1 - LOSS_MEMORY**step)
                bar.update(task, completed=step, status=f"loss {smooth:.4f}  {speed:,.0f} tok/s")
                if step % config.log_every == 0 or step in (1, steps):
                    self.log_step(log, loss, smooth)
                # Before an evaluation too: it is long, and a signal's patience is short.
                if stopping or any(map(self.due, (config.save_every, config.eval_every, config.core_metric_every))):
                    self.save()
                if stopping or not self.report_if_due(log, stop, bar):
                    return False
        return True

    def log_step(self, log: RunLog, loss: float, smooth: float) -> None:
        """A line for this step: where it stands, how fast it goes, when it will end, what memory it took."""
        config, step, steps, (speed, mfu) = self.config, self.state["step"], self.horizon.steps, self.throughput()
        multiplier = lr_multiplier(step - 1, steps, config.warmup_ratio, config.warmdown_ratio, config.final_lr_frac)
        left, memory = self.pace.seconds_for(steps - step), peak_memory(self.runtime.device)
        parts = [f"step {step:05d}/{steps:05d}", f"loss {smooth:.4f}", f"lr x{multiplier:.2f}", f"{speed:,.0f} tok/s"]
        parts += [f"mfu {mfu:.1%}"] if mfu else []
        parts += [f"eta {clock_text(left)}"] if left is not None else []
        parts += [f"peak {memory:,.0f} MiB {'GPU' if self.runtime.device.type == 'cuda' else 'RSS'}"]
        log.log("train", step, " | ".join(parts), loss=loss, smooth_loss=smooth, lr_multiplier=multiplier, tokens_per_second=speed, mfu=mfu,
                eta_seconds=left, peak_memory_mib=memory)  # fmt: skip

    def due(self, every: int) -> bool:
        step = self.state["step"]
        return step == self.horizon.steps or (every > 0 and step % every == 0)

    def report_if_due(self, log: RunLog, stop: Stop, bar: Progress) -> bool:
        """Evaluate, score CORE and sample, unless this step's are in the log already (the run was killed after them). Returns False if a signal came."""
        config, step = self.config, self.state["step"]
        wanted = step == 0 or self.due(config.eval_every)
        if wanted and self.runtime.any(log.enabled and not log.has("eval", step, *EVAL_KEYS)):
            bpb, sigma = self.evaluate(), self.sigma()
            mean = {layer: round(sum(values) / len(values), 3) for layer, values in sigma.items()}
            text = f"step {step:05d} | train bpb {bpb['train_bpb']:.6f} | validation bpb {bpb['val_bpb']:.6f}"
            log.log(
                "eval",
                step,
                text + (f" | mean sigma {mean}" if mean else ""),
                **bpb,
                sigma=sigma,
                tokens=step * self.horizon.total_batch_size,
            )
        wanted = self.core and step and self.due(config.core_metric_every)
        if (
            wanted
            and self.runtime.any(log.enabled and not log.has("core", step, *CORE_KEYS))
            and not self.core.score(log, step, stop, bar)
        ):
            return False
        if (
            self.runtime.is_main
            and config.sample_every > 0
            and step
            and self.due(config.sample_every)
            and not log.has("sample", step)
        ):
            texts = Engine(self.model, self.data.tokenizer).complete(
                SAMPLE_PROMPTS, Sampling(max_tokens=16, temperature=0)
            )
            found = {prompt: text for prompt, [text] in zip(SAMPLE_PROMPTS, texts)}
            log.log(
                "sample", step, "\n".join(f"sample: {prompt + text!r}" for prompt, text in found.items()), texts=found
            )
        return True

    def sigma(self) -> dict[str, list[float]]:
        """Learned bandwidths of the gka layers, per head."""
        return {
            f"layer_{layer}": [round(value, 4) for value in sigma.tolist()]
            for layer, sigma in self.model.bandwidths().items()
        }

    def summary(self, log: RunLog) -> dict:
        """The numbers of a finished run: the paper's columns. On rank 0. Raises UserError if the last evaluation has none."""
        evaluations = [
            record for record in log.records("eval", *EVAL_KEYS) if None not in (record["train_bpb"], record["val_bpb"])
        ]
        if not evaluations or evaluations[-1]["step"] != self.horizon.steps:
            raise UserError(
                f"{self.folder}: the last evaluation's bits per byte are not finite, so the run has no result; its checkpoints are kept"
            )
        scored = [record for record in log.records("core", *CORE_KEYS) if record["step"] == self.horizon.steps]
        last, per_token, (speed, mfu) = evaluations[-1], flops_per_token(self.model), self.throughput()
        return {
            "parameters": parameter_counts(self.model)["total"],
            "flops_per_token": per_token,
            "train_tokens": self.horizon.tokens,
            "train_flops": self.horizon.tokens * per_token,
            "train_bpb": last["train_bpb"],
            "val_bpb": last["val_bpb"],
            "gap": last["val_bpb"] - last["train_bpb"],
            "eval_rows": self.config.eval_rows if self.data.has_upstream_rows else "spaced",
            "min_val_bpb": min(record["val_bpb"] for record in evaluations),
            "core": {key: scored[-1][key] for key in CORE_KEYS} if scored else None,
            "tokens_per_second": speed,
            "mfu": mfu,
            "sigma": self.sigma(),
        }


def main(config: TrainConfig) -> None:
    launch(config, Trainer, run_to_the_end)


def run_to_the_end(trainer: Trainer, log: RunLog) -> None:
    """Announce the run, train what is left of it, and record its numbers once."""
    config, runtime, horizon, model = trainer.config, trainer.runtime, trainer.horizon, trainer.model
    step = trainer.state["step"]
    if runtime.any(log.enabled and log.has("finish", horizon.steps, *FINISH_KEYS)):
        runtime.print(f"{trainer.folder}: already trained to its {horizon.steps} steps")
        return
    counts = parameter_counts(model)
    runtime.print(
        f"{config.tag}: {counts['total']:,} parameters, {flops_per_token(model):,} FLOPs per token, {trainer.data.tokenizer.vocab_size} tokens in the vocabulary"
    )
    runtime.print(
        f"horizon: {horizon.steps:,} steps of {horizon.total_batch_size:,} tokens = {horizon.tokens:,} tokens, {horizon.tokens * flops_per_token(model):.4e} FLOPs, "
        f"{horizon.steps * trainer.rows / len(trainer.stream.rows):.2f} epochs, on {runtime.world_size} x {runtime.device.type}"
    )
    trainer.fit_memory()
    pieces = list(map(len, micro_batches(runtime.share(trainer.rows), trainer.batch_size)))
    runtime.print(
        f"rows of a step, for this process: {', '.join(map(str, pieces[:8]))}{', ...' if len(pieces) > 8 else ''} at once"
    )
    trainer.data.warn_of_rows(config.eval_rows, config.eval_tokens, runtime.print)
    if model.operators():
        runtime.print(f"Gaussian kernel attention by {', '.join(model.operators())}")
    if step:
        runtime.print(f"resuming at step {step} of {horizon.steps}")
    if config.core_metric_every > 0:
        trainer.core = trainer.prepare_core()
    log.log("start", step, config=config.identity(), world_size=runtime.world_size, operators=model.operators())
    if not trainer.train(log, Stop()):
        runtime.print(
            f"stopped at step {trainer.state['step']} of {horizon.steps}, saved; continue with: {command_line()}"
        )
    elif runtime.is_main:
        summary = trainer.summary(log)
        append_result(
            config.results,
            "pretrain",
            {**config.identity(), "model_tag": config.tag},
            summary,
            runtime.device,
            runtime.world_size,
        )
        log.log("finish", horizon.steps, **summary)
        print(
            f"{trainer.folder}: finished, validation bpb {summary['val_bpb']:.6f}, train bpb {summary['train_bpb']:.6f}, {summary['tokens_per_second']:,.0f} tok/s"
        )


if __name__ == "__main__":
    run(main, TrainConfig)
