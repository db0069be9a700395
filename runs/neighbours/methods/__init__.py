"""The methods, one file each; importing this package registers them in `Mixing.METHODS`."""

from runs.neighbours.methods import (  # noqa: F401
    kernelized_rpe,
    krause,
    linear_transformer,
    linformer,
    non_local_means,
    nystromformer,
    performer,
    skyformer,
)
