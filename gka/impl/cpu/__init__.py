"""The fused CPU kernel: op -> call -> build -> source (C++, compiled at the first use)."""

from gka.impl.cpu.op import SERVES, gaussian, unavailable

__all__ = ["SERVES", "gaussian", "unavailable"]
