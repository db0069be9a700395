"""Commands that run in a checkout of an upstream, and what they compute."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from sources import ROOT as PROJECT

SCRIPTS = Path(__file__).parent


def run(at, *command, **environment):
    """What a command prints. torch.compile is off: it takes most of a minute, and the patches do not touch it."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(PROJECT), **environment}
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run([sys.executable, *map(str, command)], cwd=at, env=environment, **output)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def assert_equal(a, b):
    """Two dictionaries of tensors are equal bit by bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
