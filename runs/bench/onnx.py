"""Time DeiT-Ti and DeiT-S as ONNX in onnxruntime on the CPU: softmax attention and GKA, float32 and int8.

    python -m runs.bench.onnx                                  every size, batch and number of threads
    python -m runs.bench.onnx --only onnx-ti-b1 --models out/onnx     one case; the ONNX files are kept there

It is a part of `make bench`; where onnxruntime is not installed it says so in one line and times nothing. Both sides
are written by the exporter that users have (deit_gka.export --onnx), in as few operations as their attention takes.
"softmax-fused" is the same with onnxruntime's own attention operator (MultiHeadAttention) in place of products and
softmax: the quicker of the two is the baseline. Random weights and images; the logits are checked first.
--runtime openvino, which needs pip install openvino, times the two other files in float32.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import timm
import torch
from torch import nn

from deit_gka.model import onnx as vision
from deit_gka.model import plain
from deit_gka.model.registry import model_name  # importing it registers the models
from runs.bench.config import CaseConfig
from runs.bench.measurement import Measurement, Plan
from runs.bench.models import ROLES as KIND_ROLES
from runs.bench.models import model_gate
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from runs.paper.deit import SIZE_NAMES
from trainkit_gka import onnx
from trainkit_gka.cli import Bounds, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import console, progress_bar

BENCHMARK = "onnx"
PIXELS = 224
SEED = 0
FUSED, OPENVINO = "softmax-fused", "openvino"
ROLES = KIND_ROLES | {FUSED: "baseline"}
FILES = {"float32": onnx.MODEL, "int8": onnx.INT8_MODEL}
LARGEST_INT8_ERROR = 0.05  # relative, of the logits
SIZES, BATCH_SIZES, THREADS = ("ti", "s"), (1, 8), (1, 2)  # what the targets are about
PLAN = Plan(rounds=60, warmup=2, seconds=12)
Counts = Annotated[list[int], Bounds(1)]
Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class OnnxConfig(CaseConfig):
    """Time DeiT with softmax attention and with GKA in onnxruntime, on the CPU whatever --device-type says.

    Appends to RESULTS/bench_onnx_<hardware>.jsonl.
    """

    sizes: list[Literal[tuple(SIZE_NAMES)]] = field(default_factory=list)
    """Sizes to time; empty = ti and s, ti alone with --quick."""
    batch_sizes: Counts = field(default_factory=list)
    """Images in a call; empty = 1 and 8, 1 alone with --quick."""
    threads: Counts = field(default_factory=lambda: list(THREADS))
    """Threads of onnxruntime."""
    dtypes: list[Literal["float32", "int8"]] = field(default_factory=list)
    """Of the matrices; int8 has activations rounded as they come. Empty = both, float32 alone in OpenVINO."""
    runtime: Literal["onnxruntime", "openvino"] = "onnxruntime"
    """What runs the files."""
    models: Path | None = None
    """A folder to keep the ONNX files in and to take them from; empty = write them anew."""

    def fill(self) -> "OnnxConfig":
        """The configuration with the defaults in the empty places."""
        sizes, batch_sizes = (SIZES[:1], BATCH_SIZES[:1]) if self.quick else (SIZES, BATCH_SIZES)
        dtypes = self.dtypes or (["float32"] if self.runtime == OPENVINO else list(FILES))
        sizes, batch_sizes = self.sizes or list(sizes), self.batch_sizes or list(batch_sizes)
        return replace(self, sizes=sizes, batch_sizes=batch_sizes, dtypes=dtypes)


class FusedSoftmax(plain.PlainSoftmax):
    """The plain form with onnxruntime's operator in its middle."""

    def forward(self, x: torch.Tensor, attn_mask: None = None, is_causal: bool = False) -> torch.Tensor:
        operator, attributes = "com.microsoft::MultiHeadAttention", {"num_heads": self.num_heads, "scale": 1.0}
        inputs = self.q(x), self.k(x), self.v(x)
        y = torch.onnx.ops.symbolic(operator, inputs, attributes, dtype=x.dtype, shape=x.shape, version=1)
        return self.proj(y.flatten(0, 1)).unflatten(0, (-1, x.shape[1]))


