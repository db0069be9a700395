"""A GPU that is not there: tensors on "cuda:0" whose numbers are on the CPU, and whose computations are done there.

They say of themselves that they are on the GPU, so that every `if device.type == "cuda"` takes that branch. As on a
GPU, an operation on tensors of both devices is an error, autocast keeps torch's CUDA lists, and what the CPU reads of
a copy that it does not wait for is one too. Unlike torch's fake tensors they have values and gradients: torch's
autograd engine refuses fake CUDA tensors where there is no driver. FlexAttention is computed densely, Triton's kernels
by its interpreter; nothing is compiled. What kernels do on a real device remains for `make test-gpu`.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import interpreter
from gka.impl import flex
from gka.impl.triton import configs, op

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
# CPU and GPU meet in copies, and where the CPU's tensor is a number.
CROSSING = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
# The places of results in the features' dtype.
ROUNDED = {torch.ops.gka.attend.default: (0,), torch.ops.gka.attend_backward.default: (0, 2, 3)}
# Of torch's CUDA autocast: the operations of our models that it computes in float32 and its CPU twin does not.
FLOAT32 = {F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.kl_div, F.mse_loss}
FLOAT32 |= {F.binary_cross_entropy_with_logits, torch.softmax, torch.log_softmax, torch.sum, torch.exp, torch.pow}
FLOAT32 |= {getattr(torch.Tensor, name) for name in ("softmax", "log_softmax", "sum", "exp", "pow", "norm", "cumsum")}


class OnGPU(torch.Tensor):
    """A tensor on the GPU: a wrapper of `here`, its values on the CPU."""

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    leaving = False  # whether `.cpu()` is at work
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: torch.Tensor):
        layout = dict(strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device=CPU)
        with torch.inference_mode(False):  # a view of a parameter is not an inference tensor
            self = torch.Tensor._make_wrapper_subclass(cls, here.shape, **layout)
        self.here = here
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})

    def __repr__(self):
        return f"OnGPU({self.here})"

    def tolist(self):
        return self.here.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    __array__ = numpy


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


def _compute(func, args, kwargs):
    """Compute on the CPU; results are on the device that torch would put them on."""
    there, here = [], []

    def look(t):
        (there if isinstance(t, OnGPU) else here).append(t)
        return t.here if isinstance(t, OnGPU) else t

    device, on_cpu = kwargs.get("device"), tree_map_only(torch.Tensor, look, (args, kwargs))
    if there and func not in CROSSING and any(t.dim() and t.device == CPU for t in here):
        raise RuntimeError(f"{func} of tensors on cuda:0 {[*map(tuple, map(torch.Tensor.size, there))]} and on the CPU")
    if func is aten.copy_.default:
        to_gpu = isinstance(args[0], OnGPU)
    elif there:  # torch's C++ takes them for the CPU's, and says so where it means the argument's device
        to_gpu = not OnGPU.leaving and (device is None or device.type != "meta")
    else:
        to_gpu = device is not None and device.type == "cuda"
    args, kwargs = on_cpu
    changed = {"device": CPU} if device is not None and to_gpu else {}
    kwargs = {**kwargs, **changed, **({"pin_memory": False} if "pin_memory" in kwargs else {})}
    same = {id(t.here): t for t in there}  # in-place operations return their argument

    def place(t):
        return same[id(t)] if id(t) in same else OnGPU(t)

    result = _interpreted(func, args) if func in ROUNDED else func(*args, **kwargs)
    return tree_map_only(torch.Tensor, place, result) if to_gpu else result


def _interpreted(func, args):
    """A Triton kernel on float32, its results rounded: the interpreter gets products of bfloat16 wrong."""
    dtype = next(arg.dtype for arg in args if arg is not None)
    results = func(*tree_map_only(torch.Tensor, torch.Tensor.float, args))
    return type(results)(t.to(dtype) if at in ROUNDED[func] else t for at, t in enumerate(results))


def _indexed(value):
    """cuda means cuda:0; torch would ask the driver."""
    return GPU if value == "cuda" or (isinstance(value, torch.device) and value.type == "cuda") else value


MOVES = {torch.Tensor.to: None, torch.Tensor.cuda: GPU, torch.Tensor.cpu: CPU}


def _moved(t, *args, copy=False, **kwargs):
    """`t.to(...)`. torch's C++ takes both devices for the CPU and would leave the tensor where it is."""
    if args and isinstance(args[0], torch.Tensor):
        return _moved(t, args[0].device, args[0].dtype, *args[1:], copy=copy, **kwargs)
    args = [_indexed(arg) for arg in args]
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype = device or t.device, dtype or t.dtype
    if not copy and (device, dtype) == (t.device, t.dtype):
        return t
    OnGPU.leaving = isinstance(t, OnGPU) and device == CPU
    try:
        if OnGPU.leaving and non_blocking:
            raise RuntimeError("the CPU may read this copy before the GPU has made it")
        return aten._to_copy.default(t, device=device, dtype=dtype)
    finally:
        OnGPU.leaving = False


