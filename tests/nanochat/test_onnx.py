"""Language models in onnxruntime: prefill, and decoding token by token, beside torch."""

import dataclasses
import importlib.util

import pytest
import torch

from nanochat_gka import export
from nanochat_gka.model import onnx as language
from tiny_gpt import SHAPE, awake, greedy
from trainkit_gka import onnx
from trainkit_gka.cli import UserError, run

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in onnx.NEEDED),
    reason='needs the extra: pip install -e ".[onnx]"',
)
HYBRID = dict(attention="VGA", head_offsets="PNS", offset_layers="all", gka_values="normalised", value_embeds="all")
HYBRID |= dict(channel_bandwidths=True, head_gates=True)


@pytest.mark.slow
def test_onnx_prefills_and_decodes_as_torch(tmp_path):
    """Three rows of more tokens than the windows: at once, in two parts, and one by one."""
    model = awake(dataclasses.replace(SHAPE, n_layer=3, **HYBRID)).eval()
    session = onnx.session(language.write(model, tmp_path, {"name": "tiny"}), threads=1)
    assert onnx.about(session) == {"name": "tiny"}
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


@pytest.mark.slow
def test_export_writes_onnx_that_says_greedy_what_the_model_says(trained, tmp_path, capsys):
    folder, model = trained
    run(export.main, export.ExportConfig, ["--run", str(folder), "--out", str(tmp_path / "out"), "--onnx"])
    assert "model.onnx" in capsys.readouterr().out
    session = onnx.session(tmp_path / "out/model.onnx", threads=1)
    assert onnx.about(session)["model"]["attention"] == "GGA"
    assert len(language.cache_names(model)) == 4  # one tensor of each gka layer, two of the softmax layer
    written, past, step = [], language.empty_cache(model, 1), torch.tensor([[3, 1, 4]])
    for _ in range(12):
        logits, *past = onnx.run(session, step, *past)
        step = logits[:, -1:].argmax(-1)
        written.append(step.item())
    assert written == greedy(model, [3, 1, 4], 12, end=model.config.vocab_size)


def test_onnx_that_differs_from_the_model_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "LARGEST_ERROR", 0.0)
    with pytest.raises(UserError, match=r"differed from the model .* and was deleted"):
        language.write(awake(dataclasses.replace(SHAPE, n_layer=1)).eval(), tmp_path, {})
    assert not list(tmp_path.iterdir())
