"""Time whole vision transformers: DeiT-Ti/S/B with softmax attention and with GKA (the paper's table 4).

    python -m runs.bench.deit                                     every size, batch and kind for the device present
    python -m runs.bench.deit --only deit-ti-b64 deit-ti-b128     one size, two batches
    python -m runs.bench.deit --impl triton --kinds softmax gka

Protocol: inference at batch 32 to 512 (the best images/s counts), a training step (forward, backward, AdamW) at 64 and
128, bfloat16 autocast, torch.compile(max-autotune) on both sides, 100 turns after the warm-up, on random images.
Softmax is timm's deit_*_patch16_224 with fused SDPA, as torch chooses its kernel and held to cuDNN's, and on a CPU also
as two matrix products ("softmax-unfused"), which are faster there in bfloat16. "gka-unfused" is GKA as the paper's
implementation has it: distances, W and the mixture as N x N matrices in PyTorch, under the same autocast and compiler.

On a CPU: inference at batch 1, 8 and 16, training at 8, in float32 and under bfloat16 autocast (-bf16), every model
both eager and compiled, block by block (torch.compile's default mode; whole models are as fast and take twice as long
to compile). The faster counts, and in bfloat16 that of softmax attention in either dtype. "gka-unfused": size Ti at 8.
`python -m runs.bench.report` prints the tables.
"""

import functools
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch

from deit_gka.model.accounting import cost_of
from gka import GaussianKernelAttention
from runs.bench import models
from runs.bench.config import ComparisonConfig, Counts, with_dtype
from runs.bench.deit_models import INFERENCE, SOFTMAX_UNFUSED, TRAINING, UNFUSED, Candidate, Subject, create
from runs.bench.device import release_memory
from runs.bench.measurement import Measurement, Plan
from runs.bench.models import Key
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from runs.paper.deit import SIZE_NAMES
from trainkit_gka import compiling
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import progress_bar

BENCHMARK = "deit"
ROLES = models.ROLES | {UNFUSED: "unfused", SOFTMAX_UNFUSED: "baseline"}
UNFUSED_ON_CPU = ("ti", 8)
PLANS = {"cuda": Plan(rounds=100, graph=True), "cpu": Plan(rounds=40, warmup=1, seconds=12)}


@dataclass
class DeitConfig(ComparisonConfig):
    """Time DeiT with softmax attention and with GKA, fused and unfused: inference and training.

    Appends to RESULTS/bench_deit_<hardware>.jsonl.
    """

    sizes: list[Literal[tuple(SIZE_NAMES)]] = field(default_factory=list)
    """Sizes to time; empty = all."""
    kinds: list[Literal[(*models.MODEL_KINDS, SOFTMAX_UNFUSED, UNFUSED)]] = field(default_factory=list)
    """Kinds of attention; empty = softmax, softmax-cudnn (CUDA only) or softmax-unfused (CPU only), gka, and
    gka-unfused, which builds W."""
    batch_sizes: Counts = field(default_factory=list)
    """Batches of inference; empty = 32 64 128 256 512 on CUDA, 1 8 16 on a CPU."""
    train_batch_sizes: Counts = field(default_factory=list)
    """Batches of the training step; empty = 64 128 on CUDA, 8 on a CPU."""
    phases: list[Literal["inference", "training"]] = field(default_factory=lambda: [INFERENCE, TRAINING])
    """What to time."""
    impl: str = ""
    """Implementation of gaussian_attention in the gka models; empty = the models' own choice."""
    compile_mode: Literal["auto", "off", "default", "max-autotune"] = "auto"
    """Mode of torch.compile; auto = max-autotune on CUDA, default on a CPU, where eager models take part too. On CUDA
    the whole step becomes one CUDA graph in every mode."""

    def check(self) -> None:
        super().check()
        try:
            GaussianKernelAttention(64, 1, impl=self.impl or "auto")
        except ValueError as error:
            raise UserError(f"--impl: {error}") from None

    def fill(self, device_type: str) -> "DeitConfig":
        """The configuration with the device's defaults in the empty places."""
        cuda = device_type == "cuda"
        inference, training = ([8] if self.quick else [1, 8, 16]), [8]
        if cuda:
            inference, training = ([128], [64]) if self.quick else ([32, 64, 128, 256, 512], [64, 128])
        return replace(
            self,
            sizes=self.sizes or (["ti"] if self.quick else list(SIZE_NAMES)),
            kinds=self.kinds or [*models.default_kinds(cuda), *([] if cuda else [SOFTMAX_UNFUSED]), UNFUSED],
            batch_sizes=self.batch_sizes or inference,
            train_batch_sizes=self.train_batch_sizes or training,
            dtypes=self.dtypes_on(device_type),
            compile_mode=("max-autotune" if cuda else "default") if self.compile_mode == "auto" else self.compile_mode,
        )


