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


def test_nanochat_trains_samples_and_resumes_gka(tree, base):
    at = tree("nanochat")
    printed = pretrain(at, base, "gka", "--attention", "gka")
    bpb = [float(value) for value in re.findall(r"Validation bpb: ([\d.]+)", printed)]
    assert len(bpb) == 3 and bpb[2] < bpb[0]
    assert "value_embeds            : 0" in printed
    assert printed.count("<|bos|>The capital of France is") == 1  # sampled with the KV cache
    again = pretrain(at, base, "gka", "--attention", "gka", "--resume-from-step", 3)
    assert [step for step, _ in losses(again)] == ["00003", "00004", "00005"]
    with pytest.raises(AssertionError, match="the checkpoint has --attention 'gka', not 'softmax'"):
        pretrain(at, base, "gka", "--resume-from-step", 3)
    # The checkpoint says what it is; ours reads it.
    folder = base / "base_checkpoints" / "gka"
    meta = json.loads((folder / "meta_000006.json").read_text())
    assert (meta["model_config"]["attention"], meta["model_config"]["gka_values"]) == ("gka", "rotated")
    model = load_upstream(folder)
    assert (model.config.attention, model.config.gka_values) == ("gka", "rotated")
    assert all(sigma.isfinite().all() for sigma in model.bandwidths().values())
    assert re.search(r"val bpb: ([\d.]+)", evaluate(at, base, "gka", "sample,bpb"))


def test_nanochat_trains_samples_and_resumes_the_preset(tree, base):
    """What `make pretrain-d20-best` trains; the checkpoint says so, and another form is refused."""
    at = tree("nanochat")
    printed = pretrain(at, base, "best", *flags(PRESET))
    assert printed.count("<|bos|>The capital of France is") == 1
    model = load_upstream(base / "base_checkpoints" / "best")
    assert {name: getattr(model.config, name) for name in PRESET} == settings_of_today(PRESET)
    parts = [part for layer in model.attentions for part in (layer.channel_log_scales, layer.head_gate.weight)]
    assert len(parts) == 4 and all(part.count_nonzero() for part in parts)  # learned: they start at 0
    assert losses(pretrain(at, base, "best", *flags(PRESET), "--resume-from-step", 3))
    without_gates = flags({**PRESET, "head_gates": False})
    for refused, reason in (
        ([*without_gates, "--resume-from-step", 3], "the checkpoint has --head-gates True, not False"),
        (["--head-gates"], "--head-gates needs --attention gka"),
        (flags({**PRESET, "head_offsets": "P2"}), "head_offsets must be made of the letters N, P, S"),
    ):
        with pytest.raises(AssertionError, match=reason):
            pretrain(at, base, "best", *refused)
    assert re.search(r"val bpb: ([\d.]+)", evaluate(at, base, "best", "sample,bpb"))


def test_several_gpus_move_the_presets_parameters_as_one_does(tree, tmp_path):
    """On gloo. Upstream deals large parameters of AdamW's out by their first dimension, which must be divisible."""
    printed = run(tree("nanochat"), SCRIPTS / "upstream_nanochat.py", 4, json.dumps(PRESET), tmp_path / "store")
    [names] = re.findall("^alike (.*)", printed, flags=re.M)
    assert {name.rpartition("attn.")[2] for name in names.split()} >= {"log_sigma", "channel_log_scales", "head_gate"}


@pytest.mark.parametrize("form", [{"attention": "gka"}, PRESET], ids=["paper", "preset"])
def test_nanochats_engine_generates_what_the_model_does(tree, base, tmp_path, form):
    """Greedily, past both windows, and several samples at once."""
    script = tmp_path / "generate.py"
    script.write_text(
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "import torch\n"
        "from nanochat.engine import Engine\n"
        "from nanochat.gpt import GPT, GPTConfig\n"
        "from nanochat.tokenizer import get_tokenizer\n"
        "torch.manual_seed(0)\n"
        "tokenizer = get_tokenizer()\n"
        "shape = dict(sequence_len=32, vocab_size=512, n_layer=4, n_head=2, n_kv_head=2, n_embd=64)\n"
        f"model = GPT(GPTConfig(**shape, **{form}))\n"
        "model.init_weights()\n"
        "ends = [tokenizer.get_bos_token_id(), tokenizer.encode_special('<|assistant_end|>')]\n"
        "with torch.no_grad():\n"
        "    [p.add_(0.1 * torch.randn_like(p)) for p in model.parameters()]\n"
        "    model.lm_head.weight[ends] = 0 # never the likeliest, so that no text ends before the windows\n"
        "engine = Engine(model, tokenizer)\n"
        "for length in (3, 20, 28):\n"
        "    prompt = [tokenizer.get_bos_token_id(), *range(5, 4 + length)]\n"
        "    plain = list(model.generate(prompt, 40, temperature=0))\n"
        "    cached = [tokens for tokens, _ in engine.generate(prompt, num_samples=3, max_tokens=40, temperature=0)]\n"
        "    assert len(set(plain)) > 5, plain\n"
        "    samples = list(zip(*cached))\n"
        "    assert len(samples) == 3\n"
        "    for sample in samples:\n"
        "        assert list(sample) == plain, (plain, sample)\n"
        "print('alike')\n"
    )
    assert "alike" in run(tree("nanochat"), script, NANOCHAT_BASE_DIR=str(base))
