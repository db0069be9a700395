"""--dry-run: what a training would take, said by the trainers themselves; nothing is trained or written."""

import json
import re
from dataclasses import replace

import pytest
import torch

from deit_gka.train import Trainer as VisionTrainer
from deit_gka.training.config import TrainConfig as VisionConfig
from nanochat_gka.train import TrainConfig, Trainer
from processes import signals_kept
from toy_trainer import ToyConfig, ToyTrainer
from trainkit_gka import plan
from trainkit_gka.distributed import Runtime
from trainkit_gka.loop import launch
from trainkit_gka.results import describe_hardware

CPU = Runtime(0, 1, torch.device("cpu"))


def printed(capsys) -> dict[str, str]:
    lines = [re.split(r" {2,}| (?=\S+$)", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if line]
    return {line[0]: line[-1] for line in lines}


@pytest.fixture
def places(tmp_path):
    return {"out": tmp_path / "runs", "results": tmp_path / "results.jsonl", "device_type": "cpu"}


def bytes_in(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def stated_bytes(words: str) -> int:
    return int(words.split()[0].replace(",", ""))


@pytest.mark.parametrize("kind", ["language", "vision"])
def test_a_plan_writes_nothing_and_what_is_trained_then_follows_it(kind, packed, tmp_path, places, capsys):
    """Planned before the first step, when vision's optimiser has no state yet; an epoch of digits is 7 updates."""
    if kind == "language":
        steps = dict(num_iterations=20, total_batch_size=256, eval_tokens=256, sample_every=-1, depth=2, save_every=5)
        config, trainer = TrainConfig(data=packed / "packed", attention="gka", **steps, **places), Trainer
        planned = {"steps": "20", "tokens": "5,120 tokens, 256 a step", "--depth": "2", "--attention": "gka"}
    else:
        small = dict(model_kwargs=("embed_dim=64", "depth=2", "num_heads=2"), input_size=32, batch_size=160, aa="")
        settings = dict(data="digits", epochs=2, warmup_epochs=0, num_workers=0, compile="off", log_every=1)
        config, trainer = VisionConfig(**small, **settings, **places), VisionTrainer
        planned = {"updates": "14", "--batch-size": "160"}
    launch(replace(config, dry_run=True), trainer)
    before = printed(capsys)
    assert before.items() >= planned.items() and not list(tmp_path.iterdir())
    assert before["hours"].startswith("not known: no run of this size on 1 x ")
    with signals_kept():
        launch(replace(config, stop_after=15 if kind == "language" else 13), trainer)
    checkpoints = config.folder / "checkpoints"
    assert len(list(checkpoints.iterdir())) == config.keep
    for folder in checkpoints.iterdir():
        assert stated_bytes(before["a checkpoint"]) == pytest.approx(bytes_in(folder), rel=0.02)
    best = bytes_in(config.folder / "best") if kind == "vision" else 0
    assert best > 0 or kind == "language"
    assert stated_bytes(before["disk"]) == pytest.approx(bytes_in(checkpoints) + best, rel=0.02)
    capsys.readouterr()
    launch(replace(config, dry_run=True), trainer)
    assert re.match(r"[\d.]+, an estimate from this run so far, on 1 x .*: [\d,.]+ \w+/s$", printed(capsys)["hours"])


@pytest.mark.parametrize("processes, parameters, hardware", [(1, 2, ""), (2, 2, ""), (1, 3, ""), (1, 2, "NVIDIA H100")])
def test_hours_come_from_a_finished_run_of_the_same_size_on_the_same_hardware(places, processes, parameters, hardware):
    metrics = {"parameters": parameters, "rounds_per_second": 0.5}
    row = {"kind": "toy", "date": "now", "processes": processes, "config": {}, "metrics": metrics}
    row["hardware"] = hardware or describe_hardware(CPU.device)
    places["results"].write_text(json.dumps(row) + "\n")
    trainer = ToyTrainer(ToyConfig(model_tag="toy", steps=3600, **places), CPU)
    hours = plan.plan(trainer, {})["hours"]
    assert hours.startswith("2.00, " if (processes, parameters, hardware) == (1, 2, "") else "not known")


def test_hours_come_from_the_peak_of_a_gpu_where_no_run_says_more(places, monkeypatch):
    monkeypatch.setattr(plan, "peak_flops", lambda device: 1e15)
    monkeypatch.setattr(ToyTrainer, "work", lambda self: ("tokens", 1000, 4e14))
    trainer = ToyTrainer(ToyConfig(model_tag="toy", steps=36, **places), CPU)
    trainer.state["step"] = 18
    hours = plan.plan(trainer, {})["hours"]
    assert hours.startswith("5.00, an estimate from FLOPs alone") and hours.endswith(": 1 tokens/s")


@pytest.mark.parametrize(
    "free, saved, size, warned", [(3000, 0, 1000, False), (2999, 0, 1000, True), (2000, 1000, 1000, False)]
)
def test_too_small_a_disk_is_named(places, monkeypatch, free, saved, size, warned):
    """A checkpoint more than --keep must fit; those of the run that are saved already go as new ones come."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": free}))
    config = ToyConfig(model_tag="toy", keep=2, **places)
    checkpoint = config.folder / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(saved))
    assert ("too little" in plan.plan(ToyTrainer(config, CPU), {"model": size})["disk"]) == warned
