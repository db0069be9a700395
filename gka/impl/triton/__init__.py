"""The fused Triton kernels: op -> launch -> forward | backward | triangular | short | cudnn -> tiles.

configs chooses among them, and their tiles. op and launch share shapes.
"""

from gka.impl.triton.op import SERVES, gaussian, unavailable

__all__ = ["SERVES", "gaussian", "unavailable"]
