"""How the methods of Table 1 are measured: the gate, the hooks into both trainers' models, rows and their table."""

import json
from pathlib import Path

import pytest
import timm
import torch

from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from runs.frames import RESULTS
from runs.neighbours import __main__ as command
from runs.neighbours import speed, trainings
from runs.neighbours.cases import Cases
from runs.neighbours.layers import ABOUT, BUILT, by_equation, layer
from runs.neighbours.methods import MixingLayer, Performer
from runs.tables import neighbours
from shown import cells
from trainkit_gka.cli import UserError

CAUSAL = [name for name in BUILT if ABOUT[name].causal]


@pytest.mark.parametrize("name", ABOUT)
def test_every_layer_passes_the_gate(name):
    assert speed.gate(name, [29]) is None


def test_the_gate_refuses_a_layer_that_is_not_its_equation(monkeypatch):
    right = Performer.forward
    monkeypatch.setattr(Performer, "forward", lambda self, q, k, v: right(self, q, k, v) * 1.001)
    assert "y is off by" in speed.gate("performer", [29])


def test_the_gate_compares_the_causal_form_too(monkeypatch):
    right = Performer.forward

    def forward(self, q, k, v):
        y = right(self, q, k, v)
        return y.roll(1, 2) if self.causal else y

    monkeypatch.setattr(Performer, "forward", forward)
    assert "y is off by" in (said := speed.gate("performer", [29])) and said.endswith("(29 tokens, causal)")


@pytest.mark.parametrize("name", ABOUT)
def test_the_gate_refuses_a_wrong_gradient_of_a_parameter(name, monkeypatch):
    def wrong(*arguments, **settings):
        built = layer(*arguments, **settings)
        built.get_parameter(parameter).register_hook(lambda gradient: gradient * 1.001)  # copies have no hooks
        return built

    monkeypatch.setattr(speed, "layer", wrong)
    for parameter, _ in layer(name, 8).named_parameters():
        assert f"d {parameter} is off by" in speed.gate(name, [29])


def test_a_layer_by_its_equation_is_another_computation():
    """The oracle of our kinds builds W; that of the others runs `exact`."""
    assert by_equation(layer("gka", 8)).fused_attn is False
    copied = by_equation(layer("krause", 8))
    assert copied.mixing.forward == copied.mixing.exact


def test_a_wrong_layer_is_a_row_with_its_reason_and_is_not_timed(monkeypatch):
    backward = []

    def watched(name, tokens):
        built = layer(name, tokens)
        built.proj.bias.register_hook(lambda gradient: backward.append(name))
        return built

    monkeypatch.setattr(speed, "layer", watched)
    monkeypatch.setattr(speed, "gate", lambda name: "y is wrong" if name == "krause" else None)
    numbers = speed.time_layers(["krause", "linformer"], 17, rounds=2)
    assert numbers["krause"] == {"failed": "y is wrong"} and set(backward) == {"linformer"}
    timed = numbers["linformer"]
    assert timed["samples"] == 2 and timed["forward_ms"] > 0
    assert timed["both_low_ms"] <= timed["both_ms"] <= timed["both_high_ms"]


def test_the_peak_of_memory_is_what_the_work_holds():
    assert 120 < speed.peak_mib(lambda: torch.ones(2**25)) < 140  # 128 MiB, which are given back


