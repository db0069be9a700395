"""Time whole vision transformers: DeiT-Ti/S/B with softmax attention and with GKA (the paper's table 4).

    python -m runs.bench.deit                                     every size and batch for the device present
    python -m runs.bench.deit --only deit-ti-b64 deit-ti-b128     one size, two batches
    python -m runs.bench.deit --shapes deit-s-b4 --only "deit-s-b4 training"

Protocol: inference at batch 32 to 512 (the best images/s counts), a training step (forward, backward, AdamW) at 64 and
128, bfloat16 autocast, torch.compile(max-autotune) on both sides, 100 turns after the warm-up, on random images.
Softmax is timm's deit_*_patch16_224 with fused SDPA, as torch chooses its kernel and held to cuDNN's, and on a CPU also
as two matrix products ("softmax-unfused"), which are faster there in bfloat16. "gka-unfused" is GKA as the paper's
implementation has it: distances, W and the mixture as N x N matrices in PyTorch, under the same autocast and compiler.

On a CPU: inference at batch 1, 8 and 16, training at 8, in float32 and under bfloat16 autocast (-bf16), every model
both eager and compiled, block by block (whole models are as fast and take twice as long to compile). The faster counts,
and in bfloat16 that of softmax attention in either dtype. `python -m runs.bench.report` prints the tables.
"""

import copy
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from torch import nn

from deit_gka.accounting import cost_of
from deit_gka.model.attention import GKA
from deit_gka.model.registry import model_name  # importing it registers the models
from deit_gka.recipe import Recipe
from deit_gka.training.engine import autocast
from deit_gka.training.optim import make_optimizer
from gka.testing import plain_attention
from runs.bench import models
from runs.bench.models import TRAINING, Candidate, CandidateKey, ModelConfig
from runs.bench.program import Comparison, time_cases
from runs.bench.timing import Measurement, Plan
from runs.paper.published import SIZE_NAMES
from trainkit_gka import compiling
from trainkit_gka.cli import run
from trainkit_gka.distributed import setup

CLASSES, PIXELS, SEED = 1000, 224, 0
RECIPE = Recipe(lr=0.0)  # the optimiser at work, on weights that stay what they are
INFERENCE = "inference"
UNFUSED = "gka-unfused"
SOFTMAX_UNFUSED = "softmax-unfused"  # timm's attention as products, which its set_fused_attn(False) leads to
ROLES = dict.fromkeys(("softmax", models.HELD, SOFTMAX_UNFUSED), "baseline") | {"gka": "ours", UNFUSED: "unfused"}
# Batches of inference and of training.
BATCHES = {"cuda": ((32, 64, 128, 256, 512), (64, 128)), "cpu": ((1, 8, 16), (8,))}
QUICK_BATCHES = {"cuda": ((128,), (64,)), "cpu": ((8,), (8,))}
MODES = {"cuda": "max-autotune", "cpu": "default"}  # on CUDA the whole step becomes one CUDA graph
PLANS = {"cuda": Plan(rounds=100, graph=True), "cpu": Plan(rounds=40, warmup=1, seconds=12)}


@dataclass
class DeitConfig(ModelConfig):
    """Time DeiT with softmax attention and with GKA, fused and unfused: inference and training.

    Appends to RESULTS/bench_deit_<hardware>.jsonl. A shape is a size and a batch, such as deit-ti-b8.
    """


@dataclass(frozen=True)
class Case:
    """A size of DeiT and a batch of images."""

    name: str
    size: str
    batch: int
    phases: tuple[str, ...] = (INFERENCE, TRAINING)

    @classmethod
    def parse(cls, text: str, device_type: str) -> "Case":
        """Raises ValueError."""
        if not (match := re.fullmatch(rf"deit-({'|'.join(SIZE_NAMES)})-b([1-9]\d*)", text)):
            raise ValueError(f"expected deit-SIZE-bBATCH such as deit-ti-b8, got {text!r}")
        return cls(text, match[1], int(match[2]))


def standard_cases(device_type: str, quick: bool) -> list[Case]:
    """The sizes and batches that the device can do."""
    batches = dict(zip((INFERENCE, TRAINING), (QUICK_BATCHES if quick else BATCHES)[device_type], strict=True))
    return [
        Case(f"deit-{size}-b{batch}", size, batch, (phase,))
        for size in (["ti"] if quick else SIZE_NAMES)
        for phase, sizes in batches.items()
        for batch in sizes
    ]


class UnfusedGKA(GKA):
    """GKA as one writes it in PyTorch from the paper (section 4.3: N x N intermediates), in autocast's dtypes."""

    def mix(self, x, heads, attn_mask, is_causal):
        if self.impl == "reference" or attn_mask is not None:
            return super().mix(x, heads, attn_mask, is_causal)
        return plain_attention(heads, self._log_sigma())


