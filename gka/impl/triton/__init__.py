"""The fused Triton kernels: op -> launch -> forward | head | backward -> tiles, configs. op and launch share shapes."""

from gka.impl.triton.op import gaussian, unavailable

__all__ = ["gaussian", "unavailable"]