def takes_part(kind: str, size: str, batch: int, device: torch.device) -> bool:
    """Whether a kind is timed at a size and batch: the unfused one shows on a CPU in one place what fusion is worth."""
    return kind != UNFUSED or device.type == "cuda" or (size, batch) == UNFUSED_ON_CPU


def measure(
    size: str, phase: str, batch: int, config: DeitConfig, plan: Plan, device: torch.device
) -> dict[Key, Measurement]:
    """One comparison of the kinds, in all dtypes."""
    torch._dynamo.reset()  # programs of other batch sizes hold memory
    candidates: dict[Key, Candidate] = {}
    measured: dict[Key, Measurement] = {}
    for kind in config.kinds:
        if not takes_part(kind, size, batch, device):
            continue
        keys = {
            Key(kind, dtype, mode): compile_mode
            for dtype in config.dtypes
            for mode, compile_mode in models.modes(config.compile_mode, device).items()
            if kind != UNFUSED or (dtype == config.dtypes[0] and mode != models.EAGER)
        }
        measured |= {key: Measurement() for key in keys}
        try:
            subject = Subject(kind, size, phase, batch, config.impl, device)
            candidates |= {key: Candidate(subject, key.dtype, compile_mode) for key, compile_mode in keys.items()}
        except (ValueError, torch.OutOfMemoryError) as error:
            for key in keys:
                measured[key].fail(error)
    calls = {key: candidate.step for key, candidate in candidates.items()}
    timed = interleave(calls, device, plan, {key: candidate.gate for key, candidate in candidates.items()})
    models.add_held(timed, candidates)
    return measured | timed


def cases_of(config: DeitConfig) -> list[tuple[str, str, str, int]]:
    """(name, size, phase, batch) of every comparison that is asked for."""
    batches = {INFERENCE: config.batch_sizes, TRAINING: config.train_batch_sizes}
    cases = [
        (f"deit-{size}-b{batch}", size, phase, batch)
        for size in config.sizes
        for phase in config.phases
        for batch in batches[phase]
    ]
    wanted = config.select(list(dict.fromkeys(name for name, *_ in cases)))
    return [case for case in cases if case[0] in wanted]


def main(config: DeitConfig) -> None:
    config.check()
    runtime = setup(config.device_type)
    device, asked = runtime.device, config.compile_mode
    config = config.fill(device.type)
    config = replace(config, compile_mode=compiling.mode("--compile-mode", asked, config.compile_mode, runtime))
    cases, plan = cases_of(config), PLANS[device.type].adjust(config)
    with progress_bar() as bar:
        for threads in config.with_threads():
            recorder = Recorder(config, BENCHMARK, device)
            task = bar.add_task(f"deit, {threads} threads", total=len(cases), status="")
            for name, size, phase, batch in cases:
                bar.update(task, status=f"{name} {phase}")
                measured = measure(size, phase, batch, config, plan, device)
                for dtype in config.dtypes:
                    named = models.comparison(measured, dtype, ROLES)
                    lines = {label: measured[key] for label, key in named.items()}
                    roles = {label: ROLES[key.kind] for label, key in named.items()}
                    settings = {"size": size, "batch": batch, "impl": config.impl, "dtype": dtype}
                    settings["compile_mode"] = config.compile_mode
                    extra = partial(rates, {label: key.kind for label, key in named.items()}, size, batch)
                    recorder.record(with_dtype(name, dtype, device.type), phase, lines, roles, settings, extra)
                release_memory()
                bar.advance(task)


def rates(kinds: dict[str, str], size: str, batch: int, name: str, measurement: Measurement) -> dict:
    """Images per second, and what the cost model counts for one image's forward pass."""
    speed = batch / measurement.median_ms * 1e3 if measurement.median_ms else None
    return {"items_per_second": speed, "flops_per_image": flops_per_image(kinds[name], size)}


@functools.cache
def flops_per_image(kind: str, size: str) -> int:
    with torch.device("meta"):
        return cost_of(create(kind, size, "")).flops


if __name__ == "__main__":
    run(main, DeitConfig)
