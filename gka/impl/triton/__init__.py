"""The fused Triton kernels: op -> launch -> forward | head | backward -> tiles, configs; the shapes of results lie below op and launch."""

from gka.impl.triton.op import gaussian, unavailable

__all__ = ["gaussian", "unavailable"]
