"""Trainings with an approximation: what it computes, that it learns, sees no future, and becomes rows and a table."""

from pathlib import Path

import pytest
import timm
import torch

import deit_gka.model.registry  # noqa: F401  timm then knows our layers
from gka import gaussian_attention, testing
from nanochat_gka.model.config import GPTConfig
from runs.neighbours import trainings
from runs.neighbours.approximations import __main__ as command
from runs.neighbours.approximations import training
from runs.neighbours.approximations.forms import BEST, WINDOW
from runs.neighbours.approximations.training import APPROXIMATE, EXACT, Approximation, Size
from tiny_gpt import awake

H, D = 2, 4
FORMS = pytest.mark.parametrize("form", APPROXIMATE)
MASKS = pytest.mark.parametrize("causal", [False, True])


def built(form, size, seed=0):
    torch.manual_seed(seed)
    return Approximation(form, size, H, D).double()


def case(tokens):
    torch.manual_seed(1)
    return torch.randn(3, tokens, H, D, dtype=torch.float64), torch.tensor([0.2, 0.5], dtype=torch.float64)


@MASKS
@FORMS
def test_a_window_that_holds_all_is_exact(form, causal):
    x, log_sigma = case(21)
    y = built(form, Size(21, 5))(x, x, x, log_sigma, causal)
    assert testing.error(y, gaussian_attention(x, log_sigma, causal=causal, eps=0.0)) < 1e-9


@MASKS
def test_landmarks_at_all_tokens_are_exact_beyond_the_window(causal):
    x, log_sigma = case(20)
    x = x[:1].expand(3, -1, -1, -1)
    approximation = built(BEST, Size(4, 20))
    approximation.landmarks.data = x[0].transpose(0, 1).clone()
    exact = gaussian_attention(x.contiguous(), log_sigma, causal=causal, eps=0.0)
    assert testing.error(approximation(x, x, x, log_sigma, causal), exact) < 1e-3  # of the ridge
    assert testing.error(built(WINDOW, Size(4, 20))(x, x, x, log_sigma, causal), exact) > 0.03


@pytest.mark.parametrize("offsets", ["N", "PS"])
@FORMS
def test_a_gpt_mixes_approximately_and_sees_no_later_token(form, offsets):
    config = GPTConfig(
        sequence_len=32, vocab_size=50, n_layer=2, n_head=2, n_kv_head=2, n_embd=64, value_embeds="none",
        attention="gka", head_offsets=offsets, gka_values="normalised",
    )  # fmt: skip
    model, exact = awake(config), awake(config)
    training.plug(model, form, Size(8, 4))
    ids = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(2))
    changed = ids.clone()
    changed[:, 20:] = (ids[:, 20:] + 7) % 50
    with torch.no_grad():
        logits, later, exactly = model(ids), model(changed), exact(ids)
    assert torch.equal(later[:, :20], logits[:, :20])
    assert not torch.allclose(later[:, 20:], logits[:, 20:], atol=1e-5)
    assert 1e-4 < testing.error(logits, exactly.double()) < 0.5
    flags = trainings.language_config(["--attention", "gka"], 0, 4, Path("packed"), Path("out"))
    kinds = {n: g.kind for g in trainings.groups_of(model, flags, flags.horizon(model, 1)) for n in g.names}
    assert kinds.keys() == dict(model.named_parameters()).keys()
    assert kinds.get("transformer.h.0.attn.mixing.landmarks", "adamw") == "adamw"


@FORMS
def test_a_vision_model_mixes_approximately_and_learns(form):
    arguments = dict(patch_size=2, embed_dim=64, depth=2, num_heads=4, img_size=32, num_classes=10)
    models = []
    for name in (EXACT, form):
        torch.manual_seed(0)
        models.append(timm.create_model("deit_tiny_patch16_224", attn_layer=training.timm_name(name), **arguments))
    exact, model = models
    model.load_state_dict(exact.state_dict(), strict=False)  # what landmarks draw moves the generator
    images = torch.randn(2, 3, 32, 32)
    logits = model(images)
    assert 1e-4 < testing.error(logits, exact(images).double()) < 0.8
    logits.square().sum().backward()
    learned = dict(model.blocks[0].attn.named_parameters())
    assert ("approximation.landmarks" in learned) == (form == BEST)
    assert all(parameter.grad.abs().max() > 0 for parameter in learned.values())


def test_trainings_become_rows_once_and_a_stopped_one_none(tmp_path, monkeypatch):
    asked = []

    def train(form, seed, length, out):
        asked.append((form, seed))
        return None if seed == 2 else {"val_bpb": 2.5 + seed / 10, "settings": {"depth": 2, "width": 64}}

    monkeypatch.setitem(training.TRAIN, "language", train)
    fields = dict(parts=["training"], tasks=["language"], forms=[WINDOW], steps=9, results=tmp_path / "rows.jsonl")
    for seeds in (2, 2, 3):  # a signal ends the third seed, and with it the command
        command.main(command.ApproximationsConfig(**fields, seeds=seeds))
    assert asked == [(EXACT, 0), (WINDOW, 0), (EXACT, 1), (WINDOW, 1), (EXACT, 2)]
    assert len(fields["results"].read_text().splitlines()) == 4


def test_the_example_of_the_page_runs(capsys):
    page = Path(training.__file__).with_name("README.md").read_text()
    torch.manual_seed(0)
    exec(compile(page.split("```python")[1].split("```")[0], "example", "exec"), {})
    off = int(capsys.readouterr().out.split("off by ")[1].split("%")[0])
    assert 0 < off < 10  # the window alone is off by 26
