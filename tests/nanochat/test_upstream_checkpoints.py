"""Checkpoints of upstream nanochat: ours computes the same, and a file of anything else is one line."""

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
WEIGHTS = awake(SHAPE).state_dict()


def write(folder, weights, meta=None, step=1):
    """A checkpoint of weights, or of the bytes of a file."""
    meta = {"model_config": CONFIG} if meta is None else meta
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, **meta}))
    if isinstance(weights, bytes):
        (folder / f"model_{step:06d}.pt").write_bytes(weights)
    else:
        torch.save(weights, folder / f"model_{step:06d}.pt")


def saved(weights):
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


def test_upstream_checkpoint_folder_loads(tmp_path):
    """Upstream's files: bf16 embeddings, the compiled-module prefix, a config with its seven fields."""
    model = awake(SHAPE)
    model.embeddings_to(torch.bfloat16)
    write(tmp_path, {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}, step=123)
    model.embeddings_to(torch.float32)
    ids = torch.randint(70, (1, 16))
    assert torch.equal(load_upstream(tmp_path)(ids), model(ids))
    assert load_upstream(tmp_path).config.attention == "softmax"
    with tiny.one_line_error("of step 7 in"):
        load_upstream(tmp_path, step=7)


@pytest.mark.parametrize("stated, values", [({}, "normalised"), ({"gka_values": "rotated"}, "rotated")], ids=str)
def test_patched_nanochat_checkpoint_keeps_its_form(tmp_path, stated, values):
    """The first patches mixed normalised values and did not write so."""
    model = awake(dataclasses.replace(SHAPE, attention="gka", gka_values=values))
    write(tmp_path, model.state_dict(), {"model_config": {**CONFIG, "attention": "gka", **stated}})
    ids = torch.randint(70, (1, 16))
    assert torch.equal(load_upstream(tmp_path)(ids), model(ids))


LATER = {"smear_gate.weight": torch.zeros(1, 24), "backout_lambda": torch.zeros(1)}  # settings are those of the pin
REFUSED = {
    "later": ({**WEIGHTS, **LATER}, {}, "from after 2026-03-09, by its backout_lambda, smear_gate.weight"),
    "cut": (saved(WEIGHTS)[: 10**5], {}, "is damaged, cut short"),
    "numbers": ({**WEIGHTS, "x": 3}, {}, "does not hold weights by name"),
    "module": (awake(SHAPE), {}, "is refused: it holds more than weights"),
    "more": ({**WEIGHTS, "a": WEIGHTS["x0_lambdas"]}, {}, 'Unexpected key.* "a"'),
    "fewer": ({n: w for n, w in WEIGHTS.items() if "wte" not in n}, {}, "Missing key.* .transformer.wte.weight"),
    "shape": (WEIGHTS, {"model_config": {**CONFIG, "vocab_size": 200}}, "size mismatch for value_embeds.3.weight"),
    "no shape": (WEIGHTS, {"model_config": None}, "meta_000001.json has no model_config"),
    "text": (WEIGHTS, {"model_config": {**CONFIG, "n_layer": "4"}}, "n_layer must be a whole number, got '4'"),
    "unknown": (WEIGHTS, {"model_config": {**CONFIG, "smear": True}}, "not known here: smear"),
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
    with tiny.one_line_error("model_000001.pt is refused"):
        load_upstream(tmp_path)
    assert not (tmp_path / "pwned").exists()
