"""What the benchmarks of whole models share: their kinds, twins, compilation, and the gate on logits or gradients."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gka.kinds import KINDS
from gka.testing import disagreement
from runs.bench.program import Recorder, with_dtype
from runs.bench.timing import Measurement

# Logits and gradients pass many layers: in float32 another order of additions may differ by more than twice plain
# PyTorch's error.
FLOAT32_ROUNDINGS = 32
HELD = "softmax-cudnn"  # softmax attention held to cuDNN's kernel; CUDA only
MODEL_KINDS = ("softmax", HELD, *(kind for kind in KINDS if kind != "softmax"))
# What a kind is in a comparison: ratios are of the fastest baseline over ours.
ROLES = dict.fromkeys(KINDS, "other") | {"softmax": "baseline", HELD: "baseline", "gka": "ours"}


EAGER = "eager"


class CandidateKey(NamedTuple):
    """A candidate of a comparison that has every dtype at once."""

    kind: str
    dtype: str
    mode: str = ""  # EAGER beside compiled models

    def name(self, dtype: str) -> str:
        """What it is called among candidates of `dtype`."""
        kind = f"{self.kind} {self.mode}".strip()
        return kind if self.dtype == dtype else f"{kind}, {self.dtype}"


def comparison(measured: Iterable[CandidateKey], dtype: str) -> dict[str, CandidateKey]:
    """Name -> candidate of the comparison in one dtype: all that have it, and softmax attention in float32 too.

    On CPUs torch's attention can be slower in bfloat16 than in float32, and the faster counts.
    """
    return {
        key.name(dtype): key
        for key in measured
        if key.dtype == dtype or (key.dtype == "float32" and key.kind.startswith("softmax"))
    }


def record(
    recorder: Recorder,
    case: str,
    phase: str,
    measured: Mapping[CandidateKey, Measurement],
    roles: Mapping[str, str],
    settings: dict[str, Any],
    extra: Callable[[CandidateKey, Measurement], dict[str, Any]],
) -> None:
    """Write the comparison of the dtype in `settings`. roles: by kind. extra: further metrics of a candidate."""
    keys = comparison(measured, settings["dtype"])
    recorder.record(
        with_dtype(case, settings["dtype"], recorder.device.type),
        phase,
        {name: measured[key] for name, key in keys.items()},
        {name: roles[key.kind] for name, key in keys.items()},
        settings,
        lambda name, measurement: extra(keys[name], measurement),
    )


def default_kinds(cuda: bool) -> list[str]:
    """The kinds that a benchmark times if none is named."""
    return [kind for kind in MODEL_KINDS if ROLES[kind] != "other" and (cuda or kind != HELD)]


def modes(mode: str, device: torch.device) -> dict[str, str]:
    """What names say of it -> mode of torch.compile: the one that is asked for, on a CPU eager models beside it."""
    return {"": mode} | ({EAGER: "off"} if device.type == "cpu" and mode != "off" else {})


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


def twin(model: nn.Module) -> nn.Module:
    """Another model with the same parameters."""
    return copy.deepcopy(model, memo={id(p): p for p in model.parameters()})


def compiled(model: nn.Module, kind: str, mode: str) -> Callable:
    """The model of a kind under torch.compile; "off" leaves it as it is.

    max-autotune is torch's without its CUDA graphs: the benchmark captures the whole step itself, alike for every
    candidate. That also shows how much memory each takes, as torch's own graphs of several models share one pool.
    """
    model = HeldToCudnn(model) if kind == HELD else model
    if mode == "off":
        return model
    # Twins share the compiler's memory of a piece of code, and torch stops at eight programs for one.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(model, mode="max-autotune-no-cudagraphs" if mode == "max-autotune" else mode, dynamic=False)


def gradient(model: nn.Module, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The gradient of all parameters as one float64 vector in main memory, where several have room."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    vector = torch.cat([p.grad.double().flatten().cpu() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return vector


def model_gate(name: str, got: torch.Tensor, want: torch.Tensor, plain: torch.Tensor, half: bool) -> str | None:
    """Why logits or gradients are wrong, or None.

    plain: the same in the candidate's arithmetic, uncompiled and by the literal equations. half: that arithmetic is
    bfloat16.
    """
    floor = torch.finfo(torch.bfloat16).eps if half else FLOAT32_ROUNDINGS * torch.finfo(torch.float32).eps
    return disagreement({name: got}, {name: want}, {name: plain}, {name: floor})


def add_held(measured: Mapping[str, Measurement], candidates: Mapping[str, Any]) -> None:
    """Count what each candidate holds between steps (its `held_mib`) into its peak."""
    for kind, measurement in measured.items():
        if measurement.peak_mib is not None:
            measurement.peak_mib += candidates[kind].held_mib()


def tensors_mib(tensors: Iterable[torch.Tensor]) -> float:
    """Memory of tensors on the accelerator, MiB, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(storages.values()) / 2**20
