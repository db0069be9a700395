"""--dry-run: what a training would take, said by the trainers themselves; nothing is trained or written."""

import json
import re

import pytest
import torch

from deit_gka.train import Trainer as VisionTrainer
from deit_gka.training.config import TrainConfig as VisionConfig
from nanochat_gka.train import TrainConfig, Trainer
from toy_trainer import ToyConfig, ToyTrainer
from trainkit_gka import plan
from trainkit_gka.cli import UserError
from trainkit_gka.distributed import Runtime
from trainkit_gka.loop import launch

CPU = Runtime(0, 1, torch.device("cpu"))


def said(capsys) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    return {
        name: value for name, _, value in (re.split(r"( {2,}| (?=\S+$))", line, maxsplit=1) for line in lines if line)
    }


@pytest.fixture
def places(tmp_path):
    return {"out": tmp_path / "runs", "results": tmp_path / "results.jsonl", "device_type": "cpu"}


def test_a_language_run_is_planned_and_nothing_is_written(packed, tmp_path, places, capsys):
    config = TrainConfig(
        data=packed / "packed", depth=2, attention="gka", num_iterations=7, total_batch_size=256, dry_run=True, **places
    )
    launch(config, Trainer)
    shown = said(capsys)
    assert shown["steps"] == "7" and shown["tokens"] == "1,792 tokens, 256 a step"
    assert shown["--depth"] == "2" and shown["--attention"] == "gka"
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_what_training_would_say(tmp_path, places):
    with pytest.raises(UserError, match="no packed data in"):
        launch(TrainConfig(data=tmp_path / "none", depth=2, dry_run=True, **places), Trainer)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_a_vision_run_has_the_planned_size(places, monkeypatch, capsys):
    """Before the first update the optimiser has no state yet."""
    small = {"model_kwargs": ("embed_dim=64", "depth=2", "num_heads=2"), "input_size": 32, "batch_size": 64}
    config = VisionConfig(data="digits", epochs=1, warmup_epochs=0, num_workers=0, compile="off", **small, **places)
    sizes = []
    monkeypatch.setattr(plan, "plan", lambda trainer, size: sizes.append(size) or {})
    trainer = VisionTrainer(config, CPU)
    plan.show_plan(trainer)
    trainer.step(False)
    trainer.close()
    counters = 4 * len(list(trainer.model.parameters()))  # of AdamW's steps
    assert sizes[0] + counters == sum(t.nbytes for group in trainer.kept().tensors.values() for t in group.values())


@pytest.mark.parametrize("processes, parameters, known", [(1, 2, True), (2, 2, False), (1, 3, False)])
def test_hours_come_from_a_finished_run_of_the_same_size(places, processes, parameters, known):
    metrics = {"parameters": parameters, "rounds_per_second": 0.5}
    row = {"kind": "toy", "date": "now", "processes": processes, "hardware": "a box", "config": {}, "metrics": metrics}
    places["results"].write_text(json.dumps(row) + "\n")
    trainer = ToyTrainer(ToyConfig(model_tag="toy", steps=3600, **places), CPU)
    hours = plan.plan(trainer, 0)["hours"]
    assert hours.startswith("2.00, an estimate from the run of now in ") if known else hours.startswith("not known")


def test_hours_come_from_the_peak_of_a_gpu_where_no_run_says_more(places, monkeypatch):
    monkeypatch.setattr(plan, "peak_flops", lambda device: 1e15)
    monkeypatch.setattr(ToyTrainer, "work", lambda self: ("tokens", 1000, 4e14))
    trainer = ToyTrainer(ToyConfig(model_tag="toy", steps=36, **places), CPU)
    trainer.state["step"] = 18
    assert plan.plan(trainer, 0)["hours"].startswith("5.00, an estimate from FLOPs alone, at 40% of the peak")


@pytest.mark.parametrize("free, warned", [(3 * 10**9, False), (3 * 10**9 - 1, True)])
def test_too_small_a_disk_is_said(places, monkeypatch, free, warned):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": free}))
    trainer = ToyTrainer(ToyConfig(model_tag="toy", keep=2, **places), CPU)
    assert ("too little" in plan.plan(trainer, 10**9)["disk"]) == warned
