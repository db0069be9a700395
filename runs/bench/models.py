"""What the benchmarks of whole models share: subjects and candidates, compilation, the gate on logits or gradients."""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka.testing import disagreement
from runs.bench.program import Comparison, ComparisonConfig
from runs.bench.timing import Measurement, Plan, interleave
from trainkit_gka import compiling
from trainkit_gka.distributed import Runtime

# Logits and gradients pass many layers: in float32 another order of additions may differ by more than twice plain
# PyTorch's error.
FLOAT32_ROUNDINGS = 32
TRAINING = "training"
HELD = "softmax-cudnn"  # softmax attention held to cuDNN's kernel; CUDA only
EAGER = "eager"
MOST_JUDGED = 2**26  # numbers of a gradient


@dataclass
class ModelConfig(ComparisonConfig):
    """The flags of a benchmark of whole models."""

    compile: Literal["auto", "on", "blocks", "off"] = "auto"
    """Whether to use torch.compile; auto = on, but off with --quick on a CPU. On a CPU eager models take part too.
    blocks: the blocks one by one, as DeiT's always are on a CPU; it takes seconds where whole models take minutes."""

    def mode(self, usual: str, runtime: Runtime) -> str:
        """The mode of torch.compile: `usual`, "blocks" or "off". Raises UserError if it is asked for and fails here."""
        automatic = "off" if self.quick and runtime.device.type == "cpu" else "on"
        chosen = compiling.mode("--compile", self.compile, automatic, runtime)
        return usual if chosen == "on" else chosen


class CandidateKey(NamedTuple):
    """A candidate of a comparison that has every dtype at once."""

    kind: str
    dtype: str
    mode: str = ""  # EAGER beside compiled models

    def name(self, dtype: str) -> str:
        """What it is called among candidates of `dtype`."""
        kind = f"{self.kind} {self.mode}".strip()
        return kind if self.dtype == dtype else f"{kind}, {self.dtype}"


def keys_of(kinds: Iterable[str], config: ComparisonConfig, mode: str, device: torch.device) -> list[CandidateKey]:
    """Every kind in every dtype; on a CPU eager models beside compiled ones. softmax-cudnn is for CUDA alone."""
    modes = ["", EAGER] if device.type == "cpu" and mode != "off" else [""]
    kinds = [kind for kind in kinds if kind != HELD or device.type == "cuda"]
    keys = itertools.product(kinds, config.dtypes_on(device.type), modes)
    return [key for key in itertools.starmap(CandidateKey, keys) if not config.skips(key.name(key.dtype))]


class Subject:
    """The weights and the batch that the candidates of one kind share, and what they must compute.

    judged: index of the part of the batch that the gate compares with float64; the targets of the rest are `ignored`.
    A subclass has network(dtype, mode), the model in a mode of torch.compile and its module before that;
    compute(network, dtype, inputs, targets), the loss or, without targets, logits; optimizer(compiled), at a rate of 0,
    so that weights stay what they are; and state(optimizer), its tensors.
    """

    def __init__(self, kind: str, phase: str, model: nn.Module, inputs, targets, judged, ignored: float):
        self.kind, self.phase, self.model, self.judged = kind, phase, model, judged
        self.inputs, self.targets = inputs, targets
        self.few_targets = torch.full_like(targets, ignored)
        self.few_targets[judged] = targets[judged]

    def literal(self, model: nn.Module, exact: bool) -> nn.Module:
        """The model, or a copy by the equations. exact: for float64; else in plain PyTorch's arithmetic."""
        return model

    def scale(self, inputs: torch.Tensor) -> float:
        """Of the loss of these inputs, so that the gradient is that of the batch with `few_targets`."""
        return 1.0

    @functools.cached_property
    def exact(self) -> torch.Tensor:
        """What is judged, in float64 and by the equations; computed once for all candidates."""
        model = copy.deepcopy(self.literal(self.model, exact=True)).double()
        few = (t[self.judged] for t in (self.inputs, self.targets))
        return self.answer(model, model, "float32", *(t.double() if t.is_floating_point() else t for t in few))

    def answer(self, network: Callable, model: nn.Module, dtype: str, inputs, targets) -> torch.Tensor:
        """The gradient of all parameters of `model`, or logits, of a network, in float64."""
        if self.phase == TRAINING:
            return gradient(model, lambda: self.scale(inputs) * self.compute(network, dtype, inputs, targets))
        with torch.inference_mode():
            return self.compute(network, dtype, inputs)[self.judged].double()


