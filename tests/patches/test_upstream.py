"""The patched upstreams themselves: they train, generate, save and resume, compute what our trainers compute, and softmax is untouched.

Needs the upstream trees, from `make vendor` or NANOCHAT_SRC and DEIT_SRC, and what they import (patches/requirements.txt): `make test-patches`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from nanochat_gka.model.checkpoints import load_upstream
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from trainkit.distributed import Runtime

pytestmark = pytest.mark.upstream
PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests/support"
SIZE = "--depth 2 --aspect-ratio 32 --head-dim 32 --max-seq-len 64 --device-batch-size 2 --total-batch-size 128"
SCHEDULE = "--num-iterations 6 --eval-every 3 --eval-tokens 256 --core-metric-every -1 --sample-every 6 --save-every 3"


def run(at, *command, **environment):
    """What a command prints. torch.compile is off: it takes most of a minute and is not the patches'."""
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(PROJECT), **environment}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=at, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A function: the checkout of an upstream, patched or not, made once."""
    made = {}

    def get(name, patched=True):
        if (name, patched) not in made:
            variable = f"{name.upper()}_SRC"
            source = os.environ.get(variable) or PROJECT / "vendor" / name
            if not Path(source).exists():
                pytest.skip(f"there is no {name} here: run `make vendor`, or set {variable}")
            for module in {"nanochat": ["tokenizers", "wandb", "psutil"], "deit": ["timm"]}[name]:
                if importlib.util.find_spec(module) is None:
                    pytest.skip(f"{name} imports {module}: pip install -r patches/requirements.txt")
            checkout = tmp_path_factory.mktemp("upstream") / name
            for action in ["vendor", "apply"][: 1 + patched]:
                run(PROJECT, "patches/apply.py", action, name, "--tree", checkout, **{variable: str(source)})
            made[name, patched] = checkout
        return made[name, patched]

    return get


# nanochat


@pytest.fixture(scope="module")
def base(tree, tmp_path_factory):
    """A nanochat base folder with data and a tokenizer."""
    base = tmp_path_factory.mktemp("base")
    run(PROJECT, "-m", "nanochat_gka.corpus", "--source", "builtin", "--out", base / "base_data")
    run(
        tree("nanochat"),
        "-m",
        "scripts.tok_train",
        "--max-chars",
        500_000,
        "--vocab-size",
        512,
        NANOCHAT_BASE_DIR=str(base),
    )
    return base


def pretrain(at, base, tag, *flags):
    command = [
        "-m",
        "scripts.base_train",
        *SIZE.split(),
        *SCHEDULE.split(),
        "--device-type",
        "cpu",
        "--model-tag",
        tag,
        *flags,
    ]
    return run(at, *command, NANOCHAT_BASE_DIR=str(base))


def losses(printed):
    return re.findall(r"^step (\d+)/.*?loss: ([\d.]+)", printed, flags=re.M)


def computed(at, attention, out):
    run(at, TESTS / "upstream_nanochat.py", out, attention)
    return load_file(out)


@pytest.mark.parametrize(
    "name,form",
    [
        ("softmax", {}),
        ("gka", {"attention": "gka"}),
        ("gka-normalised", {"attention": "gka", "gka_values": "normalised"}),
    ],
    ids=["softmax", "gka", "gka-normalised"],
)
def test_nanochat_computes_what_ours_does(tree, tmp_path, name, form):
    """Initialisation bit by bit, logits and one step of the optimiser to rounding."""
    want = computed(tree("nanochat"), name, tmp_path / "out")
    torch.manual_seed(1)
    config = GPTConfig(
        sequence_len=32, vocab_size=100, n_layer=4, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SSL", **form
    )
    model = build(config, "cpu")

    def theirs(prefix):
        return {name.removeprefix(prefix): tensor for name, tensor in want.items() if name.startswith(prefix)}

    assert_equal(model.state_dict(), theirs("init."))
    model.load_state_dict(theirs("start."))
    row, column = torch.arange(3)[:, None], torch.arange(35)[None]
    ids = (7 * row + 3 * column + column * column) % 100
    torch.testing.assert_close(model(ids), want["logits"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        want["cached"], want["logits"], rtol=1e-5, atol=1e-5
    )  # its KV cache, in passes of several sizes

    rates = OptimConfig(unembedding_lr=0.004, embedding_lr=0.3, matrix_lr=0.02, weight_decay=0.2, scalar_lr=0.5)
    optimizer = MuonAdamW(parameter_groups(model, rates), Runtime(0, 1, torch.device("cpu")))
    before = theirs("start.")
    for step in range(2):
        loss = model(ids[:, :32], ids[:, 1:33])
        assert loss.item() == pytest.approx(want[f"loss.{step}"].item(), rel=1e-5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # after it, Muon's bfloat16 makes much of little
            for name, parameter in model.state_dict().items():
                moved = (want[f"step0.{name}"] - before[name]).abs().max()
                assert moved > 0 and (parameter - want[f"step0.{name}"]).abs().max() <= 1e-4 * moved, name


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_nanochats_softmax_is_untouched_bit_by_bit(tree, base, tmp_path):
    plain, patched = tree("nanochat", patched=False), tree("nanochat")
    assert_equal(computed(plain, "softmax", tmp_path / "plain"), computed(patched, "softmax", tmp_path / "patched"))
    printed = [pretrain(at, base, tag) for at, tag in ((plain, "plain"), (patched, "patched"))]
    assert losses(printed[0]) == losses(printed[1]) and len(losses(printed[0])) == 6
    metas = [
        json.loads((base / "base_checkpoints" / tag / "meta_000006.json").read_text())["model_config"]
        for tag in ("plain", "patched")
    ]
    assert metas[0] == metas[1]  # so that an unpatched nanochat reads it
    weights = [
        torch.load(base / "base_checkpoints" / tag / "model_000006.pt", weights_only=True)
        for tag in ("plain", "patched")
    ]
    assert_equal(*weights)


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


def test_nanochat_trains_generates_saves_and_resumes_gka(tree, base):
    at = tree("nanochat")
    printed = pretrain(at, base, "gka", "--attention", "gka")
    bpb = [float(value) for value in re.findall(r"Validation bpb: ([\d.]+)", printed)]
    assert len(bpb) == 3 and bpb[2] < bpb[0]
    assert "value_embeds            : 0" in printed
    assert printed.count("<|bos|>The capital of France is") == 1  # sampled with the KV cache
    again = pretrain(at, base, "gka", "--attention", "gka", "--resume-from-step", 3)
    assert [step for step, _ in losses(again)] == ["00003", "00004", "00005"]
    # The checkpoint says what it is; ours reads it.
    folder = base / "base_checkpoints" / "gka"
    meta = json.loads((folder / "meta_000006.json").read_text())
    assert (meta["model_config"]["attention"], meta["model_config"]["gka_values"]) == ("gka", "rotated")
    model = load_upstream(folder)
    assert (model.config.attention, model.config.gka_values) == ("gka", "rotated") and all(
        sigma.isfinite().all() for sigma in model.bandwidths().values()
    )
    shown = run(at, "-m", "scripts.base_eval", "--eval", "sample,bpb", "--model-tag", "gka", "--split-tokens", 256, "--device-batch-size", 2,
                "--device-type", "cpu", NANOCHAT_BASE_DIR=str(base))  # fmt: skip
    assert re.search(r"val bpb: ([\d.]+)", shown)


def test_a_checkpoint_of_earlier_patches_keeps_its_form(tree, base):
    """They mixed normalised values, and their checkpoints do not say so: it is evaluated as that, and resumed as nothing else."""
    at, forms = tree("nanochat"), ("--attention", "gka", "--gka-values", "normalised")
    pretrain(at, base, "earlier", *forms)
    folder, bpb = base / "base_checkpoints" / "earlier", {}

    def evaluate():
        flags = [
            "--eval",
            "bpb",
            "--model-tag",
            "earlier",
            "--split-tokens",
            256,
            "--device-batch-size",
            2,
            "--device-type",
            "cpu",
        ]
        return re.search(r"val bpb: ([\d.]+)", run(at, "-m", "scripts.base_eval", *flags, NANOCHAT_BASE_DIR=str(base)))[
            1
        ]

    for step in ("000003", "000006"):
        meta = json.loads((folder / f"meta_{step}.json").read_text())
        for form in ("rotated", "normalised", None):
            meta["model_config"]["gka_values"] = form
            if form is None:
                del meta["model_config"]["gka_values"]
            (folder / f"meta_{step}.json").write_text(json.dumps(meta))
            if step == "000006":
                bpb[form] = evaluate()
    assert bpb["normalised"] == bpb[None] != bpb["rotated"]
    assert load_upstream(folder).config.gka_values == "normalised"
    with pytest.raises(AssertionError, match="the checkpoint has --gka-values normalised"):
        pretrain(at, base, "earlier", "--attention", "gka", "--resume-from-step", 3)
    assert losses(pretrain(at, base, "earlier", *forms, "--resume-from-step", 3))


def test_nanochats_engine_generates_what_the_model_does(tree, base, tmp_path):
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
        "config = GPTConfig(sequence_len=32, vocab_size=512, n_layer=4, n_head=2, n_kv_head=2, n_embd=64, attention='gka')\n"
        "model = GPT(config)\n"
        "model.init_weights()\n"
        "with torch.no_grad():\n"
        "    [p.add_(0.1 * torch.randn_like(p)) for p in model.parameters()]\n"
        "engine = Engine(model, tokenizer)\n"
        "for length in (3, 20, 28):\n"
        "    prompt = [tokenizer.get_bos_token_id(), *range(5, 4 + length)]\n"
        "    plain = list(model.generate(prompt, 40, temperature=0))\n"
        "    cached = [tokens for tokens, _ in engine.generate(prompt, num_samples=3, max_tokens=40, temperature=0)]\n"
        "    assert len(set(plain)) > 5, plain\n"
        "    for sample in zip(*cached):\n"
        "        assert list(sample) == plain[: len(sample)] and len(sample) == 40, (plain, sample)\n"
        "print('alike')\n"
    )
    assert "alike" in run(tree("nanochat"), script, NANOCHAT_BASE_DIR=str(base))


# DeiT


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Class folders of random JPEGs."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(random.integers(0, 255, (80, 70, 3), dtype=np.uint8))
                picture.save(folder / split / name / f"{number}.jpg")
    return folder


def deit(at, images, out, model, *flags):
    command = [TESTS / "upstream_deit.py", "main", "--model", model, "--data-path", images, "--input-size", 64, "--batch-size", 4, "--device", "cpu",
               "--num_workers", 1, "--output_dir", out, "--epochs", 2, "--warmup-epochs", 1, *flags]  # fmt: skip
    return run(at, *command)


def log(out):
    return [json.loads(line) for line in (out / "log.txt").read_text().splitlines()]


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
@pytest.mark.parametrize("kind", ["gka", "vlt"])
def test_deit_builds_our_models_and_takes_a_step(tree, size, kind):
    script = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "import timm_compat, torch, timm, models, models_v2, deit_gka\n"
        f"model = timm.create_model('deit_{size}_{kind}_patch16_224', num_classes=10, img_size=64, drop_rate=0.0, drop_path_rate=0.1, drop_block_rate=None)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "before = [p.clone() for p in model.parameters()]\n"
        "torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.arange(4)).backward()\n"
        "optimizer.step()\n"
        "assert all(p.isfinite().all() for p in model.parameters())\n"
        "moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters())]\n"
        "assert all(moved), [n for (n, _), m in zip(model.named_parameters(), moved) if not m]\n"
        "print('stepped')\n"
    )
    assert "stepped" in run(tree("deit"), "-c", script)


def test_deit_trains_resumes_and_evaluates_gka(tree, images, tmp_path):
    at, name = tree("deit"), "deit_tiny_gka_patch16_224"
    deit(at, images, tmp_path, name, "--clip-grad", 1.0, "--min-lr", 1e-6)
    assert [line["epoch"] for line in log(tmp_path)] == [0, 1]
    assert all(
        np.isfinite(line[key])
        for line in log(tmp_path)
        for key in ("train_loss", "test_acc1", "test_ema_acc1", "test_ema_loss")
    )
    deit(at, images, tmp_path, name, "--resume", tmp_path / "checkpoint.pth", "--epochs", 3)
    assert [line["epoch"] for line in log(tmp_path)] == [0, 1, 2]
    assert "Accuracy of the network on the 8 test images" in deit(
        at, images, tmp_path, name, "--resume", tmp_path / "checkpoint.pth", "--eval"
    )


def test_deits_softmax_is_untouched_bit_by_bit(tree, tmp_path):
    found = []
    for patched in (False, True):
        out = tmp_path / str(patched)
        run(tree("deit", patched), TESTS / "upstream_deit.py", "model", out)
        found.append(load_file(out))
    assert_equal(*found)


def test_evaluating_the_average_changes_nothing_else(tree, images, tmp_path, tmp_path_factory):
    """Upstream's main.py does not start with today's timm, so the tree to compare with has the first patch alone."""
    first = tmp_path_factory.mktemp("first")
    git = ["git", "-C", str(tree("deit", patched=False))]
    subprocess.run([*git, "worktree", "add", "-q", "--detach", str(first / "deit")], check=True, capture_output=True)
    patch = PROJECT / "patches" / "deit" / "0001-timm-1.patch"
    subprocess.run(["git", "-C", str(first / "deit"), "apply", "--unidiff-zero", str(patch)], check=True)
    logs = []
    for at, out in ((first / "deit", tmp_path / "first"), (tree("deit"), tmp_path / "all")):
        deit(at, images, out, "deit_tiny_patch16_224")
        logs.append(log(out))
    for one, other in zip(*logs, strict=True):
        assert one == {key: value for key, value in other.items() if "ema" not in key}
        assert "test_ema_acc1" in other
