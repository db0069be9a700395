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

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from torch import nn

from deit_gka.model.accounting import cost_of
from deit_gka.model.attention import GKA
from deit_gka.model.registry import model_name  # importing it registers the models
from deit_gka.recipe import Recipe
from deit_gka.training.engine import autocast
from deit_gka.training.optim import make_optimizer
from gka import GaussianKernelAttention
from gka.testing import plain_attention
from runs.bench import models
from runs.bench.models import CandidateKey
from runs.bench.program import ComparisonConfig, Counts, Recorder
from runs.bench.timing import Measurement, Plan, interleave, release_memory
from runs.paper.published import SIZE_NAMES
from trainkit_gka import compiling
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import progress_bar

BENCHMARK = "deit"
CLASSES, PIXELS = 1000, 224
SEED = 0
RECIPE = Recipe(lr=0.0)  # the optimiser at work, on weights that stay what they are
INFERENCE, TRAINING = "inference", "training"
UNFUSED = "gka-unfused"
SOFTMAX_UNFUSED = "softmax-unfused"  # timm's attention as products, which its set_fused_attn(False) leads to
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


class UnfusedGKA(GKA):
    """GKA as one writes it in PyTorch from the paper (section 4.3: N x N intermediates), in autocast's dtypes."""

    def mix(self, x, heads, attn_mask, is_causal):
        if self.impl == "reference" or attn_mask is not None:
            return super().mix(x, heads, attn_mask, is_causal)
        return plain_attention(heads, self._log_sigma())


class VisionWeights:
    """The weights, the batch and the optimiser that the candidates of one kind share."""

    def __init__(self, kind: str, size: str, phase: str, batch: int, impl: str, device: torch.device):
        self.kind, self.phase, self.device = kind, phase, device
        torch.manual_seed(SEED)
        self.model = create(kind, size, impl).to(device).train(phase == TRAINING)
        generator = torch.Generator(device).manual_seed(SEED)
        self.images = torch.randn(batch, 3, PIXELS, PIXELS, generator=generator, device=device)
        self.targets = torch.rand(batch, CLASSES, generator=generator, device=device).softmax(-1)
        self.optimizer = make_optimizer(self.model, RECIPE) if phase == TRAINING else None
        if self.optimizer and device.type == "cuda":
            for group in self.optimizer.param_groups:
                group["capturable"] = True
        self.judged = slice(0, min(2, batch))
        # The other images have targets of zero, so the gradient is the mean over the batch of these alone.
        self.few_targets = torch.zeros_like(self.targets)
        self.few_targets[self.judged] = self.targets[self.judged]

    @functools.cached_property
    def exact(self) -> torch.Tensor:
        """Logits of the judged images, or the gradient of their loss, in float64 and for GKA by the equations."""
        model = by_the_equations(copy.deepcopy(self.model)).double()
        images, targets = self.images[self.judged].double(), self.targets[self.judged].double()
        return self.answer(model, model, "float32", images, targets)

    def answer(self, network, model: nn.Module, dtype: str, images, targets) -> torch.Tensor:
        """What is judged of a network with the parameters of `model`."""
        if self.phase == INFERENCE:
            with torch.inference_mode(), autocast(self.device, dtype):
                return network(images)[self.judged].double()
        mean = len(images) / len(self.targets)  # of the judged images alone to that of the batch
        return mean * models.gradient(model, lambda: loss(network, images, targets, self.device, dtype))


class VisionCandidate:
    """The shared model in one dtype, compiled or not. `step(n)` does the work once."""

    def __init__(self, shared: VisionWeights, dtype: str, compile_mode: str):
        self.shared, self.dtype, self.compile_mode = shared, dtype, compile_mode
        self.network = compiled(shared, compile_mode)
        self.step: Callable[[int], None] = self.train if shared.phase == TRAINING else self.infer

    def infer(self, n: int) -> None:
        with torch.inference_mode(), autocast(self.shared.device, self.dtype):
            self.network(self.shared.images)

    def train(self, n: int) -> None:
        shared = self.shared
        loss(self.network, shared.images, shared.targets, shared.device, self.dtype).backward()
        shared.optimizer.step()
        shared.optimizer.zero_grad(set_to_none=True)

    def gate(self) -> str | None:
        """Why the model is wrong, or None.

        Its first two images are compared with the same weights in float64, for GKA by the literal equations.
        """
        shared = self.shared
        literal = copy.deepcopy(shared.model)
        if shared.kind != UNFUSED:  # whose own arithmetic is plain PyTorch's
            by_the_equations(literal)
        few_images, few_targets = shared.images[shared.judged], shared.targets[shared.judged]
        got = shared.answer(self.network, shared.model, self.dtype, shared.images, shared.few_targets)
        plain = shared.answer(literal, literal, self.dtype, few_images, few_targets)
        name = "logits" if shared.phase == INFERENCE else "gradient"
        return models.model_gate(name, got, shared.exact, plain, half=self.dtype == "bfloat16")

    def held_mib(self) -> float:
        """What the model holds between steps: weights, optimiser state and the batch."""
        model, optimizer = self.shared.model, self.shared.optimizer
        state = [value for values in optimizer.state.values() for value in values.values()] if optimizer else []
        return models.tensors_mib([*model.parameters(), *model.buffers(), *state, self.shared.images])