class Candidate:
    """A subject in one dtype, in a mode of torch.compile or "off". `step(n)` is the work that is timed."""

    def __init__(self, subject: Subject, dtype: str, mode: str = "off"):
        self.subject, self.dtype = subject, dtype
        self.network, self.model = subject.network(dtype, mode)
        self.optimizer = subject.optimizer(mode != "off") if subject.phase == TRAINING else None
        self.step: Callable[[int], Any] = self.train if subject.phase == TRAINING else self.infer

    def infer(self, n: int) -> None:
        with torch.inference_mode():
            self.subject.compute(self.network, self.dtype, self.subject.inputs)

    def train(self, n: int) -> None:
        self.subject.compute(self.network, self.dtype, self.subject.inputs, self.subject.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gate(self) -> str | None:
        """Why the model is wrong, or None: the judged part of the batch is compared with the same weights in float64.

        The rest of the batch, without targets, has no gradient.
        """
        subject = self.subject
        got = subject.answer(self.network, self.model, self.dtype, subject.inputs, subject.few_targets)
        literal = subject.literal(self.model, exact=False)
        few = subject.inputs[subject.judged], subject.targets[subject.judged]
        return self.compare(got, subject.exact, subject.answer(literal, literal, self.dtype, *few))

    def compare(self, got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> str | None:
        """Why logits or gradients are wrong, or None. plain: in this dtype, uncompiled and by the equations."""
        half = self.dtype == "bfloat16"
        floor = torch.finfo(torch.bfloat16).eps if half else FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps
        name = "gradient" if self.subject.phase == TRAINING else "logits"
        return disagreement({name: got}, {name: exact}, {name: plain}, {name: floor})

    def held_mib(self) -> float:
        """MiB on the accelerator between steps: weights, optimiser state and the batch, each storage once."""
        state = self.subject.state(self.optimizer) if self.optimizer else ()
        held = [*self.model.parameters(), *self.model.buffers(), *state, self.subject.inputs, self.subject.targets]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t.is_cuda}
        return sum(storages.values()) / 2**20


def measure(
    keys: list[CandidateKey], build: Callable[[str], Subject], candidate: type[Candidate], mode: str,
    device: torch.device, plan: Plan,
) -> tuple[dict[CandidateKey, Measurement], dict[CandidateKey, Candidate]]:  # fmt: skip
    """Time all kinds in all dtypes in turns. build: the subject of a kind. Returns candidates that could be built."""
    torch._dynamo.reset()  # programs of other cases hold memory
    candidates: dict[CandidateKey, Candidate] = {}
    failed: dict[CandidateKey, Measurement] = {}
    for kind, of_kind in itertools.groupby(keys, lambda key: key.kind):
        group = list(of_kind)
        try:
            subject = build(kind)
            candidates |= {key: candidate(subject, key.dtype, "off" if key.mode == EAGER else mode) for key in group}
        except (ValueError, torch.OutOfMemoryError) as error:
            failed |= {key: Measurement().fail(error) for key in group}
    steps, gates = ({key: getattr(c, name) for key, c in candidates.items()} for name in ("step", "gate"))
    timed = interleave(steps, device, plan, gates)
    for key, measurement in timed.items():
        if measurement.peak_mib is not None:
            measurement.peak_mib += candidates[key].held_mib()
    return failed | timed, candidates


def comparisons(
    measured: Mapping[CandidateKey, Measurement], roles: Mapping[str, str], settings: dict[str, Any],
    metrics: Callable[[CandidateKey, Measurement], dict[str, Any]],
) -> Iterator[Comparison]:  # fmt: skip
    """A comparison for each dtype: all candidates that have it, and softmax attention in float32 too.

    On CPUs torch's attention can be slower in bfloat16 than in float32, and the faster counts. roles: by kind.
    """
    for dtype in dict.fromkeys(key.dtype for key in measured):
        keys = {
            key.name(dtype): key
            for key in measured
            if key.dtype == dtype or (key.dtype == "float32" and key.kind.startswith("softmax"))
        }
        yield Comparison(
            {**settings, "dtype": dtype},
            {name: measured[key] for name, key in keys.items()},
            {name: roles[key.kind] for name, key in keys.items()},
            {name: metrics(key, measured[key]) for name, key in keys.items()},
        )


class HeldToCudnn(nn.Module):
    """A model whose softmax attention is held to cuDNN's.

    The kernel is chosen in `forward`: else torch.compile would share one program with the model that is not held.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *arguments, **options):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.model(*arguments, **options)


def compiled(model: nn.Module, kind: str, mode: str) -> Callable:
    """The model of a kind under torch.compile; "off" leaves it as it is.

    max-autotune is torch's without its CUDA graphs: the benchmark captures the whole step itself, alike for every
    candidate. That also shows how much memory each takes, as torch's own graphs of several models share one pool.
    """
    model = HeldToCudnn(model) if kind == HELD else model
    if mode == "off":
        return model
    compiling.allow_many_programs()
    return torch.compile(model, mode="max-autotune-no-cudagraphs" if mode == "max-autotune" else mode, dynamic=False)


def compile_blocks(blocks: nn.ModuleList | nn.Sequential, kind: str) -> None:
    """Compile the blocks of a model of this kind in place, each by itself."""
    for place, block in enumerate(blocks) if kind == HELD else ():
        blocks[place] = HeldToCudnn(block)
    compiling.compile_blocks(blocks)


def gradient(model: nn.Module, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The gradient of all parameters as one float64 vector in main memory, where several have room.

    Of a large model's numbers every n-th, MOST_JUDGED at most: copying all from a GPU would take longer than the
    timing.
    """
    model.zero_grad(set_to_none=True)
    loss().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    step = math.ceil(sum(map(torch.numel, grads)) / MOST_JUDGED) | 1  # odd, or it would meet few columns of a matrix
    vector = torch.cat([grad[::step].double().cpu() for grad in grads])
    model.zero_grad(set_to_none=True)
    return vector
