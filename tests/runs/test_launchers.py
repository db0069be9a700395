"""Several machines and restarts: what make passes to torchrun."""

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from runs.settings import Problem

MEET = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "first:29500"}


def taken(words: list[str]) -> dict:
    """What torchrun understands of a command: `python -m trainkit_gka.torchrun` and its flags.

    It has a --run-path, and must not take our --run for a short form of it.
    """
    assert words[1:3] == ["-m", "trainkit_gka.torchrun"]
    return vars(torchrun.parse_args(words[3:]))


@pytest.mark.parametrize(
    "settings, expected",
    [
        (dict(NNODES="2", RDZV="first:29500", NGPU="4"), {**MEET, "nproc_per_node": "4", "max_restarts": 0}),
        (dict(NNODES="2", RDZV="first:29500", RESTARTS="3"), {**MEET, "nproc_per_node": "1", "max_restarts": 3}),
        (dict(RESTARTS="3"), {"standalone": True, "nnodes": "1:1", "nproc_per_node": "1", "max_restarts": 3}),
    ],
    ids=["machines", "machines and restarts", "restarts of one process"],
)
def test_settings_reach_torchrun(commands, settings, expected):
    for target, module in (("pretrain-d20", "nanochat_gka.train"), ("eval-bpb", "nanochat_gka.evaluate")):
        found = taken(commands(target, RUN="none", ARGS="--device-type cpu", **{"NGPU": "1", **settings})[-1])
        assert {name: found[name] for name in expected} == expected
        assert (found["training_script"], found["run_path"]) == (module, False)
        assert target != "eval-bpb" or found["training_script_args"][-4:] == ["--run", "none", "--device-type", "cpu"]


@pytest.mark.parametrize("place", ["host:x", "host:65536", ":29500", "::1", "tcp://a:1"])
def test_a_place_to_meet_that_is_none_is_refused(lines, place):
    with pytest.raises(Problem, match=f"RDZV={place} must be host:port, the name or address"):
        lines("pretrain-d20", NNODES="2", RDZV=place)


def test_machines_and_a_place_to_meet_need_each_other(lines):
    with pytest.raises(Problem, match="NNODES=2 needs RDZV=host:port"):
        lines("pretrain-d20", NNODES="2")
    with pytest.raises(Problem, match="RDZV=first:29500 is where several machines meet: give their number too"):
        lines("pretrain-d20", RDZV="first:29500")


@pytest.mark.parametrize("place, meant", [("node-1.a:29500", ("node-1.a", 29500)), ("[fe80::1]:1", ("fe80::1", 1))])
def test_a_place_to_meet_is_what_torchrun_takes(commands, place, meant):
    assert taken(commands("eval-bpb", NNODES="2", RDZV=place)[-1])["rdzv_endpoint"] == place
    assert parse_rendezvous_endpoint(place, 29400) == meant
