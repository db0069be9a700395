"""Time whole vision transformers: DeiT-Ti/S/B with softmax attention and with GKA (the paper's table 4).

    python -m runs.bench.deit                                     every size, batch and kind for the device present
    python -m runs.bench.deit --only deit-ti-b64 deit-ti-b128     one size, two batches
    python -m runs.bench.deit --impl triton --kinds softmax gka

Protocol: inference at batch 32 to 512 (the best images/s counts), a training step (forward, backward, AdamW) at 64 and
128, bfloat16 autocast, torch.compile(max-autotune) on both sides, 100 turns after the warm-up, on random images.
Softmax is timm's deit_*_patch16_224 with fused SDPA, as torch chooses its kernel and held to cuDNN's. "gka-unfused" is
GKA as the paper's implementation has it: distances, W and the mixture as N x N matrices in PyTorch, under the same
autocast and compiler. On a CPU: size Ti, inference at batch 8 and 16, training at 8, float32, torch.compile's default
mode on all sides.
`python -m runs.bench.report` prints the tables.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from torch import nn

from deit_gka.model.attention import GKA
from deit_gka.model.registry import model_name  # importing it registers the models
from deit_gka.recipe import Recipe
from deit_gka.training.engine import autocast
from deit_gka.training.optim import make_optimizer
from gka import GaussianKernelAttention
from gka.testing import plain_attention
from runs.bench import models
from runs.bench.config import CaseConfig
from runs.bench.device import release_memory
from runs.bench.measurement import Measurement, Plan
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from runs.paper.deit import SIZE_NAMES
from trainkit.cli import Bounds, UserError, run
from trainkit.distributed import setup
from trainkit.progress import progress_bar

BENCHMARK = "deit"
CLASSES, PIXELS = 1000, 224
SEED = 0
RECIPE = Recipe(lr=1e-6)  # the optimiser at work, on weights that stay what they are
INFERENCE, TRAINING = "inference", "training"
UNFUSED = "gka-unfused"
ROLES = models.ROLES | {UNFUSED: "unfused"}
Counts = Annotated[list[int], Bounds(1)]
PLANS = {"cuda": Plan(rounds=100, graph=True), "cpu": Plan(rounds=60, warmup=2, seconds=20)}


@dataclass
class DeitConfig(CaseConfig):
    """Time DeiT with softmax attention and with GKA, fused and unfused: inference and training.

    Appends to RESULTS/bench_deit_<hardware>.jsonl.
    """

    sizes: list[Literal[tuple(SIZE_NAMES)]] = field(default_factory=list)
    """Sizes to time; empty = all on CUDA, ti on a CPU."""
    kinds: list[Literal[(*models.MODEL_KINDS, UNFUSED)]] = field(default_factory=list)
    """Kinds of attention; empty = softmax, softmax-cudnn (CUDA only), gka and gka-unfused, which builds W."""
    batch_sizes: Counts = field(default_factory=list)
    """Batches of inference; empty = 32 64 128 256 512 on CUDA, 8 16 on a CPU."""
    train_batch_sizes: Counts = field(default_factory=list)
    """Batches of the training step; empty = 64 128 on CUDA, 8 on a CPU."""
    phases: list[Literal["inference", "training"]] = field(default_factory=lambda: [INFERENCE, TRAINING])
    """What to time."""
    impl: str = ""
    """Implementation of gaussian_attention in the gka models; empty = the models' own choice."""
    compile_mode: Literal["auto", "off", "default", "max-autotune"] = "auto"
    """Mode of torch.compile; auto = max-autotune on CUDA, default on a CPU. On CUDA the whole step becomes one CUDA
    graph in every mode."""

    def check(self) -> None:
        super().check()
        try:
            GaussianKernelAttention(64, 1, impl=self.impl or "auto")
        except ValueError as error:
            raise UserError(f"--impl: {error}") from None

    def fill(self, device_type: str) -> "DeitConfig":
        """The configuration with the device's defaults in the empty places."""
        cuda = device_type == "cuda"
        inference, training = [8, 16], [8]
        if cuda:
            inference, training = ([128], [64]) if self.quick else ([32, 64, 128, 256, 512], [64, 128])
        return replace(
            self,
            sizes=self.sizes or (["ti"] if self.quick or not cuda else list(SIZE_NAMES)),
            kinds=self.kinds or [*models.default_kinds(cuda), UNFUSED],
            batch_sizes=self.batch_sizes or inference,
            train_batch_sizes=self.train_batch_sizes or training,
            compile_mode=("max-autotune" if cuda else "default") if self.compile_mode == "auto" else self.compile_mode,
        )


class UnfusedGKA(GKA):
    """GKA as one writes it in PyTorch from the paper (section 4.3: N x N intermediates), in autocast's dtypes."""

    def mix(self, x, heads, is_causal):
        if self.impl == "reference":
            return super().mix(x, heads, is_causal)
        return plain_attention(heads, self._log_sigma())