class _Calls(TorchFunctionMode):
    """What torch's C++ does before its operations are called: devices by name, lists to tensors, pinning, autocast."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _indexed(kwargs["device"])
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == GPU:
            return func(*args, **{**kwargs, "device": CPU}).to(GPU)
        if func in MOVES:
            return _moved(*args, **({"device": MOVES[func]} if MOVES[func] else {}), **kwargs)
        elif func is torch.Tensor.pin_memory:
            assert args[0].device == CPU, "only CPU tensors can be pinned"
            return args[0].clone()
        elif func in FLOAT32 and torch.is_autocast_enabled("cuda"):
            args, kwargs = tree_map_only(OnGPU, lambda t: t.float() if t.is_floating_point() else t, (args, kwargs))
        return func(*args, **kwargs)


class _Generator(torch.Generator):
    def __new__(cls, device=CPU):
        return super().__new__(cls)


class _Autocast(contextlib.ExitStack):
    """Autocast of a GPU's tensors, which torch's C++ takes for the CPU's."""

    def __init__(self, device_type, *args, **kwargs):
        super().__init__()
        self.both = [real_autocast(kind, *args, **kwargs) for kind in {device_type, "cpu"}]

    def __enter__(self):
        for context in self.both:
            self.enter_context(context)


real_autocast = torch.autocast


def _dense_flex(q, k, v, score_mod=None, block_mask=None, scale=1.0, kernel_options=None):
    """What FlexAttention computes, (B, H, T, D)."""
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    axes = [[-1 if axis == kept_axis else 1 for axis in range(4)] for kept_axis in range(4)]
    index = [torch.arange(length, device=q.device).view(axis) for length, axis in zip(shape, axes, strict=True)]
    scores = (q.float() @ k.float().mT) * scale
    if score_mod is not None:
        scores = score_mod(scores, *index)
    scores = scores.masked_fill(~block_mask.mask_mod(*index), torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1).to(v.dtype) @ v


@contextlib.contextmanager
def pretended(monkeypatch, capability=(9, 0)):
    """Within the context there is one GPU, an H100 unless `capability` says otherwise."""
    about = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132, L2_cache_size=50 * 2**20)
    answers = dict(
        is_available=True, device_count=1, current_device=0, set_device=None, synchronize=None, empty_cache=None,
        _lazy_init=None, max_memory_allocated=2**20, get_device_name="NVIDIA H100 80GB HBM3",
        get_device_properties=about, get_device_capability=capability, is_bf16_supported=True
    )  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):  # by version
        monkeypatch.setattr(torch.optim.Optimizer, name, lambda self: None, raising=False)
    monkeypatch.setattr(torch, "autocast", _Autocast)
    monkeypatch.setattr(torch, "Generator", _Generator)
    monkeypatch.setattr(flex, "_compiled", lambda: _dense_flex)
    monkeypatch.setattr(flex_attention, "create_block_mask", lambda mod, *_, **__: SimpleNamespace(mask_mod=mod))
    monkeypatch.setattr(op, "_missing", lambda device: None)
    caches = flex._block_mask, configs.generation
    future, precision = torch.__future__, torch.get_float32_matmul_precision()
    overwrite = future.get_overwrite_module_params_on_conversion()
    future.set_overwrite_module_params_on_conversion(True)  # the values are beside what `.data =` sets
    try:
        with interpreter.patched_once_a_launch(), _Calls(), _Operations():
            yield GPU
    finally:
        future.set_overwrite_module_params_on_conversion(overwrite)
        torch.set_float32_matmul_precision(precision)
        for cache in caches:
            cache.cache_clear()
