"""What the page computes: scaled bandwidths beside untouched weights, limits of uploads, and which models it takes."""

import io
import struct
import sys
import zlib

import pytest
import torch
from PIL import Image

import tiny_demo
import tiny_vision
from figure_runs import vision_run
from gka import gaussian_weights
from nanochat_gka.export import ExportConfig
from nanochat_gka.export import main as export
from processes import signals_kept
from runs.explore import photos
from runs.explore.__main__ import ExploreConfig, main
from runs.explore.language import MAX_CHARACTERS, MAX_TOKENS
from runs.explore.models import load
from runs.explore.photos import Photo, read_upload
from runs.explore.scaling import MEAN, WHERE, Scaling, read_controls, scaled
from runs.explore.vision import GAP, VIEWS
from tiny import one_line_error
from trainkit_gka.cli import run
from vision_runs import in_process

PHOTO = Photo.of("stripes", tiny_vision.photo(0))
TEXT = "the kernel mixes every token"


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return tiny_demo.write(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def models(demo):
    return load((), (), demo, "unused")


@pytest.mark.parametrize("kind", ["vision", "language"])
def test_scaling_shares_the_weights_and_leaves_the_model_as_it_is(models, kind):
    shown = getattr(models, kind)[0]
    model = shown.drawn.model if kind == "vision" else shown.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = shown.layers if kind == "vision" else model.attentions
    changed = scaled(model, layers, Scaling(0.5, layer=1, head=0))
    stored = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    own = [name for name, tensor in changed.state_dict().items() if tensor.data_ptr() != stored[name]]
    assert len(own) == 1 and own[0].endswith("1.attn.log_sigma")
    ratio = (changed.state_dict()[own[0]] - before[own[0]]).exp()
    assert torch.allclose(ratio, torch.tensor([0.5, 1.0]))
    shown.look(PHOTO, Scaling(3.0)) if kind == "vision" else shown.read(TEXT, Scaling(3.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_whole_model_runs_with_the_scaled_bandwidths(models):
    """W of the first layer is the operator's at the scaled σ; the second layer sees other features; so does the
    prediction."""
    model = models.vision[0]
    (plain, before), (wide, after) = model.look(PHOTO, Scaling()), model.look(PHOTO, Scaling(4.0, layer=0))
    features, log_sigma = (
        plain.layers[0].features.double()[None],
        model.layers[0].log_sigma.detach() + torch.tensor(4.0).log(),
    )
    expected = gaussian_weights(features, log_sigma, eps=0.0)
    assert torch.allclose(wide.layers[0].weights.double(), expected[0], atol=1e-6)
    assert torch.equal(plain.layers[1].sigma, wide.layers[1].sigma)
    assert not torch.allclose(plain.layers[1].features, wide.layers[1].features, atol=1e-3)
    assert (before - after).abs().max() > 1e-3
    text = models.language[0]
    last = text.read(TEXT, Scaling(4.0, layer=1, head=1))
    before = text.read(TEXT, Scaling())
    assert torch.equal(before.layers[0].weights, last.layers[0].weights)
    changed = (before.layers[1].weights - last.layers[1].weights).abs().amax((1, 2))
    assert changed[0] == 0 and changed[1] > 1e-3
    assert (before.probabilities - last.probabilities).abs().max() > 1e-4


def test_the_controls_say_which_bandwidths_are_scaled():
    scalings = [read_controls(2, head, -1.0, where)[-1] for where in WHERE for head in ("head 2", MEAN)]
    everywhere, layer, head = Scaling(0.5), Scaling(0.5, layer=1), Scaling(0.5, layer=1, head=1)
    assert scalings == [everywhere, everywhere, layer, layer, head, layer]  # of the mean, all heads of the layer


def test_the_image_is_beside_its_map_and_the_clicked_patch_is_framed_in_both(models):
    model = models.vision[0]
    pictures, _, captions = zip(*(model.picture(PHOTO, view, 6, 1, 0, Scaling()) for view in VIEWS))
    assert {picture.shape for picture in pictures} == {(448, 2 * 448 + GAP, 3)}
    shown = model.look(PHOTO, Scaling())[0].pixels.repeat(28, 0).repeat(28, 1)
    assert abs(pictures[0][:, :448] / 255 - shown).max() < 0.003
    framed = (pictures[1] == (0, 255, 255)).all(-1).nonzero()
    assert {model.patch_at(int(x), int(y)) for y, x in zip(*framed)} == {6}
    assert min(framed[1]) < 448 < max(framed[1])
    assert "row 2, column 3" in captions[1] and "stripes" in captions[0]
    assert model.patch_at(447, 447) == 15 and model.patch_at(9999, 0) == 3


def test_long_texts_are_refused_in_a_sentence(models):
    model = models.language[0]
    with one_line_error("1,001 characters; the page takes at most 1,000"):
        model.read("a" * (MAX_CHARACTERS + 1), Scaling())
    with one_line_error(f"tokens; the page takes at most {MAX_TOKENS}"):
        model.continuation("ß" * MAX_TOKENS, Scaling())
    assert len(model.read("", Scaling()).tokens) == 1


def encoded(form, size=(64, 48), **options):
    buffer = io.BytesIO()
    Image.new("RGB", size, "orange").save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", photos.FORMATS)
def test_images_of_three_formats_can_be_uploaded(form):
    photo = read_upload(encoded(form), "cat.jpg")
    assert photo.name == "cat.jpg"
    assert photo.size == (64, 48) and photo.image.mode == "RGB"


def test_large_images_are_made_smaller_and_turned_as_the_camera_says():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_upload(encoded("JPEG", (2000, 1000), exif=exif), "").size == (512, 1024)


def test_greys_of_16_bits_keep_their_brightness():
    buffer = io.BytesIO()
    Image.new("I;16", (4, 4), 100 * 256).save(buffer, "PNG")
    assert read_upload(buffer.getvalue(), "").image.getpixel((0, 0)) == (100, 100, 100)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"root:x:0:0", "is not a JPEG, PNG or WebP image"),
        (encoded("GIF"), "is not a JPEG, PNG or WebP image"),
        (encoded("PNG")[:60], "is not a JPEG, PNG or WebP image, or it is damaged"),
    ],
    ids=["text", "gif", "cut"],
)
def test_other_files_are_refused_in_a_sentence(content, message):
    with one_line_error(message):
        read_upload(content, "")