class VisionSubject(models.Subject):
    """A vision model of one kind and random images, of which the first two are judged."""

    def __init__(self, case: Case, phase: str, device: torch.device, kind: str):
        self.device = device
        torch.manual_seed(SEED)
        model = create(kind, case.size).to(device).train(phase == TRAINING)
        generator = torch.Generator(device).manual_seed(SEED)
        images = torch.randn(case.batch, 3, PIXELS, PIXELS, generator=generator, device=device)
        targets = torch.rand(case.batch, CLASSES, generator=generator, device=device).softmax(-1)
        self.shared_optimizer = make_optimizer(model, RECIPE)
        for group in self.shared_optimizer.param_groups:
            group["capturable"] = device.type == "cuda"
        super().__init__(kind, phase, model, images, targets, slice(0, min(2, case.batch)), ignored=0.0)

    def network(self, dtype: str, mode: str):
        """On a CPU, and where asked for, compiled block by block."""
        if mode == "off" or (self.device.type == "cuda" and mode != compiling.BLOCKS):
            return models.compiled(self.model, self.kind, mode), self.model
        twin = compiling.twin(self.model)
        models.compile_blocks(twin.blocks, self.kind)
        return twin, self.model

    def compute(self, network, dtype, inputs, targets=None):
        """As the trainer: the model under autocast, then cross entropy with soft targets, a mean over the images."""
        with autocast(self.device, dtype):
            logits = network(inputs)
            return logits if targets is None else SoftTargetCrossEntropy()(logits, targets)

    def scale(self, inputs):
        return len(inputs) / len(self.targets)

    def optimizer(self, compiled: bool):
        return self.shared_optimizer

    def state(self, optimizer):
        return [value for values in optimizer.state.values() for value in values.values()]

    def literal(self, model, exact):
        """With the reference in GKA layers, but for plain PyTorch of the unfused model, whose arithmetic that is."""
        model = copy.deepcopy(model)
        for block in model.blocks if exact or self.kind != UNFUSED else ():
            if isinstance(block.attn, GKA):
                block.attn.impl = "reference"
        return model


def create(kind: str, size: str) -> nn.Module:
    """The paper's model of this kind; softmax is timm's own."""
    softmax = model_name(SIZE_NAMES[size], "softmax")
    if kind == UNFUSED:
        return timm.create_model(softmax, attn_layer=UnfusedGKA)
    if kind == "gka":
        return timm.create_model(model_name(SIZE_NAMES[size], kind))
    model = timm.create_model(softmax)
    for block in model.blocks if kind == SOFTMAX_UNFUSED else ():
        block.attn.fused_attn = False
    return model


@functools.cache
def flops_per_image(kind: str, size: str) -> int:
    """What the cost model counts for one image's forward pass."""
    with torch.device("meta"):
        return cost_of(create(kind, size)).flops


def takes_part(key: CandidateKey, case: Case, device: torch.device) -> bool:
    """Products are for CPUs, where the unfused GKA shows in one place what fusion is worth."""
    if device.type == "cuda":
        return key.kind != SOFTMAX_UNFUSED
    return key.kind != UNFUSED or ((case.size, case.batch) == ("ti", 8) and key.mode != models.EAGER)


def measure(
    config: DeitConfig, mode: str, plan: Plan, device: torch.device, case: Case, phase: str
) -> Iterator[Comparison]:
    """A comparison in each dtype, all timed in turns."""
    keys = [key for key in models.keys_of(ROLES, config, mode, device) if takes_part(key, case, device)]
    keys = [key for key in keys if key.kind != UNFUSED or key.dtype == keys[0].dtype]
    measured, _ = models.measure(keys, partial(VisionSubject, case, phase, device), Candidate, mode, device, plan)

    def rates(key: CandidateKey, measurement: Measurement) -> dict[str, float | None]:
        speed = case.batch / measurement.median_ms * 1e3 if measurement.median_ms else None
        return {"items_per_second": speed, "flops_per_image": flops_per_image(key.kind, case.size)}

    settings = {"size": case.size, "batch": case.batch, "impl": "", "compile_mode": mode}
    return models.comparisons(measured, ROLES, settings, rates)


def main(config: DeitConfig) -> None:
    runtime = setup(config.device_type)
    device = runtime.device
    chosen = config.choose(Case.parse, standard_cases, device.type)
    mode = config.mode(MODES[device.type], runtime)
    time_cases(
        "deit", config, chosen, device, partial(measure, config, mode, config.adjust(PLANS[device.type]), device)
    )


if __name__ == "__main__":
    run(main, DeitConfig)
