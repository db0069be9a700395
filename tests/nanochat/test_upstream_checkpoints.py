"""Checkpoints of upstream nanochat: ours computes the same, and what is not of its kind is one line."""

import dataclasses
import io
import json
import pickle

import pytest
import torch

import tiny
from nanochat_gka.model.checkpoints import load_upstream
from tiny_gpt import SHAPE, awake

UPSTREAM_FIELDS = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern")
CONFIG = {name: getattr(SHAPE, name) for name in UPSTREAM_FIELDS}
WHOLE = awake(SHAPE).state_dict()


def test_upstream_checkpoint_folder_loads(tmp_path):
    """Upstream's files: bf16 embeddings, the compiled-module prefix, a config with its seven fields."""
    model = awake(SHAPE)
    weights = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    tables = [name for name in weights if "wte" in name or "value_embeds" in name]
    weights |= {name: weights[name].bfloat16() for name in tables}
    torch.save(weights, tmp_path / "model_000123.pt")
    (tmp_path / "meta_000123.json").write_text(json.dumps({"step": 123, "model_config": CONFIG}))
    model.embeddings_to(torch.bfloat16)
    model.embeddings_to(torch.float32)
    ids = torch.randint(70, (1, 16))
    assert torch.equal(load_upstream(tmp_path)(ids), model(ids))
    assert load_upstream(tmp_path).config.attention == "softmax"
    with tiny.one_line_error("of step 7 in"):
        load_upstream(tmp_path, step=7)


@pytest.mark.parametrize("stated,values", [({}, "normalised"), ({"gka_values": "rotated"}, "rotated")], ids=str)
def test_patched_nanochat_checkpoint_keeps_its_form(tmp_path, stated, values):
    """The first patches mixed normalised values and did not write so."""
    model = awake(dataclasses.replace(SHAPE, attention="gka", gka_values=values))
    torch.save(model.state_dict(), tmp_path / "model_000001.pt")
    config = {name: getattr(model.config, name) for name in (*UPSTREAM_FIELDS, "attention")} | stated
    (tmp_path / "meta_000001.json").write_text(json.dumps({"step": 1, "model_config": config}))
    ids = torch.randint(70, (1, 16))
    assert torch.equal(load_upstream(tmp_path)(ids), model(ids))


def write(folder, weights, meta=None):
    """A checkpoint of weights, or of the bytes of a file."""
    meta = {"model_config": CONFIG} if meta is None else meta
    (folder / "meta_000001.json").write_text(json.dumps(meta))
    if isinstance(weights, bytes):
        (folder / "model_000001.pt").write_bytes(weights)
    else:
        torch.save(weights, folder / "model_000001.pt")


def saved(weights):
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


def test_a_later_nanochats_checkpoint_is_named(tmp_path):
    """Its settings are those of the pin; what it computes is in the names of its weights."""
    later = {"smear_gate.weight": torch.zeros(1, 24), "smear_lambda": torch.zeros(1), "backout_lambda": torch.zeros(1)}
    gates = {"transformer.h.1.attn.ve_gate.weight": torch.zeros(4, 12)}
    write(tmp_path, {**WHOLE, **later, **gates})
    names = "backout_lambda, smear_gate.weight, smear_lambda"
    with tiny.one_line_error(f"model_000001.pt is of a nanochat from after 2026-03-09, .* {names}"):
        load_upstream(tmp_path)


REFUSED = {
    "cut": (saved(WHOLE)[: 10**5], {}, "is damaged, cut short"),
    "numbers": ({**WHOLE, "x": 3}, {}, "does not hold weights by name"),
    "module": (awake(SHAPE), {}, "is refused: it holds more than weights"),
    "more": ({**WHOLE, "a": WHOLE["x0_lambdas"]}, {}, "no weights a$"),
    "fewer": ({n: w for n, w in WHOLE.items() if "wte" not in n}, {}, "lacks the weights transformer.wte.weight$"),
    "no shape": (WHOLE, {"model_config": None}, "meta_000001.json has no model_config"),
    "text": (WHOLE, {"model_config": {**CONFIG, "n_layer": "4"}}, "n_layer must be a whole number, got '4'"),
    "unknown": (WHOLE, {"model_config": {**CONFIG, "smear": True}}, "not known here: smear"),
}


@pytest.mark.parametrize("weights, meta, message", REFUSED.values(), ids=REFUSED)
def test_other_files_are_one_line(weights, meta, message, tmp_path):
    write(tmp_path, weights, meta or None)
    with tiny.one_line_error(message):
        load_upstream(tmp_path)


def test_upstream_pickles_are_not_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'pwned')!r}, 'w')",))

    write(tmp_path, pickle.dumps(Evil(), protocol=2))
    with tiny.one_line_error("model_000001.pt is refused: it holds more than weights, .* nothing of it was executed"):
        load_upstream(tmp_path)
    assert not (tmp_path / "pwned").exists()
