"""Patched nanochat: it trains, samples, saves and resumes GKA, computes what our trainer does, and softmax stays.

Needs a checkout, from `make vendor` or NANOCHAT_SRC, and what that imports (patches/requirements.txt).
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from nanochat_gka.model.checkpoints import from_upstream, load_upstream
from nanochat_gka.model.config import GPTConfig, settings_of_today
from nanochat_gka.model.gpt import build
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit_gka.distributed import Runtime
from upstream_trees import PROJECT, SCRIPTS, assert_equal, run

pytestmark = pytest.mark.upstream
SIZE = "--depth 2 --aspect-ratio 32 --head-dim 32 --max-seq-len 64 --device-batch-size 2 --total-batch-size 128"
SCHEDULE = "--num-iterations 6 --eval-every 3 --eval-tokens 256 --core-metric-every -1 --sample-every 6 --save-every 3"


@pytest.fixture(scope="module")
def base(tree, tmp_path_factory):
    """A nanochat base folder with data and a tokenizer."""
    base = tmp_path_factory.mktemp("base")
    run(PROJECT, "-m", "nanochat_gka.corpus", "--source", "builtin", "--out", base / "base_data")
    train = ["-m", "scripts.tok_train", "--max-chars", 500_000, "--vocab-size", 512]
    run(tree("nanochat"), *train, NANOCHAT_BASE_DIR=str(base))
    return base


def pretrain(at, base, tag, *flags):
    command = ["-m", "scripts.base_train", *SIZE.split(), *SCHEDULE.split(), "--device-type", "cpu"]
    return run(at, *command, "--model-tag", tag, *flags, NANOCHAT_BASE_DIR=str(base))


def evaluate(at, base, tag, kinds):
    """What base_eval prints: "bpb", or "sample,bpb"."""
    command = ["-m", "scripts.base_eval", "--eval", kinds, "--model-tag", tag, "--split-tokens", 256]
    return run(at, *command, "--device-batch-size", 2, "--device-type", "cpu", NANOCHAT_BASE_DIR=str(base))


def flags(form):
    """A form as flags of base_train."""
    named = {f"--{name.replace('_', '-')}": value for name, value in form.items()}
    given = {flag: value for flag, value in named.items() if value is not False}
    return [part for flag, value in given.items() for part in ([flag] if value is True else [flag, value])]


def losses(printed):
    return re.findall(r"^step (\d+)/.*?loss: ([\d.]+)", printed, flags=re.M)


def computed(at, form, out):
    run(at, SCRIPTS / "upstream_nanochat.py", out, json.dumps(form))
    return load_file(out)


PRESET = dict(attention="gka", head_offsets="PS", gka_values="normalised", value_embeds="all")
PRESET |= dict(channel_bandwidths=True, head_gates=True)
FORMS = {
    "softmax": {},
    "gka": {"attention": "gka"},
    "gka-normalised": {"attention": "gka", "gka_values": "normalised"},
    "gka-offsets": {"attention": "gka", "gka_values": "normalised", "head_offsets": "PS"},
    "gka-offsets-rotated": {"attention": "gka", "head_offsets": "sn"},
    "gka-preset": PRESET,
    "gka-preset-rotated": {**PRESET, "gka_values": "rotated"},
    "gka-rotated-embeds": {"attention": "gka", "value_embeds": "all"},
    "gka-channels": {"attention": "gka", "channel_bandwidths": True},
}


@pytest.mark.parametrize("name", FORMS)
def test_nanochat_computes_what_our_trainer_does(tree, tmp_path, name):
    """Initialisation bit by bit, logits and one step of the optimiser to rounding."""
    want = computed(tree("nanochat"), FORMS[name], tmp_path / "out")
    torch.manual_seed(1)
    shape = dict(sequence_len=32, vocab_size=100, n_layer=4, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SSL")
    model = build(GPTConfig(**shape, **settings_of_today(FORMS[name])), "cpu")

    def upstream(prefix):
        named = {name.removeprefix(prefix): tensor for name, tensor in want.items() if name.startswith(prefix)}
        return from_upstream(named)

    assert_equal(model.state_dict(), upstream("init."))
    model.load_state_dict(upstream("start."))
    row, column = torch.arange(3)[:, None], torch.arange(35)[None]
    ids = (7 * row + 3 * column + column * column) % 100
    torch.testing.assert_close(model(ids), want["logits"], rtol=1e-6, atol=1e-6)
    # Its KV cache, in passes of several sizes.
    torch.testing.assert_close(want["cached"], want["logits"], rtol=1e-5, atol=1e-5)

    rates = dict(channel_lr=0.08, gate_lr=0.005)
    rates |= dict(unembedding_lr=0.004, embedding_lr=0.3, matrix_lr=0.02, weight_decay=0.2, scalar_lr=0.5)
    optimizer = MuonAdamW(parameter_groups(model, OptimConfig(**rates)), Runtime(0, 1, torch.device("cpu")))
    before, after = upstream("start."), upstream("step0.")
    for step in range(2):
        loss = model(ids[:, :32], ids[:, 1:33])
        assert loss.item() == pytest.approx(want[f"loss.{step}"].item(), rel=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # after it, Muon's bfloat16 makes much of little
            for name, parameter in model.state_dict().items():
                moved = (after[name] - before[name]).abs().max()
                assert moved > 0 and (parameter - after[name]).abs().max() <= 1e-4 * moved, name


def test_nanochats_softmax_is_untouched_bit_by_bit(tree, base, tmp_path):
    plain, patched = tree("nanochat", patched=False), tree("nanochat")
    assert_equal(computed(plain, {}, tmp_path / "plain"), computed(patched, {}, tmp_path / "patched"))
    printed = [pretrain(at, base, tag) for at, tag in ((plain, "plain"), (patched, "patched"))]
    with pytest.raises(AssertionError, match="the checkpoint has --attention 'softmax', not 'gka'"):
        pretrain(patched, base, "patched", "--attention", "gka", "--gka-values", "normalised", "--resume-from-step", 3)
    assert losses(printed[0]) == losses(printed[1]) and len(losses(printed[0])) == 6
    folders = [base / "base_checkpoints" / tag for tag in ("plain", "patched")]
    metas = [json.loads((folder / "meta_000006.json").read_text())["model_config"] for folder in folders]
    assert metas[0] == metas[1]  # so that an unpatched nanochat reads it
    assert_equal(*(torch.load(folder / "model_000006.pt", weights_only=True) for folder in folders))


def test_nanochats_softmax_does_not_need_gka(tree):
    script = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "sys.modules['gka'] = None\n"
        "from nanochat.gpt import GPT, GPTConfig\n"
        "shape = dict(sequence_len=32, vocab_size=64, n_layer=2, n_head=2, n_kv_head=2, n_embd=64)\n"
        "GPT(GPTConfig(**shape)).init_weights()\n"
        "try:\n"
        "    GPT(GPTConfig(**shape, attention='gka'))\n"
        "except AssertionError as error:\n"
        "    print(error)\n"
    )
    assert "pip install" in run(tree("nanochat"), "-c", script)


REFUSED = {  # flags with which a run of that form is not resumed, and the reason
    "gka": [(["--resume-from-step", 3], "the checkpoint has --attention 'gka', not 'softmax'")],
    "gka-preset": [
        ([*flags({**PRESET, "head_gates": False}), "--resume-from-step", 3], "has --head-gates True, not False"),
        (["--head-gates"], "--head-gates needs --attention gka"),
        (flags({**PRESET, "head_offsets": "P2"}), "head_offsets must be made of the letters N, P, S"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_nanochat_trains_samples_resumes_and_evaluates_gka(tree, base, name):
    """The paper's form and the preset. The checkpoint says which it is, and ours reads it."""
    at, form = tree("nanochat"), FORMS[name]
    printed = pretrain(at, base, name, *flags(form))
    bpb = [float(value) for value in re.findall(r"Validation bpb: ([\d.]+)", printed)]
    assert len(bpb) == 3 and bpb[2] < bpb[0]
    assert printed.count("<|bos|>The capital of France is") == 1  # sampled with the KV cache
    again = pretrain(at, base, name, *flags(form), "--resume-from-step", 3)
    assert [step for step, _ in losses(again)] == ["00003", "00004", "00005"]
    for words, reason in REFUSED[name]:
        with pytest.raises(AssertionError, match=reason):
            pretrain(at, base, name, *words)
    model = load_upstream(base / "base_checkpoints" / name)
    stated = settings_of_today({"gka_values": "rotated", **form})
    assert {setting: getattr(model.config, setting) for setting in stated} == stated
    zero_at_first = ("channel_log_scales", "head_gate.weight")
    learned = [part for name, part in model.named_parameters() if name.endswith(zero_at_first)]
    assert len(learned) == (4 if form is PRESET else 0) and all(part.count_nonzero() for part in learned)
    assert all(sigma.isfinite().all() for sigma in model.bandwidths().values())
    assert re.search(r"val bpb: ([\d.]+)", evaluate(at, base, name, "sample,bpb"))


def test_several_gpus_move_the_presets_parameters_as_one_does(tree, tmp_path):
    """On gloo. Upstream deals large parameters of AdamW's out by their first dimension, which must be divisible."""
    printed = run(tree("nanochat"), SCRIPTS / "upstream_nanochat.py", 4, json.dumps(PRESET), tmp_path / "store")
    [names] = re.findall("^alike (.*)", printed, flags=re.M)
    assert {name.rpartition("attn.")[2] for name in names.split()} >= {"log_sigma", "channel_log_scales", "head_gate"}
