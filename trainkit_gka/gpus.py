"""Print how many GPUs CUDA shows to a process; 0 without nvidia-smi.

    python -m trainkit_gka.gpus

The standard library alone, no newer Python than 3.8: it also runs where nothing is installed yet.
"""

import os
import re
import shutil
import subprocess


def count():
    """How many GPUs there are: those that `nvidia-smi -L` lists and CUDA_VISIBLE_DEVICES leaves."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    lines = [line for line in listed.decode(errors="replace").splitlines() if line.startswith("GPU")]
    uuids = [line.rpartition("(UUID: ")[2].rstrip(")") for line in lines]
    return count_visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def count_visible(uuids, selection):
    """How many of these GPUs CUDA_VISIBLE_DEVICES selects, None all, as CUDA reads it.

    Numbers or beginnings of UUIDs, up to the first that names no GPU. A repeated GPU leaves none, and of the partitions
    of a GPU (MIG) CUDA uses the first alone.
    """
    if selection is None:
        return len(uuids)
    selected = []
    for name in map(str.strip, selection.split(",")):
        if name.startswith("MIG-"):
            return 1
        number = re.match(r"\+?([0-9]+)", name)
        matches = [int(number[1])] if number else [i for i, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(matches) != 1 or matches[0] >= len(uuids):
            break
        selected += matches
    return len(selected) if len(set(selected)) == len(selected) else 0


if __name__ == "__main__":
    print(count())
