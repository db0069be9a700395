"""The Triton kernels compiled for GPUs that are not there: every shipped configuration keeps within its device, and the
table says how.

What a configuration needs is listed in tests/golden/kernel_resources.txt for one version of Triton. With that version
the list must be the same (a change shows as a readable diff; `python -m runs.bench.kernel_resources --write` accepts
it); with another only the limits hold.
"""

import os
import subprocess
import sys
from pathlib import Path

import triton

from runs.bench.kernel_resources import GOLDEN, Resources, shipped


def test_every_shipped_configuration_fits_its_device():
    """No time limit: it takes a minute or two of compiling, and on a busy machine as long as it takes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "runs.bench.kernel_resources", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    got, golden = (text.rstrip("\n").split("\n") for text in (done.stdout, GOLDEN.read_text()))
    assert len(got) == len(golden)
    if golden[0] == got[0]:
        assert got == golden
    else:
        print(f"not compared with the list for {golden[0]}: this is Triton {triton.__version__}")


def test_a_configuration_that_breaks_a_limit_is_named():
    """Spills, too much shared memory, no tensor cores, no asynchronous copies: each is said."""
    build = shipped()[0]
    for resources, reason in (
        (Resources(255, 100, 1000, {"HMMA": 8, "LDGSTS": 4}), "spills 100 bytes per thread"),
        (
            Resources(255, 0, 200_000, {"HMMA": 8, "LDGSTS": 4}),
            "needs 200000 bytes of shared memory, the device has 166912",
        ),
        (Resources(255, 0, 1000, {"LDGSTS": 4}), "has no HMMA: no tensor cores"),
        (Resources(255, 0, 1000, {"HMMA": 8}), "has no LDGSTS: copies are not asynchronous"),
    ):
        assert resources.broken(build) == [reason]
    assert Resources(255, 0, 1000, {"HMMA": 8, "LDGSTS": 4}).broken(build) == []