class Written:
    """A model of one kind and size, and its ONNX files."""

    def __init__(self, kind: str, size: str, folder: Path):
        torch.manual_seed(SEED)
        self.model: nn.Module = timm.create_model(model_name(SIZE_NAMES[size], "gka" if kind == "gka" else "softmax"))
        self.model.eval()
        self.folder = folder / f"{size}-{kind}"
        if all((self.folder / name).exists() for name in FILES.values()):
            return
        usual, plain.FORMS["softmax"] = plain.FORMS["softmax"], FusedSoftmax if kind == FUSED else plain.PlainSoftmax
        try:
            vision.write(self.model, self.folder, {"input_size": (3, PIXELS, PIXELS)}, int8=True)
        finally:
            plain.FORMS["softmax"] = usual

    def gate(self, call: Call, images: torch.Tensor, dtype: str) -> str | None:
        """Why the logits are wrong, or None: float32 by the models' error budget, int8 by LARGEST_INT8_ERROR."""
        few = images[:2]
        with torch.inference_mode():
            expected, torchs = self.model.double()(few.double()), self.model.float()(few)
        given = call(few).double()
        if dtype == "float32":
            return model_gate("logits", given, expected, torchs, half=False)
        error = ((given - expected).norm() / expected.norm()).item()
        return None if error < LARGEST_INT8_ERROR else f"logits are off by {error:.2f}, relative"


def loaded(path: Path, threads: int, runtime: str) -> Call:
    """The model of a file in a runtime: images to logits."""
    if runtime == OPENVINO:
        import openvino

        options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        model = openvino.Core().compile_model(str(path), "CPU", options)
        return lambda images: torch.from_numpy(model(images.numpy())[0])
    session = onnx.session(path, threads)
    return lambda images: onnx.run(session, images)[0]


def compare(
    written: dict[str, Written], batch: int, threads: int, dtype: str, plan: Plan, runtime: str
) -> dict[str, Measurement]:
    """One comparison of the kinds."""
    images = torch.randn(batch, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(SEED))
    models = {kind: loaded(one.folder / FILES[dtype], threads, runtime) for kind, one in written.items()}
    calls = {kind: (lambda n, model=model: model(images)) for kind, model in models.items()}
    gates = {kind: partial(one.gate, models[kind], images, dtype) for kind, one in written.items()}
    return interleave(calls, torch.device("cpu"), plan, gates)


def main(config: OnnxConfig) -> None:
    config.check()
    missing = onnx.missing()
    if config.runtime == OPENVINO and find_spec(OPENVINO) is None:
        missing = "openvino is not installed: run pip install openvino"
    if missing:
        console.print(f"nothing is timed: {missing}", highlight=False, markup=False)
        return
    device, config = setup("cpu").device, config.fill()
    cases = {
        case_name(size, batch, threads, config.runtime): (size, batch, threads)
        for size in config.sizes
        for batch in config.batch_sizes
        for threads in config.threads
    }
    wanted = config.select(list(cases))
    kinds = ("softmax", "gka") if config.runtime == OPENVINO else ("softmax", FUSED, "gka")
    recorder, plan = Recorder(config, BENCHMARK, device), PLAN.adjust(config)
    with tempfile.TemporaryDirectory() as temporary, progress_bar() as bar:
        task = bar.add_task("onnx", total=len(wanted) * len(config.dtypes), status="")
        written: dict[str, dict[str, Written]] = {}
        for name in wanted:
            size, batch, threads = cases[name]
            bar.update(task, status=f"{name}")
            if size not in written:
                folder = config.models or Path(temporary)
                written[size] = {kind: Written(kind, size, folder) for kind in kinds}
            for dtype in config.dtypes:
                measured = compare(written[size], batch, threads, dtype, plan, config.runtime)
                settings = {"size": size, "batch": batch, "threads": threads, "dtype": dtype}
                settings["runtime"] = f"{config.runtime} {version(config.runtime)}"
                recorder.record(name, phase_name(dtype), measured, ROLES, settings, partial(throughput, batch))
                bar.advance(task)


def case_name(size: str, batch: int, threads: int, runtime: str = "onnxruntime") -> str:
    return f"{OPENVINO if runtime == OPENVINO else BENCHMARK}-{size}-b{batch}-t{threads}"


def phase_name(dtype: str) -> str:
    return f"inference {dtype}"


def throughput(batch: int, name: str, measurement: Measurement) -> dict:
    return {"items_per_second": batch / measurement.median_ms * 1e3 if measurement.median_ms else None}


if __name__ == "__main__":
    run(main, OnnxConfig)