class Candidate:
    """One model in one phase at one batch size. `step(n)` does the work once."""

    def __init__(self, kind: str, size: str, phase: str, batch: int, config: DeitConfig, device: torch.device):
        self.kind, self.size, self.phase, self.device = kind, size, phase, device
        torch.manual_seed(SEED)
        self.model = create(kind, size, config.impl).to(device).train(phase == TRAINING)
        self.network = models.compiled(self.model, kind, config.compile_mode)
        generator = torch.Generator(device).manual_seed(SEED)
        self.images = torch.randn(batch, 3, PIXELS, PIXELS, generator=generator, device=device)
        self.targets = torch.rand(batch, CLASSES, generator=generator, device=device).softmax(-1)
        self.optimizer = make_optimizer(self.model, RECIPE) if phase == TRAINING else None
        if self.optimizer and device.type == "cuda":
            for group in self.optimizer.param_groups:
                group["capturable"] = True
        self.step: Callable[[int], None] = self.train if phase == TRAINING else self.infer

    def infer(self, n: int) -> None:
        with torch.inference_mode(), autocast(self.device, "auto"):
            self.network(self.images)

    def train(self, n: int) -> None:
        loss(self.network, self.images, self.targets, self.device).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gate(self) -> str | None:
        """Why the model is wrong, or None.

        Its first two images are compared with the same weights in float64, for GKA by the literal equations.
        """
        literal = copy.deepcopy(self.model)
        if self.kind != UNFUSED:  # whose own arithmetic is plain PyTorch's
            by_the_equations(literal)
        few = slice(0, min(2, len(self.images)))

        def answer(network, model, images, targets) -> torch.Tensor:
            if self.phase == INFERENCE:
                with (
                    torch.inference_mode(),
                    autocast(self.device, "auto" if images.dtype == torch.float32 else "float32"),
                ):
                    return network(images)[few].double()
            return models.gradient(model, lambda: loss(network, images, targets, self.device))

        # The other images have targets of zero, so the gradient is the mean over the batch of these two alone.
        targets = torch.zeros_like(self.targets)
        targets[few] = self.targets[few]
        got = answer(self.network, self.model, self.images, targets)
        share = 1.0 if self.phase == INFERENCE else len(self.targets[few]) / len(self.targets)
        plain = share * answer(literal, literal, self.images[few], self.targets[few])
        literal = by_the_equations(literal).double()
        want = share * answer(literal, literal, self.images[few].double(), self.targets[few].double())
        return models.model_gate(
            "logits" if self.phase == INFERENCE else "gradient", got, want, plain, half=self.device.type == "cuda"
        )

    def held_mib(self) -> float:
        """What the model holds between steps: weights, optimiser state and the batch."""
        state = (
            [value for values in self.optimizer.state.values() for value in values.values()] if self.optimizer else []
        )
        return models.tensors_mib([*self.model.parameters(), *self.model.buffers(), *state, self.images])


def create(kind: str, size: str, impl: str) -> nn.Module:
    """The paper's model of this kind; softmax is timm's own."""
    name = model_name(SIZE_NAMES[size], {models.HELD: "softmax", UNFUSED: "gka"}.get(kind, kind))
    if kind == UNFUSED:
        return timm.create_model(name, attn_layer=UnfusedGKA)
    return timm.create_model(name, **({"impl": impl} if kind == "gka" and impl else {}))


def by_the_equations(model: nn.Module) -> nn.Module:
    """The model with the reference in its GKA layers; softmax models stay as they are."""
    for block in model.blocks:
        if isinstance(block.attn, GKA):
            block.attn.impl = "reference"
    return model


def loss(network, images, targets, device: torch.device) -> torch.Tensor:
    """As the trainer: the model under autocast, then cross entropy with soft targets."""
    with autocast(device, "auto" if images.dtype == torch.float32 else "float32"):
        return SoftTargetCrossEntropy()(network(images), targets)


def measure(
    size: str, phase: str, batch: int, config: DeitConfig, plan: Plan, device: torch.device
) -> dict[str, Measurement]:
    """One comparison of the kinds."""
    torch._dynamo.reset()  # programs of other batch sizes hold memory
    candidates: dict[str, Candidate] = {}
    failed: dict[str, Measurement] = {}
    for kind in config.kinds:
        try:
            candidates[kind] = Candidate(kind, size, phase, batch, config, device)
        except (ValueError, torch.OutOfMemoryError) as error:
            failed[kind] = Measurement()
            failed[kind].fail(error)
    measured = interleave(
        {kind: c.step for kind, c in candidates.items()}, device, plan, {kind: c.gate for kind, c in candidates.items()}
    )
    models.add_held(measured, candidates)
    return {kind: (failed | measured)[kind] for kind in config.kinds}


def main(config: DeitConfig) -> None:
    config.check()
    device = setup(config.device_type).device
    config = config.fill(device.type)
    batches = {INFERENCE: config.batch_sizes, TRAINING: config.train_batch_sizes}
    cases = [
        (f"deit-{size}-b{batch}", size, phase, batch)
        for size in config.sizes
        for phase in config.phases
        for batch in batches[phase]
    ]
    wanted = config.select(list(dict.fromkeys(name for name, *_ in cases)))
    cases = [case for case in cases if case[0] in wanted]
    recorder, plan = Recorder(config, BENCHMARK, device), PLANS[device.type].adjust(config)
    with progress_bar() as bar:
        task = bar.add_task("deit", total=len(cases), status="")
        for name, size, phase, batch in cases:
            bar.update(task, status=f"{name} {phase}")
            measured = measure(size, phase, batch, config, plan, device)
            settings = {"size": size, "batch": batch, "impl": config.impl, "compile_mode": config.compile_mode}
            settings["dtype"] = "bfloat16" if device.type == "cuda" else "float32"
            recorder.record(name, phase, measured, ROLES, settings, partial(throughput, batch))
            release_memory()
            bar.advance(task)


def throughput(batch: int, name: str, measurement: Measurement) -> dict:
    return {"items_per_second": batch / measurement.median_ms * 1e3 if measurement.median_ms else None}


if __name__ == "__main__":
    run(main, DeitConfig)
