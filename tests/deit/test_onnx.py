"""Vision models as ONNX in onnxruntime."""

import json

import pytest
import timm
import torch

import deit_gka.export as export
import tiny
from deit_gka.data.sources import decode, open_source
from deit_gka.data.transforms import eval_transform
from deit_gka.model.checkpoints import about_images, find_checkpoint, load_run
from tiny_vit import SMALL, assert_as_exact, small
from trainkit_gka import onnx
from trainkit_gka.cli import UserError

needs_onnx = pytest.mark.skipif(bool(onnx.missing()), reason=onnx.missing())
IMAGES = {"input_size": (3, 32, 32)}
BATCHES = [(1, 3, 32, 32), (2, 3, 32, 32), (5, 3, 32, 32)]
CASES = {
    "timm's": (dict(kind="softmax"), BATCHES),
    "hybrid with offsets": (dict(attention="GVA", depth=3, spatial_offsets="LUD"), BATCHES),
    "any size": (dict(attention="GVA", depth=3, pos_embed="none", dynamic_img_size=True), [*BATCHES, (3, 3, 48, 80)]),
}


@needs_onnx
@pytest.mark.parametrize("case", CASES)
def test_onnx_computes_what_the_model_does_for_any_batch(case, tmp_path):
    """And, without learned positions, for images of another size."""
    settings, shapes = CASES[case]
    model = small(**settings).eval()
    for name, p in model.named_parameters():
        if p.ndim == 1:  # biases, norms and bandwidths that are not what they were at the start
            torch.nn.init.normal_(p, mean=0.5 if "norm" in name else 0.0, std=0.3)
    (path,) = export.write_onnx(model, tmp_path, IMAGES)
    session = onnx.session(path)
    for shape in shapes:
        images = torch.randn(shape)
        assert_as_exact(model, onnx.run(session, images)[0], images)
    assert session.get_modelmeta().custom_metadata_map == {"input_size": "[3, 32, 32]"}


@needs_onnx
def test_int8_agrees_on_digits(digits, tmp_path):
    """Top-1 of the held-out digits: float32 as torch's on all of them, int8 on 97 of 100."""
    export.main(export.ExportConfig(run=digits / "run", out=tmp_path, weights="model", onnx=True, int8=True))
    checkpoint = find_checkpoint(digits / "run")
    model, about = load_run(checkpoint, "model"), about_images(checkpoint.state)
    source, transform = open_source("digits", "val"), eval_transform(about["input_size"][-1], about["crop_pct"])
    images = torch.stack([transform(decode(source.read(place)[0])) for place in range(len(source))])
    with torch.no_grad():
        expected = model(images).argmax(-1)
    for name, least in ((onnx.MODEL, 1.0), (onnx.INT8_MODEL, 0.97)):
        session = onnx.session(tmp_path / name)
        classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
        assert classes == [str(digit) for digit in range(10)]
        assert (onnx.run(session, images)[0].argmax(-1) == expected).double().mean().item() >= least
    sizes = [(tmp_path / name).stat().st_size for name in (onnx.INT8_MODEL, onnx.MODEL)]
    assert sizes[0] < 0.6 * sizes[1]


@needs_onnx
@pytest.mark.parametrize("bound, stays", [("LARGEST_ERROR", set()), ("BROKEN_INT8_ERROR", {onnx.MODEL})])
def test_onnx_that_differs_from_the_model_does_not_stay(bound, stays, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, bound, 0.0)
    with pytest.raises(UserError, match=r"differed from the model .* and was deleted"):
        export.write_onnx(small(depth=1), tmp_path, IMAGES, int8=True)
    assert {path.name for path in tmp_path.iterdir()} == stays


def test_what_cannot_be_onnx_is_refused_before_anything_is_written(digits, tmp_path, monkeypatch):
    other = timm.create_model("vit_tiny_patch16_224", block_fn=timm.models.vision_transformer.ResPostBlock, **SMALL)
    monkeypatch.setattr(export, "load_run", lambda *_: other)
    monkeypatch.setattr(onnx, "NEEDED", ())
    argv = ["--run", digits / "run", "--out", tmp_path / "out", "--onnx"]
    assert "usual blocks" in tiny.refused(export.main, export.ExportConfig, *argv)
    assert not (tmp_path / "out").exists()
