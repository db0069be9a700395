"""What both trainers do on a GPU, on one that is not there: the branches for CUDA are taken, and the results are the
CPU's. See `tests/support/pretend_cuda.py`.
"""

import pytest
import timm
import torch

import tiny_core
import tiny_vision
import vision_runs
from deit_gka import train as vision
from deit_gka.training.engine import autocast
from nanochat_gka import train as language
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.checkpoints import load
from pretend_cuda import GPU, OnGPU, needs_no_gpu, pretended
from tiny_vision import SHAPE, SIZE
from trainkit_gka import checkpoint, hardware
from trainkit_gka.distributed import setup
from trainkit_gka.progress import read_events
from trainkit_gka.results import read_results

# Of the interpreter, which computes with NumPy.
pytestmark = [needs_no_gpu, pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")]
SETTINGS = {
    language: dict(
        depth=2, aspect_ratio=16, head_dim=16, window_pattern="SL", device_batch_size=3, total_batch_size=4 * 32,
        num_iterations=2, eval_tokens=96, sample_every=-1, save_every=1
    ),
    vision: dict(
        model_kwargs=tuple(f"{key}={value}" for key, value in SHAPE.items()), input_size=SIZE, batch_size=12,
        group_size=6, device_batch_size=8, epochs=1, warmup_epochs=0, lr=0.1, drop_path=0.3, num_workers=0
    ),
}  # fmt: skip
TEXT_FORMS = {
    "softmax": dict(attention="softmax"),
    "gka": dict(attention="gka"),
    "normalised": dict(attention="gka", gka_values="unrotated", value_embeds="none", head_offsets="PS"),
    "learned": dict(attention="VG", offset_layers="all", channel_bandwidths=True, head_gates=True),
}
IMAGE_FORMS = {
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
def few_pictures(tmp_path_factory):
    """24 training JPEGs in 3 classes, 6 of validation: an epoch of two updates."""
    return tiny_vision.write_pictures(tmp_path_factory.mktemp("few"), train=8, val=2)


@pytest.fixture
def config(packed, few_pictures):
    """Makes the flags of a run of either trainer that writes to `out`."""
    data = {language: packed / "packed", vision: str(few_pictures)}

    def make(module, out, **settings):
        places = dict(data=data[module], out=out, results=out / "results.jsonl", model_tag="run", log_every=1)
        return module.TrainConfig(**{**places, **SETTINGS[module], "compile": "off", "device_type": "cuda", **settings})

    return make


@pytest.fixture
def gpu(monkeypatch):
    with pretended(monkeypatch):
        yield


def test_the_pretended_gpu_refuses_what_a_gpu_does(gpu):
    """Or the other tests would prove nothing."""
    x, table = torch.ones(3, device="cuda"), torch.nn.Embedding(3, 4)
    assert (x + torch.tensor(2.0)).device == GPU and (x + 2).cpu().tolist() == [3, 3, 3]
    for mixed in (lambda: x + torch.ones(3), lambda: table(x.long()), lambda: torch.stack([x, torch.ones(3)])):
        with pytest.raises(RuntimeError, match=r"of tensors on cuda:0 .* and on the CPU"):
            mixed()
    with pytest.raises(TypeError, match="can't convert cuda"):
        x.numpy()
    with pytest.raises(RuntimeError, match="may read this copy before"):
        x.to("cpu", non_blocking=True)


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_every_form_of_text_trains_evaluates_and_writes(form, gpu, config, tmp_path):
    """Every tensor is where it belongs, and has the dtype that it has on a GPU."""
    trainer = language.Trainer(config(language, tmp_path, **TEXT_FORMS[form]), setup("cuda"))
    trainer.prepare()
    trainer.announce()
    model = trainer.model
    before = {name: p.detach().cpu() for name, p in model.named_parameters()}
    numbers = [trainer.step(False)[0]["loss"] for _ in range(2)]
    assert numbers[1] < numbers[0] < 5.75  # log 300 = 5.70
    changed = [name for name, p in model.named_parameters() if not torch.equal(p.detach().cpu(), before[name])]
    assert {"lm_head.weight", "transformer.wte.weight", "transformer.h.0.mlp.c_proj.weight"} <= set(changed)
    for name, p in model.named_parameters():
        table = name.startswith(("transformer.wte", "value_embeds"))
        assert (p.device, p.dtype) == (GPU, torch.bfloat16 if table else torch.float32), name
        assert isinstance(p.grad, OnGPU) and p.grad.dtype == p.dtype, name
    trainer.save()
    saved = checkpoint.load_newest(tmp_path / "run/checkpoints")
    again = language.Trainer(trainer.config, trainer.runtime, saved).model
    assert all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    assert 3 < trainer.evaluate()["val_bpb"] < 6
    engine = Engine(model, trainer.data.tokenizer)
    assert engine.keep_keys == model.derives_keys >= (form == "normalised")
    assert all(texts for texts in engine.complete(["the kernel", "a row"], Sampling(max_tokens=2, temperature=0.7)))


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_every_form_of_images_trains(form, gpu, config, tmp_path):
    """An update, and everything is where it should be; what is computed in autocast is bfloat16."""
    torch.save(timm.create_model("test_vit", num_classes=3).state_dict(), tmp_path / "teacher.pth")
    settings = dict(teacher_path=str(tmp_path / "teacher.pth"), **IMAGE_FORMS[form])
    trainer = vision.Trainer(config(vision, tmp_path, **settings), setup("cuda"))
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


RUNS = {  # the settings, the tensors of a checkpoint, and the numbers of the log
    # Blocks put out 0 at first, so the first gradient of the scalars that scale the stream is rounding alone, which
    # AdamW would make steps of.
    language: (
        dict(attention="GA", head_offsets="PS", value_embeds="every-second", dtype="float32", scalar_lr=0.0,
             core_metric_every=2, core_metric_max_per_task=4),
        ("model", "optimizer"),
        {"train": ["loss"], "eval": ["train_bpb", "val_bpb"], "core": ["metric"]},
    ),
    vision: (
        dict(amp="float32", model_kwargs=tuple(f"{key}={value}" for key, value in {**SHAPE, "depth": 1}.items())),
        ("model", "ema"),
        {"train": ["loss"], "eval": ["top1", "loss", "ema_top1", "ema_loss"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("module", RUNS)
def test_a_run_is_the_cpus_run_and_goes_on_where_it_was_stopped(module, gpu, config, tmp_path):
    """In float32, by the whole command: losses, evaluations, CORE and the tensors of a checkpoint."""
    settings, names, numbers = RUNS[module]
    if module is language:
        settings = settings | {"bundle": tiny_core.write_bundle(tmp_path / "bundle", ("copa", "jeopardy"))}
    for out, stops in (("cpu", [-1]), ("cuda", [-1]), ("stopped", [1, -1])):
        for stop in stops:
            device = "cpu" if out == "cpu" else "cuda"
            module.main(config(module, tmp_path / out, device_type=device, stop_after=stop, **settings))
    for event, keys in numbers.items():
        on_cpu, on_gpu = (read_events(tmp_path / device / "run/log.jsonl", event) for device in ("cpu", "cuda"))
        assert len(on_cpu) == len(on_gpu) > 0
        for key in keys:
            rounding = 1e-5 if module is language else 1e-4
            assert [line[key] for line in on_gpu] == pytest.approx([line[key] for line in on_cpu], rel=rounding)
    for name in names:
        on_cpu, on_gpu, stopped = (
            vision_runs.checkpoint(tmp_path / out, 2, name) for out in ("cpu", "cuda", "stopped")
        )
        assert on_cpu.keys() == on_gpu.keys()
        for key in on_cpu:  # AdamW divides tiny gradients by their size, and a GPU's tables began as bfloat16
            rounding = 2**-9 if name == "model" and ("wte" in key or "value_embeds" in key) else 1e-4
            assert on_gpu[key].dtype == on_cpu[key].dtype, key
            assert (on_gpu[key] - on_cpu[key]).float().abs().mean() < rounding, key
            assert torch.equal(stopped[key], on_gpu[key]), key
    [result] = read_results(tmp_path / "cuda/results.jsonl")
    assert result["hardware"] == "NVIDIA H100 80GB HBM3"
    if module is language:
        loaded = load(tmp_path / "cuda/run", device=GPU)
        assert loaded.model.device == GPU and loaded.model.dtype == torch.bfloat16


def test_a_gpu_without_bfloat16_and_a_slice_of_one_are_known(monkeypatch):
    with pretended(monkeypatch, capability=(7, 5)):
        assert "--amp float16" in hardware.slow_bfloat16(torch.bfloat16, GPU, "try --amp float16")
        assert hardware.slow_bfloat16(torch.float32, GPU, "") is None
        assert hardware.peak_flops(GPU) == 989e12
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        assert hardware.peak_flops(GPU) is None
    with pretended(monkeypatch):
        assert hardware.slow_bfloat16(torch.bfloat16, GPU, "") is None
