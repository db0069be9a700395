"""ONNX files: written by torch's exporter, quantised and run by onnxruntime. Everything here needs the extra `onnx`."""

import json
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainkit_gka import extras
from trainkit_gka.cli import UserError
from trainkit_gka.files import atomic

NEEDED = ("onnx", "onnxscript", "onnxruntime")
OPSET = 20  # the first with a GELU; every current runtime reads it
LARGEST_FILE = 1_900_000_000  # bytes of weights: protobuf ends at 2 GiB; beyond, they lie in PATH.data
MODEL, INT8_MODEL = "model.onnx", "model-int8.onnx"
FILES = (MODEL, f"{MODEL}.data", INT8_MODEL)  # of an exported folder
LARGEST_ERROR = 1e-3  # relative, of logits in float32
BROKEN_INT8_ERROR = 0.5  # rounding to eight bits costs a few hundredths; only a broken file reaches a half


def missing() -> str:
    """One line that names the packages that are not installed, and how to install them; empty if none is missing."""
    return extras.missing("onnx", *NEEDED)


def require() -> None:
    """Raises UserError, naming the extra, if a package is missing."""
    if reason := missing():
        raise UserError(reason)


@contextmanager
def _errors_only() -> Iterator[None]:
    """Let loggers write errors alone."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def write(
    model: nn.Module,
    inputs: tuple[Any, ...],
    path: Path,
    names: tuple[list[str], list[str]],
    dynamic_shapes: tuple[Any, ...],
    about: dict[str, Any],
) -> None:
    """Write `model`, as traced on `inputs`, to `path`; weights of almost 2 GB and more to `path`.data beside it.

    names: of the inputs and of the outputs. dynamic_shapes: as in torch.export. about: facts about the model, stored as
    JSON texts in the file's metadata.
    """
    require()
    with _errors_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about its code
        program = torch.onnx.export(
            model, inputs, dynamo=True, opset_version=OPSET, input_names=names[0], output_names=names[1],
            dynamic_shapes=dynamic_shapes, verbose=False,
        )  # fmt: skip
    program.model.metadata_props.update({key: json.dumps(value) for key, value in about.items()})
    for node in program.model.graph:  # their source lines, longer than the graph itself
        node.metadata_props.clear()
    path.parent.mkdir(parents=True, exist_ok=True)
    if sum(tensor.nbytes for tensor in model.state_dict().values()) > LARGEST_FILE:
        program.save(str(path), external_data=True)  # two files that name each other: no renaming afterwards
        return
    with atomic(path) as temporary:
        program.save(str(temporary), external_data=False)


def quantise(path: Path, out: Path) -> None:
    """Write the model at `path` with matrices in int8, one scale per column, and activations quantised at run time.

    Products of two activations, such as attention's, stay float32.
    """
    require()
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(path))
    del model.graph.value_info[:]  # the exporter's shapes contradict those of the quantised graph
    options = {"DefaultTensorType": onnx.TensorProto.FLOAT}  # the output type of operators beyond the standard
    with _errors_only(), atomic(out) as temporary:  # it warns about a preparation that the exporter has made
        quantize_dynamic(model, str(temporary), per_channel=True, weight_type=QuantType.QInt8, extra_options=options)


def session(path: Path):
    """An onnxruntime session on the CPU."""
    require()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(session, *inputs: torch.Tensor | np.ndarray) -> list[torch.Tensor]:
    """All outputs of a session for its inputs in order."""
    feed = {node.name: np.asarray(value) for node, value in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def check(path: Path, expected: torch.Tensor, *inputs: torch.Tensor) -> float:
    """The relative error of the file's first output for `inputs` against `expected`, the model's output.

    Raises UserError if it is LARGEST_ERROR or more, BROKEN_INT8_ERROR for INT8_MODEL; the file is deleted then.
    """
    largest = BROKEN_INT8_ERROR if path.name == INT8_MODEL else LARGEST_ERROR
    try:
        output = run(session(path), *inputs)[0]
        error = ((output - expected).norm() / expected.norm()).item()
        if not error < largest:
            raise UserError(f"{path} differed from the model by {error:.1e}, relative, and was deleted")
    except BaseException:
        for written in (path, path.with_name(f"{path.name}.data")):
            written.unlink(missing_ok=True)
        raise
    return error


def size_mb(paths: Iterable[Path]) -> str:
    """The sizes of files in words."""
    return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in paths)
