"""Language models in onnxruntime: prefill, and decoding token by token, beside torch."""

import dataclasses
import importlib.util

import pytest
import torch

from nanochat_gka import export
from nanochat_gka.model import onnx as language
from tiny_gpt import SHAPE, awake, write_run
from trainkit_gka import onnx
from trainkit_gka.cli import UserError, run

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in onnx.NEEDED),
    reason='needs the extra: pip install -e ".[onnx]"',
)
HYBRID = dict(attention="VGA", head_offsets="PNS", offset_layers="all", gka_values="normalised", value_embeds="all")
HYBRID |= dict(channel_bandwidths=True, head_gates=True)


@pytest.mark.slow
def test_export_writes_onnx_that_prefills_and_decodes_as_torch(tokenized, tokenizer, tmp_path):
    """Three rows of more tokens than the windows: at once, in two parts, and one by one."""
    model = awake(dataclasses.replace(SHAPE, n_layer=3, vocab_size=tokenizer.vocab_size, **HYBRID)).eval()
    folder = write_run(tmp_path / "run", model, tokenized / "tokenizer")
    run(export.main, export.ExportConfig, ["--run", str(folder), "--out", str(tmp_path / "out"), "--onnx"])
    session = onnx.session(tmp_path / "out/model.onnx", threads=1)
    assert onnx.about(session)["name"] == "run" and onnx.about(session)["model"]["attention"] == "VGA"
    ids = torch.randint(70, (3, 21))
    with torch.no_grad():
        expected = model(ids)
    for parts in ([21], [13, 8], [1] * 21):
        past, logits = language.empty_cache(model, 3), []
        for part in ids.split(parts, dim=1):
            one, *past = onnx.run(session, part, *past)
            logits.append(one)
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-5, atol=1e-5)
    assert [tuple(t.shape) for t in past] == [(3, 21, 4, 16)] * 5  # one of the gka layer without value embeddings


def test_onnx_that_differs_from_the_model_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "LARGEST_ERROR", 0.0)
    with pytest.raises(UserError, match=r"differed from the model .* and was deleted"):
        language.write(awake(dataclasses.replace(SHAPE, n_layer=1)).eval(), tmp_path, {})
    assert not list(tmp_path.iterdir())
