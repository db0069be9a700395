"""The fused Triton kernels: op -> launch -> forward | backward -> tiles, configs. op and launch share shapes."""

from gka.impl.triton.op import SERVES, gaussian, unavailable

__all__ = ["SERVES", "gaussian", "unavailable"]