@pytest.mark.parametrize("side", [6000, 20000])
def test_too_many_pixels_are_refused_before_they_are_decoded(side, monkeypatch):
    data = bytearray(encoded("PNG"))
    data[16:24] = struct.pack(">II", side, side)  # in the header, whose checksum follows
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("the pixels were decoded"))
    with one_line_error("at most 25 million pixels"):
        read_upload(bytes(data), "")


def test_the_demos_models_and_their_twins_are_the_default(models, demo):
    assert [model.about.split()[0] for model in models.vision] == ["digits-gka-1-seed0", "digits-softmax-1-seed0"]
    assert [model.about.split(":")[0] for model in models.language] == ["d2-gka-offsets-1", "d2-softmax-1"]
    named = load((demo / "runs" / "d2-softmax-1", demo / "runs" / "digits-softmax-1-seed0"), (), demo, "unused")
    assert [len(named.vision), len(named.language)] == [1, 1] and not named.vision[0].has_sigma


def test_without_a_demo_there_is_an_untrained_model(tmp_path):
    models = load((), (), tmp_path, "deit_tiny_gka_patch16_224")
    (model,) = models.vision
    assert "random initialisation" in model.about and not models.language
    assert len(model.classes) == 1000 and "tench" in model.classes[0]


def test_an_exported_model_reads_as_its_run_does(models, demo, tmp_path):
    run = next(demo.glob("runs/d2-gka-offsets-*"))
    export(ExportConfig(run=run, out=tmp_path / "alone"))
    (alone,) = load((tmp_path / "alone",), (), tmp_path / "no demo", "deit_tiny_gka_patch16_224").language
    assert torch.equal(
        alone.read(TEXT, Scaling(2.0)).probabilities, models.language[0].read(TEXT, Scaling(2.0)).probabilities
    )


def test_runs_that_do_not_go_together_are_refused(demo, tmp_path):
    runs = demo / "runs"
    with one_line_error("cannot stand beside"):
        tiny = load((), (vision_run(tmp_path / "other"),), tmp_path, "deit_tiny_gka_patch16_224")
        pytest.fail(str(tiny))
    with one_line_error("give one run of a kind"):
        load((), (runs / "d2-softmax-1",) * 2, demo, "unused")


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--run", "nowhere"), "no checkpoint in nowhere"),
        (("--demo", "nowhere"), "there is no folder nowhere; name one with the outputs of make demo"),
    ],
    ids=str,
)
def test_mistakes_on_the_command_line_are_one_line(flags, message, capsys):
    with signals_kept():
        assert message in in_process(main, ExploreConfig, *flags, capsys=capsys)


def test_another_host_is_warned_of_and_one_of_another_machine_refused(demo, capsys):
    """192.0.2.1 is an address of nobody's (RFC 5737)."""
    with signals_kept(), pytest.raises(SystemExit) as left:
        run(main, ExploreConfig, ["--demo", str(demo), "--host", "192.0.2.1"])
    (error,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and error.startswith("error: cannot listen on 192.0.2.1, port")
    with signals_kept(), pytest.raises(SystemExit):
        run(main, ExploreConfig, ["--run", "nowhere", "--host", "0.0.0.0"])
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "warning: everybody who can reach 0.0.0.0 can use this page"


def test_without_gradio_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with signals_kept():
        assert 'pip install "gka[explore]"' in in_process(main, ExploreConfig, capsys=capsys)
