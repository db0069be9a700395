"""Pretraining: the command that trains a GPT, or continues a run that was stopped.

    python -m nanochat_gka.train --data out/packed --depth 4 --attention gka
    python -m trainkit_gka.torchrun --standalone --nproc-per-node 7 -m -- nanochat_gka.train --data out/packed \\
        --target-param-data-ratio 8.25

In run order: the flags; data, model, horizon and optimiser; a step; evaluations; the contents of a checkpoint; the
run's numbers. `trainkit_gka/loop.py` is the loop around them.

A step is a fixed set of rows of the global stream, dealt to the processes as evenly as possible. The loss is divided by
the global token count and gradients are summed, so any number of processes computes the same step up to rounding.
"""

import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
from rich.progress import Progress

from gka import bandwidth_warnings
from nanochat_gka.core_metric.fetch import FETCHED, BundleFlags
from nanochat_gka.core_metric.scoring import BATCH_TOKENS, CoreMetric, TaskScorer
from nanochat_gka.data.loader import EvalRows, PackedData, RowStream, micro_batches, to_device
from nanochat_gka.data.tokenizer import FILE_NAME
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import SAMPLE_PROMPTS, Sampling
from nanochat_gka.model.accounting import Horizon, flops_per_token, meta_model, parameter_counts, plan
from nanochat_gka.model.config import ModelFlags, has_gka, settings_of_today
from nanochat_gka.model.gpt import GPT, build
from nanochat_gka.training import memory
from nanochat_gka.training.bits_per_byte import UTF8, of_both_splits, rows_note, utf8_note
from nanochat_gka.training.memory import RowsAtOnce
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, check_decay, parameter_groups
from nanochat_gka.training.schedule import lr_multiplier, muon_momentum, weight_decay_multiplier
from trainkit_gka import cli, compiling, hardware
from trainkit_gka.checkpoint import Checkpoint
from trainkit_gka.cli import Bounds, CountOrAll, CountOrAutomatic, CountOrOff, Group, MayChange, UserError
from trainkit_gka.distributed import Runtime, Stop
from trainkit_gka.loop import launch
from trainkit_gka.progress import RunLog, clock_text, rate
from trainkit_gka.results import git_commit, peak_memory
from trainkit_gka.run_config import RunConfig
from trainkit_gka.trainer import Contents, Evaluation
from trainkit_gka.trainer import Trainer as BaseTrainer

PRESET_PARTS = "gka-PS-normalised-channels-gates-VE"  # of the preset's name by its flags
MOST_PACKED = 2**14  # tokens that sdpa takes at once with cu_seqlens
LOSS_MEMORY = 0.9  # of the printed loss, a running average
MANY_EPOCHS = 10  # of one text
# Keys that are read back from the log; a record without them does not count.
COST_KEYS = ("parameters", "flops_per_token", "train_tokens", "train_flops")
EVAL_KEYS, CORE_KEYS = ("train_bpb", "val_bpb"), ("name", "metric", "standard_error")

PositiveOrOff = Annotated[float, Bounds(0, open_least=True, other=(-1, "off"))]