def compiled(shared: VisionWeights, mode: str):
    """The shared model under torch.compile. On a CPU block by block: one program serves all blocks."""
    if mode == "off" or shared.device.type == "cuda":
        return models.compiled(shared.model, shared.kind, mode)
    torch._dynamo.config.recompile_limit = 64  # kinds and dtypes share a block's code
    twin = models.twin(shared.model)
    for block in twin.blocks:
        block.compile(mode=mode, dynamic=False)
    return twin


def create(kind: str, size: str, impl: str) -> nn.Module:
    """The paper's model of this kind; softmax is timm's own."""
    name = model_name(SIZE_NAMES[size], "softmax" if kind.startswith("softmax") else "gka" if kind == UNFUSED else kind)
    if kind == SOFTMAX_UNFUSED:
        model = timm.create_model(name)
        for block in model.blocks:
            block.attn.fused_attn = False
        return model
    if kind == UNFUSED:
        return timm.create_model(model_name(SIZE_NAMES[size], "softmax"), attn_layer=UnfusedGKA)
    return timm.create_model(name, **({"impl": impl} if kind == "gka" and impl else {}))


def by_the_equations(model: nn.Module) -> nn.Module:
    """The model with the reference in its GKA layers; softmax models stay as they are."""
    for block in model.blocks:
        if isinstance(block.attn, GKA):
            block.attn.impl = "reference"
    return model


def loss(network, images, targets, device: torch.device, dtype: str):
    """As the trainer: the model under autocast, then cross entropy with soft targets."""
    with autocast(device, dtype):
        return SoftTargetCrossEntropy()(network(images), targets)


def takes_part(kind: str, size: str, batch: int, device: torch.device) -> bool:
    """Whether a kind is timed at a size and batch: the unfused one shows on a CPU in one place what fusion is worth."""
    return kind != UNFUSED or device.type == "cuda" or (size, batch) == UNFUSED_ON_CPU


def measure(
    size: str, phase: str, batch: int, config: DeitConfig, plan: Plan, device: torch.device
) -> dict[CandidateKey, Measurement]:
    """One comparison of the kinds, in all dtypes."""
    torch._dynamo.reset()  # programs of other batch sizes hold memory
    candidates: dict[CandidateKey, VisionCandidate] = {}
    measured: dict[CandidateKey, Measurement] = {}
    for kind in config.kinds:
        if not takes_part(kind, size, batch, device):
            continue
        keys = {
            CandidateKey(kind, dtype, mode): compile_mode
            for dtype in config.dtypes
            for mode, compile_mode in models.modes(config.compile_mode, device).items()
            if kind != UNFUSED or (dtype == config.dtypes[0] and mode != models.EAGER)
        }
        measured |= {key: Measurement() for key in keys}
        try:
            shared = VisionWeights(kind, size, phase, batch, config.impl, device)
            candidates |= {key: VisionCandidate(shared, key.dtype, compile_mode) for key, compile_mode in keys.items()}
        except (ValueError, torch.OutOfMemoryError) as error:
            for key in keys:
                measured[key].fail(error)
    calls = {key: candidate.step for key, candidate in candidates.items()}
    timed = interleave(calls, device, plan, {key: candidate.gate for key, candidate in candidates.items()})
    models.add_held(timed, candidates)
    return measured | timed


def cases_of(config: DeitConfig) -> list[tuple[str, str, str, int]]:
    """(name, size, phase, batch) of every requested comparison."""
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
    device, requested = runtime.device, config.compile_mode
    config = config.fill(device.type)
    config = replace(config, compile_mode=compiling.mode("--compile-mode", requested, config.compile_mode, runtime))
    cases, plan = cases_of(config), config.adjust(PLANS[device.type])
    with progress_bar() as bar:
        for threads in config.with_threads():
            recorder = Recorder(config, BENCHMARK, device)
            task = bar.add_task(f"deit, {threads} threads", total=len(cases), status="")
            for name, size, phase, batch in cases:
                bar.update(task, status=f"{name} {phase}")
                measured = measure(size, phase, batch, config, plan, device)
                for dtype in config.dtypes:
                    settings = {"size": size, "batch": batch, "impl": config.impl, "dtype": dtype}
                    settings["compile_mode"] = config.compile_mode
                    models.record(recorder, name, phase, measured, ROLES, settings, partial(rates, size, batch))
                release_memory()
                bar.advance(task)


def rates(size: str, batch: int, key: CandidateKey, measurement: Measurement) -> dict[str, float | None]:
    """Images per second, and what the cost model counts for one image's forward pass."""
    speed = batch / measurement.median_ms * 1e3 if measurement.median_ms else None
    return {"items_per_second": speed, "flops_per_image": flops_per_image(key.kind, size)}


@functools.cache
def flops_per_image(kind: str, size: str) -> int:
    with torch.device("meta"):
        return cost_of(create(kind, size, "")).flops


if __name__ == "__main__":
    run(main, DeitConfig)
