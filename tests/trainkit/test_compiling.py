"""torch.compile on a machine without a C++ compiler: an error before training where it is asked for, else not used."""

import pytest
import torch

import tiny
from trainkit_gka import compiling
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime

HERE = Runtime(0, 1, torch.device("cpu"))


def test_it_is_refused_where_it_is_asked_for_and_left_out_where_it_is_not(no_compiler, capsys):
    with pytest.raises(UserError, match=r"^--compile on: "):
        compiling.mode("--compile", "on", "off", HERE)
    assert compiling.mode("--compile", "auto", "max-autotune", HERE) == "off"
    output = capsys.readouterr().out
    assert output.startswith("--compile auto: ") and output.count("\n") == 1


def test_off_asks_for_no_compiler(no_compiler, capsys):
    assert compiling.mode("--compile", "off", "on", HERE) == compiling.mode("--compile", "auto", "off", HERE) == "off"
    assert capsys.readouterr().out == ""


@tiny.needs_compiler
def test_a_machine_that_can_compile_is_asked_and_does():
    assert compiling.mode("--compile", "auto", "on", HERE) == "on"
    assert compiling.mode("--compile", "default", "on", HERE) == "default"