@dataclass(frozen=True)
class TrainConfig(OptimConfig, ModelFlags, BundleFlags, RunConfig):
    """Pretrain a GPT with softmax, VLT or Gaussian kernel attention.

    The same command continues a run that was stopped.
    """

    # Where
    data: MayChange[Annotated[Path, Group.DATA]] = Path("out/packed")
    """Folder of packed rows."""
    model_tag: MayChange[str] = ""
    """Name of the run; empty takes d<depth>-<attention> and what is unlike the paper's form: d20-gka-PS-VE."""
    compile: MayChange[Literal["auto", "on", "off"]] = "auto"
    """Whether to use torch.compile; auto does on CUDA if a compiler is installed."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What activations and products are rounded to, matrices are float32; auto = bfloat16 on CUDA, else float32."""
    verify_data: MayChange[Annotated[bool, Group.DATA]] = True
    """Check the data's checksums before training, on every machine."""

    document_mask: bool = False
    """Keep the documents of a row apart: tokens see their own document only, and positions begin anew with each.
    Documents begin at BOS tokens and at the beginning of a row."""
    max_seq_len: Annotated[int, Bounds(1, other=(-1, "the data's")), Group.MODEL] = -1
    """Context length T; -1 takes the data's."""

    # Horizon: the first of these that is set decides
    num_iterations: Annotated[CountOrOff, Group.SCHEDULE] = -1
    """Number of steps; -1 leaves it to the training FLOPs."""
    target_flops: Annotated[PositiveOrOff, Group.SCHEDULE] = -1.0
    """Total training FLOPs; -1 leaves the number of steps to the ratio."""
    target_param_data_ratio: Annotated[PositiveOrOff, Group.SCHEDULE] = 10.5
    """Training tokens per scaling parameter (matrices and head)."""

    # Optimisation
    device_batch_size: MayChange[RowsAtOnce] = "auto"
    """Rows that a process computes at once; auto takes what fits the memory. It changes speed, not results."""
    total_batch_size: Annotated[CountOrAutomatic, Group.SCHEDULE] = -1
    """Tokens per step over all processes; -1 = automatic."""
    warmup_ratio: Annotated[float, Bounds(0, 1), Group.SCHEDULE] = 0.0
    """Part of the steps spent warming up."""
    warmdown_ratio: Annotated[float, Bounds(0, 1), Group.SCHEDULE] = 0.5
    """Part of the steps spent warming down."""
    final_lr_frac: Annotated[float, Bounds(0, 1, open_most=True), Group.SCHEDULE] = 0.0
    """Learning rate at the end, as a fraction."""

    # Reports
    eval_tokens: MayChange[Annotated[CountOrAll, Group.LOGGING]] = 20_971_520
    """Tokens of each split to evaluate on; -1 = all."""
    core_metric_every: MayChange[Annotated[CountOrOff, Group.LOGGING]] = -1
    """Steps between scores on CORE (nanochat's: 2000), and one at the end; -1 = off."""
    core_metric_max_per_task: MayChange[Annotated[CountOrAll, Group.LOGGING]] = 500
    """Examples of each of CORE's tasks; -1 = all."""
    eval_rows: MayChange[Annotated[EvalRows, Group.LOGGING]] = "upstream"
    """Rows of a split: upstream = the first of nanochat's loader (the paper's way), spaced = evenly spaced, as always
    where packing split documents."""
    sample_every: MayChange[Annotated[CountOrOff, Group.LOGGING]] = 2000
    """Steps between samples of text, nanochat's seven prompts; -1 = never."""

    @property
    def tag(self) -> str:
        is_unrotated = self.gka_values == "unrotated" and has_gka(self.attention, self.depth)
        values = "normalised" if is_unrotated else ""
        everywhere = "everywhere" if self.offset_layers == "all" else ""
        learned = ["channels"] * self.channel_bandwidths + ["gates"] * self.head_gates
        tables = {"auto": "", "every-second": "VE", "every-layer": "VE-every-layer", "none": "no-VE"}[self.value_embeds]
        last = "documents" if self.document_mask else ""
        parts = [f"d{self.depth}", self.attention, self.head_offsets, everywhere, values, *learned, tables, last]
        name = "-".join(filter(None, parts))
        short = f"d{self.depth}-preset"
        is_preset = name == f"d{self.depth}-{PRESET_PARTS}" and not (self.out / name).exists()
        return self.model_tag or (short if is_preset else name)

    def identity(self) -> dict[str, Any]:
        hidden = () if has_gka(self.attention, self.depth) else ("gka_values",)  # without meaning there
        return {name: value for name, value in super().identity().items() if name not in hidden}

    def check_continues(self, saved: dict[str, Any]) -> None:
        try:
            saved = settings_of_today(saved)
        except ValueError as error:
            raise UserError(f"the run in {self.folder} cannot be continued: {error}") from None
        super().check_continues(saved)

    def horizon(self, model: GPT, processes: int) -> Horizon:
        """How long `model` trains. Raises UserError if a step's tokens are not rows enough for every process."""
        length = model.config.sequence_len
        shape = partial(self.shape, sequence_len=length, vocab_size=model.config.vocab_size)
        settings = {name: getattr(self, name) for name in ("total_batch_size", "num_iterations", "target_flops")}
        horizon = plan(model, shape, ratio=self.target_param_data_ratio, **settings)
        tokens = horizon.total_batch_size
        if tokens % length:
            raise UserError(f"--total-batch-size must be a multiple of the context length {length}, got {tokens}")
        if (rows := tokens // length) < processes:
            raise UserError(f"a step has {rows} rows for {processes} processes; raise --total-batch-size")
        return horizon


def accumulate_gradients(
    model, stream: RowStream, step: int, rows: int, batch_size: int, runtime: Runtime
) -> torch.Tensor:
    """Run this rank's rows of `step` forward and backward. Returns its part of the step's mean loss, on the device."""
    tokens = rows * stream.rows.sequence_len
    share = runtime.share(rows)
    total = torch.zeros((), device=runtime.device)
    for numbers in micro_batches(range(step * rows + share.start, step * rows + share.stop), batch_size):
        ids, targets = to_device(stream.batch(numbers), runtime.device)
        loss = model(ids, targets, reduction="sum") / tokens
        loss.backward()
        total += loss.detach()
    return total


class Trainer(BaseTrainer):
    """One pretraining run. Raises UserError for data or flags that cannot be trained with."""

    KIND, LOWER = "pretrain", "lower learning rates"
    FINISH_KEYS = (*COST_KEYS, *EVAL_KEYS, "gap", "tokens_per_second", "sigma")

    def __init__(self, config: TrainConfig, runtime: Runtime, checkpoint: Checkpoint | None = None):
        super().__init__(config, runtime)
        # Data
        self.data = PackedData(config.data, verify=config.verify_data and runtime.is_first_here)
        sequence_len, vocab_size = self.data.sequence_len, self.data.tokenizer.vocab_size
        if config.max_seq_len not in (-1, sequence_len):
            rows = f"{config.data} holds rows of {sequence_len} tokens"
            raise UserError(f"--max-seq-len {config.max_seq_len} but {rows}; pack again with --sequence-len")
        self.stream = RowStream(self.data.split("train"), config.seed)
        # Model
        automatic = "on" if runtime.device.type == "cuda" else compiling.OFF
        compiled = compiling.mode("--compile", config.compile, automatic, runtime) != compiling.OFF
        shape = config.shape(config.depth, sequence_len, vocab_size)
        if config.document_mask:
            shape = replace(shape, document_start=self.data.tokenizer.bos_id)
        memory.check_fits(meta_model(shape), runtime.device, runtime.world_size)
        self.model: GPT = build(shape, runtime.device)
        if config.dtype != "auto":
            self.model.compute_in(getattr(torch, config.dtype))
        self.compiled = torch.compile(self.model, dynamic=False) if compiled else self.model
        # Horizon
        self.horizon = config.horizon(self.model, runtime.world_size)
        self.steps, self.rows = self.horizon.steps, self.horizon.total_batch_size // sequence_len
        if len(self.stream.rows) < self.rows and checkpoint is None:
            problem = f"{config.data} has {len(self.stream.rows):,} training rows and a step takes {self.rows:,}"
            raise UserError(f"{problem}: give more text, pack shorter rows, or lower --total-batch-size")
        self.batch_size = config.device_batch_size
        if self.batch_size == "auto":
            fitting = memory.rows_at_once(self.model, runtime.device, runtime.world_size)
            self.batch_size = min(fitting, -(-self.rows // runtime.world_size))
        if config.document_mask:
            self._keep_dense_masks_small()
        # Optimiser
        groups = parameter_groups(self.model, config, self.horizon.lr_scale, self.horizon.weight_decay_scale)
        check_decay(groups)
        through_float32 = self._multiplies_through_float32(checkpoint)
        self.optimizer = MuonAdamW(groups, runtime, compile=compiled, through_float32=through_float32)
        # Evaluations, in this order
        self.evaluations = [Evaluation("eval", config.eval_every, self._log_evaluation, EVAL_KEYS, at_start=True)]
        if config.core_metric_every > 0:
            self.evaluations.append(Evaluation("core", config.core_metric_every, self._score_core, CORE_KEYS))
        if config.sample_every > 0:
            self.evaluations.append(Evaluation("sample", config.sample_every, self._log_samples))
        # Progress so far
        self.state |= {"loss_average": 0.0, "seconds": 0.0, "timed_tokens": 0}
        self.commit = git_commit()
        if checkpoint is not None:
            self.data.check_same(checkpoint.state["data"], self.folder)
            self.model.load_state_dict(checkpoint.tensors("model", runtime.device))
            self.optimizer.load_state_dict(checkpoint.tensors("optimizer", runtime.device))
            self.state = checkpoint.state["progress"]
        self.state["muon_through_float32"] = through_float32

    def _keep_dense_masks_small(self) -> None:
        """Fewer rows at once where sdpa mixes documents. Raises UserError if one row is too long for it."""
        operators, length = {one.operator(self.model.dtype) for one in self.model.attentions}, self.data.sequence_len
        if length > MOST_PACKED and operators & {None, "sdpa"}:
            advice = f"pack rows of at most {MOST_PACKED:,} tokens with --sequence-len, or leave it out"
            raise UserError(f"--document-mask makes a dense mask of a row here, and rows have {length:,}: {advice}")
        if "sdpa" in operators:  # softmax and vlt layers take rows one by one
            self.batch_size = min(self.batch_size, MOST_PACKED // length)

    def _multiplies_through_float32(self, checkpoint: Checkpoint | None) -> bool:
        """Whether Muon does, as bfloat16 products are slow on a rank's CPU. A continued run goes on as it began."""
        saved = checkpoint.state["progress"].get("muon_through_float32") if checkpoint else None
        if saved is not None and self.runtime.device.type == "cpu":
            return saved
        return self.runtime.any(hardware.bfloat16_products_are_slow(self.runtime.device))

    # Before the first step

    def prepare(self) -> None:
        config, runtime = self.config, self.runtime
        if config.device_batch_size == "auto" and runtime.device.type == "cuda":
            self.batch_size = memory.largest_that_runs(self.batch_size, self.dry_step, runtime)
        if config.core_metric_every > 0:  # a wrong bundle is an error now, not in 2,000 steps
            bundle = config.open_on_all(config.out.parent / "core", runtime)
            self.core = runtime.agree(lambda: self._core_of(bundle))

    def check(self) -> dict[str, str]:
        bundle = self.config.bundle or self.config.out.parent / "core" / FETCHED
        if self.config.core_metric_every < 0:
            return {}
        if self.config.bundle is None and not bundle.exists():
            return {"CORE": f"not checked, for it will be fetched from {self.config.bundle_url}"}
        with TemporaryDirectory(prefix="gka-") as scratch:  # a zip file is unpacked there
            tasks = self._core_of(replace(self.config, bundle=bundle).open_bundle(Path(scratch))).tasks
        return {"CORE": f"{len(tasks)} tasks, {sum(len(examples) for _, examples, _ in tasks):,} examples"}

    def _core_of(self, bundle: Path) -> CoreMetric:
        """The tasks of a bundle's folder, and what scores them. Raises UserError for anything wrong in it."""
        limits = {"max_seq_len": self.model.rotary.length, "batch_tokens": BATCH_TOKENS[self.runtime.device.type]}
        scorer = TaskScorer(self.model, self.data.tokenizer, self.runtime, **limits)
        return CoreMetric(scorer, bundle, self.config.core_metric_max_per_task)

    def announce(self) -> dict[str, Any]:
        config, runtime, horizon, say = self.config, self.runtime, self.horizon, self.runtime.print
        parameters, per_token = parameter_counts(self.model)["total"], flops_per_token(self.model)
        vocabulary = f"{self.data.tokenizer.vocab_size} tokens in the vocabulary"
        say(f"{config.tag}: {parameters:,} parameters, {per_token:,} FLOPs per token, {vocabulary}")
        epochs = self.steps * self.rows / len(self.stream.rows)
        steps = f"{self.steps:,} steps of {horizon.total_batch_size:,} tokens = {horizon.tokens:,} tokens"
        where = f"{epochs:.2f} epochs, on {runtime.world_size} x {runtime.device.type}"
        say(f"horizon: {steps}, {horizon.tokens * per_token:.4e} FLOPs, {where}")
        if epochs > MANY_EPOCHS:
            rows = f"{len(self.stream.rows):,} training rows are read {epochs:,.0f} times"
            say(f"warning: the {rows}, and will be known by heart: give more text, or lower --num-iterations")
        say(f"rows of a step, for this process: {len(runtime.share(self.rows))}, at most {self.batch_size} at once")
        if note := hardware.slow_bfloat16(self.model.dtype, runtime.device, "--dtype float32 is faster"):
            say(note)
        if self.state["muon_through_float32"]:
            say("note: this processor has no instructions for bfloat16; Muon's products are computed in float32")
        if operators := self.model.operators():
            say(f"Gaussian kernel attention by {', '.join(operators)}")
        return {"operators": operators, "muon_through_float32": self.state["muon_through_float32"]}

    def dry_step(self, batch_size: int) -> None:
        """Take the memory of a step in micro-batches of `batch_size` rows, and leave everything as it is."""
        rows = -(-self.rows // self.runtime.world_size)
        try:
            memory.dry_step(self.compiled, rows, batch_size, self.data.sequence_len, self.runtime.device)
        finally:
            self.optimizer.zero_grad()

    # A step

    def step(self, asked_to_stop: bool) -> tuple[dict[str, float], bool]:
        step, state = self.state["step"], self.state
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = accumulate_gradients(self.compiled, self.stream, step, self.rows, self.batch_size, self.runtime)
        # A step waits for the device once, here: loss and gradients must be finite before they may touch the weights.
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, norm_type=math.inf).float()  # of this process
        stop_flag = torch.tensor(float(asked_to_stop), device=loss.device)
        mean_loss, stopping, sum_of_largest = self.runtime.sum(torch.stack([loss, stop_flag, largest])).tolist()
        if not math.isfinite(mean_loss):
            raise self.diverged(f"the loss is {mean_loss}")
        if not math.isfinite(sum_of_largest):
            raise self.diverged("the gradient is not finite")
        self.optimizer.step(self.lr_multiplier(step), muon_momentum(step), weight_decay_multiplier(step, self.steps))
        self.runtime.synchronize()
        state["step"] = step + 1
        state["loss_average"] = LOSS_MEMORY * state["loss_average"] + (1 - LOSS_MEMORY) * mean_loss
        if self.pace.step():
            state["seconds"] += time.perf_counter() - started
            state["timed_tokens"] += self.horizon.total_batch_size
        smooth = state["loss_average"] / (1 - LOSS_MEMORY ** (step + 1))
        return {"loss": mean_loss, "smooth_loss": smooth}, stopping > 0

    def lr_multiplier(self, step: int) -> float:
        """The schedule's factor of every learning rate."""
        config = self.config
        return lr_multiplier(step, self.steps, config.warmup_ratio, config.warmdown_ratio, config.final_lr_frac)

    def throughput(self) -> tuple[float | None, float | None]:
        """Tokens per second over all ranks, and the model FLOPs utilisation; None where a number is not known."""
        if not self.state["seconds"]:
            return None, None
        speed = self.state["timed_tokens"] / self.state["seconds"]
        peak = hardware.peak_flops(self.runtime.device)
        return speed, speed * flops_per_token(self.model) / (peak * self.runtime.world_size) if peak else None

    def status(self, numbers: dict[str, float]) -> str:
        return f"loss {numbers['smooth_loss']:.4f}  {rate(self.throughput()[0], 'tok/s')}"

    def describe(self, numbers: dict[str, float]) -> tuple[str, dict[str, Any]]:
        step, (speed, mfu) = self.state["step"], self.throughput()
        multiplier = self.lr_multiplier(step - 1)
        eta = self.pace.seconds_for(self.steps - step)
        memory_mib = peak_memory(self.runtime.device)
        memory_of = "GPU" if self.runtime.device.type == "cuda" else "RSS"
        parts = [
            f"step {step:05d}/{self.steps:05d} | loss {numbers['smooth_loss']:.4f} | lr x{multiplier:.2f}",
            rate(speed, "tok/s"),
            f"mfu {mfu:.1%}" if mfu else "",
            f"eta {clock_text(eta)}" if eta is not None else "",
            f"peak {memory_mib:,.0f} MiB {memory_of}",
        ]
        values = {"lr_multiplier": multiplier, "tokens_per_second": speed, "mfu": mfu, "eta_seconds": eta}
        return " | ".join(filter(None, parts)), {**numbers, **values, "peak_memory_mib": memory_mib}

    def work(self) -> tuple[str, int, float | None]:
        return "tokens", self.horizon.total_batch_size, float(flops_per_token(self.model))

    # The contents of a checkpoint

    def contents(self) -> Contents:
        about = {
            "commit": self.commit,
            "model_config": asdict(self.model.config),
            "data": self.data.provenance(self.folder),
            "tokens": self.state["step"] * self.horizon.total_batch_size,
            "steps": self.steps,
        }
        tensors = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return Contents(tensors, about, {FILE_NAME: self.data.folder / FILE_NAME})

    def data_hashes(self) -> dict[str, str]:
        return {"packed rows with the hash": self.data.rows_hash()}

    # Evaluations

    def _log_evaluation(self, log: RunLog, stop: Stop, bar: Progress) -> None:
        step, bpb, sigma = self.state["step"], self.evaluate(stop), self.sigma()
        train, val = (f"{bpb[name]:.6f}{utf8_note(bpb, name)}" for name in EVAL_KEYS)
        parts = [f"step {step:05d}", f"train bpb {train}", f"validation bpb {val}", rows_note(bpb)]
        mean = {layer: round(sum(values) / len(values), 3) for layer, values in sigma.items()}
        parts += [f"mean sigma {mean}"] if mean else []
        log.log("eval", step, " | ".join(parts), **bpb, sigma=sigma, tokens=step * self.horizon.total_batch_size)

    def evaluate(self, stop: Stop | None = None) -> dict[str, Any]:
        """Bits per byte on both splits, and which rows they are of."""
        which = self.config.eval_tokens, self.config.eval_rows
        bpb = of_both_splits(self.compiled, self.data, *which, self.runtime, self.batch_size, stop)
        return {"eval_rows": self.data.name_rows(*which), **bpb}

    def sigma(self) -> dict[str, list[float]]:
        """Learned bandwidths of the gka layers, per head."""
        bandwidths = self.model.bandwidths().items()
        return {f"layer_{layer}": [round(value, 4) for value in sigma.tolist()] for layer, sigma in bandwidths}

    def _score_core(self, log: RunLog, stop: Stop, bar: Progress) -> None:
        self.core.score(log, self.state["step"], stop, bar)

    def _log_samples(self, log: RunLog, stop: Stop, bar: Progress) -> None:
        """Rank 0 writes them; the others wait for it."""
        engine = Engine(self.model, self.data.tokenizer)
        prompts = [prompt for prompt in SAMPLE_PROMPTS if engine.fits(prompt)]  # a tiny context has no room for some
        texts = dict.fromkeys(prompts, "")
        pieces = engine.stream(prompts, Sampling(max_tokens=16, temperature=0))
        for piece in self.runtime.rounds(pieces if log.enabled else (), stop):
            texts[prompts[piece.prompt]] += piece.text
        lines = "\n".join(f"sample: {prompt + text!r}" for prompt, text in texts.items())
        log.log("sample", self.state["step"], lines, texts=texts)

    def warnings(self) -> dict[str, str]:
        warnings: dict[str, str] = {}
        for layer, sigma in self.model.bandwidths().items():
            warnings |= bandwidth_warnings(layer, sigma.tolist(), self.model.config.head_dim, "--sigma-lr")
        return warnings

    # The run's numbers

    def summary(self, log: RunLog) -> tuple[dict[str, Any], str]:
        """The paper's columns, and some in words. Raises UserError if the last bits per byte are not finite."""
        evaluations = [record for record in log.records("eval", *EVAL_KEYS) if None not in map(record.get, EVAL_KEYS)]
        if not evaluations or evaluations[-1]["step"] != self.steps:
            problem = "the last evaluation's bits per byte are not finite, so the run has no result"
            raise UserError(f"{self.folder}: {problem}; its checkpoints stay")
        scored = [record for record in log.records("core", *CORE_KEYS) if record["step"] == self.steps]
        last, per_token, (speed, mfu) = evaluations[-1], flops_per_token(self.model), self.throughput()
        numbers = {
            "parameters": parameter_counts(self.model)["total"],
            "flops_per_token": per_token,
            "train_tokens": self.horizon.tokens,
            "train_flops": self.horizon.tokens * per_token,
            **{key: last.get(key) for key in (*EVAL_KEYS, *(key + UTF8 for key in EVAL_KEYS))},
            "gap": last["val_bpb"] - last["train_bpb"],
            "eval_rows": last.get("eval_rows"),
            "min_val_bpb": min(record["val_bpb"] for record in evaluations),
            "core": {key: scored[-1][key] for key in CORE_KEYS} if scored else None,
            "tokens_per_second": speed,
            "mfu": mfu,
            "sigma": self.sigma(),
        }
        train, val = (f"{numbers[name]:.6f}{utf8_note(numbers, name)}" for name in EVAL_KEYS)
        words = [f"validation bpb {val}, train bpb {train}", rows_note(numbers)]
        return numbers, ", ".join(filter(None, (*words, rate(speed, "tok/s"))))


def main(config: TrainConfig) -> None:
    launch(config, Trainer)


if __name__ == "__main__":
    cli.run(main, TrainConfig)
