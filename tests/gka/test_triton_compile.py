"""The Triton kernels compiled for GPUs that are not there: every shipped configuration keeps within its device, and the
table says how.

What a configuration needs is listed in tests/golden/kernel_resources.txt for one version of Triton and one state of the
sources. With these the compiler says the same every time, so that a sample is compiled. With that version and other
sources all are, and the list must be the same (a change shows as a readable diff; `python
tests/support/kernel_resources.py --write` accepts it). With another version only the limits hold.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import kernel_resources
from kernel_resources import GOLDEN, VERSION, header, shipped


def compiled(*flags):
    """The lines of the command, which ends with 0 if no configuration breaks a limit."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, kernel_resources.__file__, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n").split("\n")


@pytest.mark.skipif(
    not GOLDEN.read_text().startswith(VERSION), reason=f"the list is not of Triton {triton.__version__}"
)
def test_the_list_is_of_these_sources_and_configurations():
    first, *lines = GOLDEN.read_text().splitlines()
    assert first == header(), "python tests/support/kernel_resources.py --write"
    names = list(map(str, shipped()))
    assert [line[: len(name)] for name, line in zip(names, lines, strict=True)] == names


@pytest.mark.slow
def test_every_shipped_configuration_fits_its_device():
    """No time limit: where all are compiled it takes minutes, and on a busy machine as long as it takes."""
    golden = GOLDEN.read_text().rstrip("\n").split("\n")
    if golden[0] == header():
        got = compiled("5")
        assert len(got) == 6 and {line.split()[1] for line in got[1:]} >= {"forward", "decode", "keys"}
        assert set(got) <= set(golden)
        return
    got = compiled()
    assert got[1:] == golden[1:] or not golden[0].startswith(VERSION)
