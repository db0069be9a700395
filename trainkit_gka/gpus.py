"""Print how many GPUs CUDA shows to a process; 0 without nvidia-smi.

    python -m trainkit_gka.gpus

The standard library alone, no newer Python than 3.8: it also runs where nothing is installed yet.
"""

import os
import shutil
import subprocess


def count():
    """How many GPUs there are: those that CUDA_VISIBLE_DEVICES names, or else all that `nvidia-smi -L` lists."""
    if not shutil.which("nvidia-smi"):
        return 0
    selection = os.environ.get("CUDA_VISIBLE_DEVICES")
    if selection is not None:
        return sum(name.strip() not in ("", "-1") for name in selection.split(","))
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    return sum(line.startswith(b"GPU") for line in listed.splitlines())


if __name__ == "__main__":
    print(count())
