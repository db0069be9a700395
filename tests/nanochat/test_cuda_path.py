"""The trainer on a GPU, on one that is not there: the branches for CUDA are taken, and the results are the CPU's. See
`tests/support/pretend_cuda.py`.
"""

import pytest
import torch
from safetensors.torch import load_file

import tiny_core
from gpt_runs import events
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.checkpoints import load
from nanochat_gka.train import TrainConfig, Trainer, main
from pretend_cuda import GPU, OnGPU, needs_no_gpu, pretended
from trainkit_gka import checkpoint, hardware
from trainkit_gka.distributed import setup
from trainkit_gka.results import read_results

# Of the interpreter, which computes with NumPy.
pytestmark = [needs_no_gpu, pytest.mark.filterwarnings("ignore:(divide by zero|invalid value|overflow):RuntimeWarning")]
SMALL = dict(
    depth=2, aspect_ratio=16, head_dim=16, window_pattern="SL", device_batch_size=3, total_batch_size=4 * 32,
    num_iterations=2, eval_tokens=96, sample_every=-1, log_every=1, save_every=1, compile="off"
)  # fmt: skip
HYBRID = dict(attention="GA", head_offsets="PS", value_embeds="all")
FORMS = {
    "softmax": dict(attention="softmax"),
    "gka": dict(attention="gka"),
    "normalised": dict(attention="gka", gka_values="normalised", value_embeds="none", head_offsets="PS"),
    "learned": dict(attention="VG", offset_layers="all", channel_bandwidths=True, head_gates=True),
}


@pytest.fixture
def gpu(monkeypatch):
    with pretended(monkeypatch):
        yield


def config(packed, out, **settings):
    places = dict(data=packed / "packed", out=out, results=out / "results.jsonl", model_tag="run")
    return TrainConfig(**{**places, **SMALL, "device_type": "cuda", **settings})


def final(out, name):
    return load_file(out / f"run/checkpoints/step_00000002/{name}.safetensors")


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


@pytest.mark.parametrize("form", FORMS)
def test_every_form_trains_evaluates_and_writes(form, gpu, packed, tmp_path):
    """Every tensor is where it belongs, and has the dtype that it has on a GPU."""
    trainer = Trainer(config(packed, tmp_path, **FORMS[form]), setup("cuda"))
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
    again = Trainer(trainer.config, trainer.runtime, checkpoint.load_newest(tmp_path / "run/checkpoints")).model
    assert all(p.dtype == q.dtype and torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))
    assert 3 < trainer.evaluate()["val_bpb"] < 6
    engine = Engine(model, trainer.data.tokenizer)
    assert engine.keep_keys == model.derives_keys >= (form == "normalised")
    assert all(texts for texts in engine.complete(["the kernel", "a row"], Sampling(max_tokens=2, temperature=0.7)))


def test_a_run_is_the_cpus_run_and_goes_on_where_it_was_stopped(gpu, packed, tmp_path):
    """In float32, by the whole command: losses, evaluations, CORE, samples and the tensors of a checkpoint.

    Blocks put out 0 at first, so the first gradient of the scalars that scale the stream is rounding alone, which AdamW
    would make steps of.
    """
    bundle = tiny_core.write_bundle(tmp_path / "bundle", ("copa", "jeopardy"))
    settings = dict(HYBRID, dtype="float32", scalar_lr=0.0, bundle=bundle)
    settings |= dict(core_metric_every=2, core_metric_max_per_task=4)
    for device in ("cpu", "cuda"):
        main(config(packed, tmp_path / device, device_type=device, **settings))
    for event, keys in (("train", ["loss"]), ("eval", ["train_bpb", "val_bpb"]), ("core", ["metric"])):
        on_cpu, on_gpu = (events(tmp_path / device, event) for device in ("cpu", "cuda"))
        assert len(on_cpu) == len(on_gpu) > 0
        for key in keys:
            assert [line[key] for line in on_gpu] == pytest.approx([line[key] for line in on_cpu], rel=1e-5)
    main(config(packed, tmp_path / "stopped", **settings, stop_after=1))
    main(config(packed, tmp_path / "stopped", **settings))
    for name in ("model", "optimizer"):
        on_cpu, on_gpu, stopped = (final(tmp_path / out, name) for out in ("cpu", "cuda", "stopped"))
        for key in on_cpu:  # AdamW divides tiny gradients by their size, and a GPU's tables began as bfloat16
            rounding = 2**-9 if name == "model" and ("wte" in key or "value_embeds" in key) else 1e-4
            assert on_gpu[key].dtype == on_cpu[key].dtype, key
            assert (on_gpu[key] - on_cpu[key]).float().abs().mean() < rounding, key
            assert torch.equal(stopped[key], on_gpu[key]), key
    [result] = read_results(tmp_path / "cuda/results.jsonl")
    assert result["hardware"] == "NVIDIA H100 80GB HBM3"
    loaded = load(tmp_path / "cuda/run", device=GPU)
    assert loaded.model.device == GPU and loaded.model.dtype == torch.bfloat16


def test_a_gpu_without_bfloat16_and_a_slice_of_one_are_known(monkeypatch):
    with pretended(monkeypatch, capability=(7, 5)):
        assert "--dtype float32 is faster" in hardware.slow_bfloat16(torch.bfloat16, GPU)
        assert hardware.slow_bfloat16(torch.float32, GPU) is None
        assert hardware.peak_flops(GPU) == 989e12
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
        assert hardware.peak_flops(GPU) is None
    with pretended(monkeypatch):
        assert hardware.slow_bfloat16(torch.bfloat16, GPU) is None
