"""The vision transformers that runs/bench/deit.py times, and the gate that each must pass first."""

import copy
import functools
from collections.abc import Callable

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from torch import nn

from deit_gka.model.attention import GKA
from deit_gka.model.registry import model_name  # importing it registers the models
from deit_gka.recipe import Recipe
from deit_gka.training.engine import autocast
from deit_gka.training.optim import make_optimizer
from gka.testing import plain_attention
from runs.bench import models
from runs.paper.deit import SIZE_NAMES

CLASSES, PIXELS = 1000, 224
SEED = 0
RECIPE = Recipe(lr=0.0)  # the optimiser at work, on weights that stay what they are
INFERENCE, TRAINING = "inference", "training"
UNFUSED = "gka-unfused"
SOFTMAX_UNFUSED = "softmax-unfused"  # timm's attention as products, which its set_fused_attn(False) leads to


class UnfusedGKA(GKA):
    """GKA as one writes it in PyTorch from the paper (section 4.3: N x N intermediates), in autocast's dtypes."""

    def mix(self, x, heads, attn_mask, is_causal):
        if self.impl == "reference" or attn_mask is not None:
            return super().mix(x, heads, attn_mask, is_causal)
        return plain_attention(heads, self._log_sigma())


class Subject:
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


class Candidate:
    """A subject's model in one dtype, compiled or not. `step(n)` does the work once."""

    def __init__(self, subject: Subject, dtype: str, compile_mode: str):
        self.subject, self.dtype, self.compile_mode = subject, dtype, compile_mode
        self.network = compiled(subject, compile_mode)
        self.step: Callable[[int], None] = self.train if subject.phase == TRAINING else self.infer

    def infer(self, n: int) -> None:
        with torch.inference_mode(), autocast(self.subject.device, self.dtype):
            self.network(self.subject.images)

    def train(self, n: int) -> None:
        subject = self.subject
        loss(self.network, subject.images, subject.targets, subject.device, self.dtype).backward()
        subject.optimizer.step()
        subject.optimizer.zero_grad(set_to_none=True)

    def gate(self) -> str | None:
        """Why the model is wrong, or None.

        Its first two images are compared with the same weights in float64, for GKA by the literal equations.
        """
        subject = self.subject
        literal = copy.deepcopy(subject.model)
        if subject.kind != UNFUSED:  # whose own arithmetic is plain PyTorch's
            by_the_equations(literal)
        few_images, few_targets = subject.images[subject.judged], subject.targets[subject.judged]
        got = subject.answer(self.network, subject.model, self.dtype, subject.images, subject.few_targets)
        plain = subject.answer(literal, literal, self.dtype, few_images, few_targets)
        name = "logits" if subject.phase == INFERENCE else "gradient"
        return models.model_gate(name, got, subject.exact, plain, half=self.dtype == "bfloat16")

    def held_mib(self) -> float:
        """What the model holds between steps: weights, optimiser state and the batch."""
        model, optimizer = self.subject.model, self.subject.optimizer
        state = [value for values in optimizer.state.values() for value in values.values()] if optimizer else []
        return models.tensors_mib([*model.parameters(), *model.buffers(), *state, self.subject.images])


def compiled(subject: Subject, mode: str):
    """The subject's network under torch.compile. On a CPU block by block: one program serves all blocks."""
    if mode == "off" or subject.device.type == "cuda":
        return models.compiled(subject.model, subject.kind, mode)
    torch._dynamo.config.recompile_limit = 64  # kinds and dtypes share a block's code
    twin = models.twin(subject.model)
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
