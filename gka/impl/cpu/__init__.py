"""The fused CPU kernel: op -> call -> build -> source (C++, compiled at the first use)."""

from gka.impl.cpu.op import gaussian, say_once, unavailable

__all__ = ["gaussian", "say_once", "unavailable"]