def test_timm_builds_its_vit_with_the_method():
    arguments = dict(patch_size=4, embed_dim=64, depth=2, num_heads=4, img_size=16, num_classes=10)
    model = timm.create_model("deit_tiny_patch16_224", attn_layer=trainings.timm_name("linformer"), **arguments)
    assert all(isinstance(block.attn, MixingLayer) for block in model.blocks)
    assert model.blocks[0].attn.mixing.compress_keys.shape == (8, trainings.DIGIT_TOKENS)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 10)
    # timm initialises the linear maps as its own attention's
    assert model.blocks[0].attn.inputs.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_gpt_mixes_with_the_method_and_sees_no_later_token(name):
    torch.manual_seed(0)
    shape = dict(sequence_len=16, vocab_size=50, n_layer=2, n_head=2, n_kv_head=2, n_embd=64, value_embeds="none")
    config = GPTConfig(**shape, attention=trainings.base(name)[1])
    model, untouched = build(config, "cpu"), build(config, "cpu")
    trainings.plug(model, name)
    untouched.load_state_dict({k: v for k, v in model.state_dict().items() if ".mixing." not in k}, strict=False)
    for gpt in (model, untouched):
        for block in gpt.transformer.h:  # projections to the residual start at 0
            torch.nn.init.normal_(block.attn.c_proj.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(2))
    changed = ids.clone()
    changed[:, 9:] = (ids[:, 9:] + 7) % 50
    with torch.no_grad():
        logits, later, by_base = model(ids), model(changed), untouched(ids)
    if name == "kernelized-rpe":  # Fourier transforms carry their rounding to all tokens
        torch.testing.assert_close(later[:, :9], logits[:, :9], rtol=1e-3, atol=1e-6)
    else:
        assert torch.equal(later[:, :9], logits[:, :9])
    assert not torch.allclose(later[:, 9:], logits[:, 9:], atol=1e-5)
    assert not torch.allclose(by_base, logits, atol=1e-5)


@pytest.mark.parametrize("name, own", [("kernelized-rpe", {"c_q", "c_k", "c_v", "mixing"}), ("non-local-means", set())])
def test_a_gpt_learns_what_its_method_has_and_no_position_by_muon(name, own):
    config = trainings.language_config(name, 0, 4, Path("packed"), Path("out"))
    model = build(config.shape(2, 16, 50), "cpu")
    trainings.plug(model, name)
    assert {key.split(".")[0] for key, _ in model.attentions[0].named_parameters()} == {"c_proj", *own}
    kinds = {n: g.kind for g in trainings.groups_of(model, config, config.horizon(model, 1)) for n in g.names}
    assert kinds.keys() == dict(model.named_parameters()).keys()
    assert kinds["transformer.h.0.attn.c_proj.weight"] == "muon"
    assert kinds.get("transformer.h.0.attn.mixing.bias", "adamw") == "adamw"


# Rows and table


def test_the_command_measures_every_part_once(packed, tmp_path, capsys):
    small = dict(what=["speed", "language"], methods=["krause"], tokens=[17, 17], rounds=2, seeds=1, steps=2)
    places = dict(packed=packed / "packed", out=tmp_path / "out", results=tmp_path / "results")
    command.main(command.NeighboursConfig(**small, **places))
    rows = {path.stem: [json.loads(line) for line in path.open()] for path in places["results"].iterdir()}
    assert {part: len(lines) for part, lines in rows.items()} == dict(speed=1, language=1)
    numbers = {part: lines[0]["metrics"] for part, lines in rows.items()}
    assert numbers["speed"]["forward_ms"] > 0 and numbers["speed"]["samples"] == 2
    assert 1 < numbers["language"]["val_bpb"] < 10
    assert "nothing new" not in capsys.readouterr().out
    command.main(command.NeighboursConfig(**small, **places))
    assert capsys.readouterr().out.count("nothing new") == 2
    assert all(len(path.read_text().splitlines()) == 1 for path in places["results"].iterdir())
    table = neighbours.table_1(places["results"])
    assert cells(table, "Krause")["language: bits per byte"] == "not run"  # two steps are not the table's 400
    with pytest.raises(UserError, match="got reformer"):
        command.main(command.NeighboursConfig(**{**small, "methods": ["gka", "reformer"]}, **places))


def test_rows_of_earlier_versions_are_not_measured_again():
    digits = Cases(RESULTS / "neighbours/digits.jsonl", "neighbours-digits")
    assert digits.has({"method": "gka", "seed": 0, "epochs": 50}) and len(digits.known) == 55
    assert not digits.has({"method": "gka", "seed": 0, "epochs": 40})
    flat = Cases(RESULTS / "neighbours/approximations.jsonl", "approximation")  # without settings beside the case
    assert flat.has(dict(part="error", source="random", tokens=1024, form="exact, fused", size=0, seed=0))
