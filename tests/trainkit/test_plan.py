"""--dry-run: what a training would take, computed by the trainers themselves; nothing is trained or written."""

import json
import re
from dataclasses import replace

import pytest
import torch

from deit_gka import train as vision
from nanochat_gka import train as language
from processes import signals_kept
from toy_trainer import ToyConfig, ToyTrainer
from trainkit_gka import plan
from trainkit_gka.distributed import Runtime
from trainkit_gka.loop import launch
from trainkit_gka.results import describe_hardware

CPU = Runtime(0, 1, torch.device("cpu"))


@pytest.fixture
def places(tmp_path):
    return {"out": tmp_path / "runs", "results": tmp_path / "results.jsonl", "device_type": "cpu"}


def planned(module, config, capsys) -> dict[str, str]:
    capsys.readouterr()
    launch(replace(config, dry_run=True), module.Trainer)
    lines = [re.split(r" {2,}| (?=\S+$)", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    return {line[0]: line[-1] for line in lines}


def bytes_in(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("module", [language, vision])
def test_a_plan_writes_nothing_and_what_is_trained_then_follows_it(module, packed, tmp_path, places, capsys):
    """Planned before the first step, when vision's optimiser has no state yet; an epoch of digits is 7 updates."""
    if module is language:
        steps = dict(num_iterations=20, total_batch_size=256, eval_tokens=256, sample_every=-1, depth=2, save_every=5)
        config = language.TrainConfig(data=packed / "packed", attention="gka", **steps, **places)
        expected = {"steps": "20", "tokens": "5,120 tokens, 256 a step", "--depth": "2", "--attention": "gka"}
    else:
        small = dict(model_kwargs=("embed_dim=64", "depth=2", "num_heads=2"), input_size=32, batch_size=160, aa="")
        settings = dict(data="digits", epochs=2, warmup_epochs=0, num_workers=0, compile="off", log_every=1)
        config = vision.TrainConfig(**small, **settings, **places)
        expected = {"updates": "14", "--batch-size": "160"}
    before = planned(module, config, capsys)
    assert before.items() >= expected.items() and not list(tmp_path.iterdir())
    assert before["hours"].startswith("not known: no run of this size on 1 x ")
    with signals_kept():
        launch(replace(config, stop_after=15 if module is language else 13), module.Trainer)
    size, disk = (int(before[name].split()[0].replace(",", "")) for name in ("a checkpoint", "disk"))
    checkpoints = [*(config.folder / "checkpoints").iterdir()]
    assert [bytes_in(folder) for folder in checkpoints] == pytest.approx([size] * config.keep, rel=0.02)
    best = bytes_in(config.folder / "best") if module is vision else 0
    assert disk == pytest.approx(sum(map(bytes_in, checkpoints)) + best, rel=0.02)
    assert best > 0 or module is language
    hours = planned(module, config, capsys)["hours"]
    assert re.match(r"[\d.]+, an estimate from this run so far, on 1 x .*: [\d,.]+ \w+/s$", hours)


HOURS = [  # what is known of a run in the results and of the device's peak, and the plan
    ({}, None, r"2\.00, .*: 0\.5 tokens/s"),
    ({"processes": 2}, None, "not known"),
    ({"hardware": "NVIDIA H100"}, None, "not known"),
    ({"metrics": {"parameters": 3, "tokens_per_second": 0.5}}, None, "not known"),
    ({"kind": "other"}, 1e15, r"1\.00, an estimate from FLOPs alone.*: 1 tokens/s"),
]


@pytest.mark.parametrize("changes, peak, hours", HOURS)
def test_hours_come_from_a_like_run_on_the_same_hardware_or_from_the_peak(places, monkeypatch, changes, peak, hours):
    row = {"kind": "toy", "date": "now", "processes": 1, "hardware": describe_hardware(CPU.device), "config": {}}
    row |= {"metrics": {"parameters": 2, "tokens_per_second": 0.5}, **changes}
    places["results"].write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(plan, "peak_flops", lambda device: peak)
    monkeypatch.setattr(ToyTrainer, "work", lambda self: ("tokens", 100, 4e14))
    trainer = ToyTrainer(ToyConfig(model_tag="toy", steps=54, **places), CPU)
    trainer.state["step"] = 18
    assert re.match(hours, plan.plan(trainer, {})["hours"])


@pytest.mark.parametrize("free, saved, warned", [(3000, 0, False), (2999, 0, True), (2000, 1000, False)])
def test_too_small_a_disk_is_named(places, monkeypatch, free, saved, warned):
    """A checkpoint more than --keep must fit; those of the run that are saved already go as new ones come."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": free}))
    config = ToyConfig(model_tag="toy", keep=2, **places)
    checkpoint = config.folder / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(saved))
    assert ("too little" in plan.plan(ToyTrainer(config, CPU), {"model": 1000})["disk"]) == warned
