"""What the vision trainer does on a GPU, on one that is not there: the branches for CUDA are taken, and what they
compute is what the CPU computes. See `tests/support/pretend_cuda.py`.
"""

import pytest
import timm
import torch

import tiny_vision
from deit_gka.train import Trainer, main
from deit_gka.training.config import TrainConfig
from deit_gka.training.engine import autocast
from pretend_cuda import GPU, OnGPU, needs_no_gpu, pretended
from tiny_vision import SHAPE, SIZE
from trainkit_gka.distributed import setup
from vision_runs import checkpoint, records

# Of the interpreter, which computes with NumPy.
pytestmark = [needs_no_gpu, pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")]
SMALL = dict(
    model_kwargs=tuple(f"{key}={value}" for key, value in SHAPE.items()), input_size=SIZE, batch_size=12, group_size=6,
    device_batch_size=8, epochs=1, warmup_epochs=0, lr=0.1, drop_path=0.3, num_workers=0, log_every=1, compile="off"
)  # fmt: skip
FORMS = {
    "softmax": dict(model="deit_tiny_patch16_224", grad_checkpointing=True),
    "hybrid": dict(attention="GV", device_batch_size=12, model_ema_decay=0.0, clip_grad=0.0),
    "vlt": dict(model="deit_tiny_vlt_patch16_224", bce_loss=True, smoothing=0.0, three_augment=True),
    "taught": dict(
        model="deit_tiny_distilled_patch16_224",
        distillation_type="soft",
        teacher_model="test_vit",
        batch_size=4,
        group_size=4,
    ),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """24 training JPEGs in 3 classes, 6 of validation: an epoch of two updates."""
    return tiny_vision.write_pictures(tmp_path_factory.mktemp("few"), train=8, val=2)


@pytest.fixture
def gpu(monkeypatch):
    with pretended(monkeypatch):
        yield


def config(pictures, out, **settings):
    places = dict(data=str(pictures), out=out, results=out / "results.jsonl", model_tag="run")
    return TrainConfig(**{**places, **SMALL, "device_type": "cuda", **settings})


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains(form, gpu, pictures, tmp_path):
    """An update, and everything is where it should be; what is computed in autocast is bfloat16."""
    torch.save(timm.create_model("test_vit", num_classes=3).state_dict(), tmp_path / "teacher.pth")
    settings = dict(teacher_path=str(tmp_path / "teacher.pth"), **FORMS[form])
    trainer = Trainer(config(pictures, tmp_path, **settings), setup("cuda"))
    trainer.announce()
    assert 0 < trainer.step(False)[0]["loss"] < 3
    for name, p in trainer.model.named_parameters():
        assert (p.device, p.dtype) == (GPU, torch.float32), name
        assert isinstance(p.grad, OnGPU) and p.grad.dtype == torch.float32, name
    for state in trainer.optimizer.state.values():
        assert {t.device for t in state.values()} == {GPU}
    if trainer.average is not None:
        assert {p.device for p in trainer.average.module.parameters()} == {GPU}
    trainer.close()
    with autocast(GPU, "auto"):
        assert torch.nn.Linear(8, 8, device="cuda")(torch.randn(2, 8, device="cuda")).dtype == torch.bfloat16


def test_a_run_is_the_cpus_run(gpu, pictures, tmp_path):
    """In float32, by the whole command, stopped and continued on the way: losses, accuracies, weights, the average."""
    shape = tuple(f"{key}={value}" for key, value in {**SHAPE, "depth": 1}.items())
    for device in ("cpu", "cuda"):
        settings = dict(device_type=device, amp="float32", model_kwargs=shape)
        main(config(pictures, tmp_path / device, stop_after=1, **settings))
        main(config(pictures, tmp_path / device, **settings))
    for event, keys in (("train", ["loss"]), ("eval", ["top1", "loss", "ema_top1", "ema_loss"])):
        on_cpu, on_gpu = (records(tmp_path / device, event) for device in ("cpu", "cuda"))
        assert len(on_cpu) == len(on_gpu) > 0
        for key in keys:
            assert [line[key] for line in on_gpu] == pytest.approx([line[key] for line in on_cpu], rel=1e-4)
    for name in ("model", "ema"):
        on_cpu, on_gpu = (checkpoint(tmp_path / device, 2, name) for device in ("cpu", "cuda"))
        assert on_cpu.keys() == on_gpu.keys()
        for key in on_cpu:
            assert (on_gpu[key] - on_cpu[key]).abs().mean() < 1e-4, key
