"""Models whose layers have different kinds of attention: a pattern of letters, tiled over the layers."""

import copy
import pickle

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tiny_vision
from deit_gka import train as training
from deit_gka.accounting import AccountingConfig
from deit_gka.accounting import main as print_accounting
from deit_gka.figures.maps import attention_maps
from deit_gka.model.accounting import cost_of, vit_cost
from deit_gka.model.attention import ATTENTION, kind_of
from deit_gka.model.checkpoints import build, find_checkpoint, load_run
from deit_gka.model.registry import SIZES, model_name
from deit_gka.model.warm_start import warm_start
from deit_gka.training.config import TrainConfig
from deit_gka.training.engine import bandwidths
from gka import KINDS, attention_cost
from tiny_vision import MICRO, SHAPE, SIZE
from tiny_vit import create, small
from trainkit_gka.cli import UserError
from vision_runs import in_process

ALL = "".join(KINDS[kind].letter for kind in ATTENTION)  # every kind once


def kinds_of(model) -> str:
    return "".join(KINDS[kind_of(block.attn)].letter for block in model.blocks)


@pytest.mark.parametrize("pattern,kinds", [("GGGA", "GGGAG"), ("agv", "AGVAG"), ("V", "VVVVV"), ("softmax", "AAAAA")])
@pytest.mark.parametrize("name", ["deit_tiny_gka_patch16_224", "deit_tiny_vlt_distilled_patch16_224"])
def test_pattern_is_tiled_over_the_layers(name, pattern, kinds):
    for argument in ("attention", "attn_layer"):
        model = timm.create_model(name, **{argument: pattern}, depth=5, device="meta")
        assert kinds_of(model) == kinds


def test_timms_own_vits_take_a_pattern(images):
    own = timm.create_model(
        "vit_tiny_patch16_224", attn_layer=ALL, img_size=32, embed_dim=24, num_heads=3, depth=3
    ).eval()
    ours = create(attention=ALL, depth=3, num_classes=1000).eval()
    own.load_state_dict(ours.state_dict())
    assert kinds_of(own) == ALL and torch.equal(own(images), ours(images))
    through_build = build("vit_tiny_patch16_224", 5, 32, attention=ALL, embed_dim=24, num_heads=3, depth=3)
    assert kinds_of(through_build) == ALL


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_tiny_r_s16_p8_224"])
def test_every_family_of_timms_takes_a_pattern(name):
    model = timm.create_model(name, attn_layer="GGV", device="meta")
    assert kinds_of(model) == "GGV" * 4
    with pytest.raises(ValueError, match="got 'GX'"):
        timm.create_model(name, attn_layer="GX", device="meta")


@pytest.mark.parametrize("kind", ATTENTION)
def test_one_letter_is_the_model_of_that_kind(kind, images):
    plain, pattern = small(kind).eval(), create(attention=KINDS[kind].letter).eval()
    pattern.load_state_dict(plain.state_dict())
    assert torch.equal(pattern(images), plain(images))


def test_layers_are_those_of_their_kinds(images):
    """Block by block the hybrid computes what the models of one kind compute."""
    hybrid, x = small(attention=ALL, depth=3).eval(), torch.randn(2, 5, 24)
    for block, kind in zip(hybrid.blocks, ATTENTION):
        twin = create(kind).blocks[0].eval()
        twin.load_state_dict(block.state_dict())
        assert torch.equal(block(x), twin(x))


def test_every_kind_takes_its_settings():
    model = small(attention="GVA", depth=3, sigma_squared=3.0, value_bias=False, impl="reference")
    torch.testing.assert_close(model.blocks[0].attn.log_sigma.exp().square(), torch.full((3,), 3.0))
    assert model.blocks[0].attn.impl == "reference" and model.blocks[1].attn.value_bias is None
    assert small(attention="GVA", depth=3).blocks[1].attn.value_bias is not None
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert [type(block.attn) for block in other.blocks] == [type(block.attn) for block in model.blocks]


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(attention="GGX"), r"softmax \(A\).* got 'GGX'"),
        (dict(attention=""), "got ''"),
        (dict(attention="GA", value_bias=False), "value_bias is not a setting of gka or softmax attention"),
    ],
    ids=str,
)
def test_wrong_patterns_and_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        small(**settings)
    with pytest.raises(UserError, match=message):
        build(model_name("tiny", "gka"), **settings)


def test_cost_is_the_sum_over_layers():
    model = timm.create_model(model_name("small", "gka"), attention="GGAV", device="meta")
    cost, shape = cost_of(model), SIZES["small"]
    assert cost == vit_cost("GGAV", shape["embed_dim"], shape["depth"], shape["num_heads"])
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert cost.attention == sum(p.numel() for block in model.blocks for p in block.attn.parameters())
    assert cost.bandwidths == sum(b.attn.log_sigma.numel() for b in model.blocks if hasattr(b.attn, "log_sigma")) == 36
    layers = [attention_cost(kind, 384, 6, 197, value_bias=True) for kind in ("gka", "gka", "softmax", "vlt")]
    softmax = vit_cost("softmax", 384, 12, 6).flops - 12 * layers[2].flops
    assert cost.flops == softmax + 3 * sum(layer.flops for layer in layers)


@pytest.mark.parametrize("kind", ATTENTION)
def test_cost_of_distilled_models(kind):
    model = timm.create_model(model_name("tiny", kind, distilled=True), device="meta").eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 224, 224, device="meta"))
    cost = cost_of(model)
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    norms = 8 * 198**2 * cost.bandwidths  # the operator's channel for the norms, which the paper does not count
    assert counter.get_total_flops() == cost.flops + norms


def test_accounting_prints_a_row_of_the_pattern(capsys):
    print_accounting(AccountingConfig(attention="GGGA"))
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + len(SIZES) * (len(ATTENTION) + 1)
    (row,) = (row for row in rows if row.startswith("GGGA tiny"))
    assert row.split()[2:6] == ["4,716,931", "778,203", "3,550,464", "27"]
    message = in_process(print_accounting, AccountingConfig, "--attention", "GGX", capsys=capsys)
    assert "--attention must be one of" in message


@torch.inference_mode()
def test_bandwidths_and_maps_of_a_hybrid(images):
    model = small(attention=ALL, depth=3, sigma_squared=4.0).eval()
    (place,) = (place for place, kind in enumerate(ATTENTION) if KINDS[kind].has_bandwidth)
    assert list(bandwidths(model)) == [(place, pytest.approx([2.0] * 3))]
    inputs, outputs = {}, {}
    for layer, block in enumerate(model.blocks):
        block.attn.proj.register_forward_pre_hook(lambda m, args, layer=layer: outputs.update({layer: args[0]}))
        block.norm1.register_forward_hook(lambda m, args, output, layer=layer: inputs.update({layer: output}))
    maps = [layer.weights for layer in attention_maps(model, images)]
    for layer, (weights, block) in enumerate(zip(maps, model.blocks)):
        assert weights.shape == (2, 3, 5, 5)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
        x, attention = inputs[layer], block.attn
        heads = x.unflatten(-1, (3, 8))
        values = (
            attention.values(heads)
            if hasattr(attention, "values")
            else attention.qkv(x)[..., 48:].unflatten(-1, (3, 8))
        )
        mixed = torch.einsum("bhij,bjhd->bihd", weights, values).flatten(2)
        torch.testing.assert_close(mixed, outputs[layer], rtol=1e-4, atol=1e-4)


def test_softmax_weights_start_every_kind():
    hybrid, softmax = create(attention=ALL, depth=3), create("softmax", depth=3)
    done = warm_start(hybrid, softmax.state_dict(), "x")
    places = {kind: place for place, kind in enumerate(ATTENTION)}
    assert done.new == sorted([f"blocks.{places['gka']}.attn.log_sigma", f"blocks.{places['vlt']}.attn.value_bias"])
    taken = f"blocks.{places['softmax']}.attn.qkv.weight"
    assert torch.equal(hybrid.state_dict()[taken], softmax.state_dict()[taken])


@pytest.mark.parametrize("name", ["deit_tiny_gka_patch16_224", "vit_tiny_patch16_224"])
def test_timm_rebuilds_a_saved_hybrid(name, tmp_path, images):
    model = build(name, 5, 32, attention=ALL, embed_dim=24, num_heads=3, depth=3).eval()
    save_for_hf(model, tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert kinds_of(again) == ALL and torch.equal(again(images), model(images))


# --- Runs ---


def flags(out, *more):
    where = ["--data", "digits", "--out", out, "--results", out / "results.jsonl", *MICRO]
    short = ["--epochs", 1, "--warmup-epochs", 0, "--batch-size", 64, "--repeated-aug", 1, "--num-workers", 0]
    return [*where, *short, *more]


@pytest.mark.parametrize("name", ["deit_tiny_gka_patch16_224", "deit_tiny_patch16_224"])
def test_a_hybrid_trains_resumes_exports_and_evaluates(name, tmp_path, capsys):
    def call(command, *argv):
        return tiny_vision.call(f"deit_gka.{command}", *argv, folder=tmp_path / "output").stdout

    hybrid = flags(tmp_path, "--model", name, "--attention", "GA")
    call("train", *hybrid, "--stop-after", 2)
    assert "resuming at update 2" in call("train", *hybrid, "--stop-after", 4)
    run = tmp_path / f"{name}-GA"
    model = load_run(find_checkpoint(run), "model", "cpu")
    assert kinds_of(model) == "GA"
    call("export", "--run", run, "--out", tmp_path / "exported", "--weights", "model")
    exported = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(exported(images), model(images))
    text = call(
        "evaluate", "--run", run, "--results", tmp_path / "results.jsonl", "--device-type", "cpu", "--num-workers", 0
    )
    assert "599 images" in text

    for attention in ("", "AG"):
        other = flags(tmp_path, "--model", name, "--model-tag", run.name, "--attention", attention)
        assert f"--attention is {attention}" in in_process(training.main, TrainConfig, *other, capsys=capsys)


def test_runs_without_a_pattern_are_those_of_before(tmp_path):
    """Older runs do not say which pattern they have: they have none."""
    config = TrainConfig(data="digits", out=tmp_path)
    assert config.tag == config.model and "attention" not in config.timm_arguments()
    config.check_continues({key: value for key, value in config.identity().items() if key != "attention"})


def test_mistakes_of_the_flag_are_one_line(tmp_path, capsys):
    for more, message in (
        (["--attention", "GX"], "--attention must be one of"),
        (["--attention", "GA", *MICRO[:-4], "attention=G"], "--attention and --model-kwargs both choose the attention"),
    ):
        argv = [*flags(tmp_path), *more]
        assert message in in_process(training.main, TrainConfig, *argv, capsys=capsys)
    assert kinds_of(build(model_name("tiny", "gka"), 3, SIZE, **SHAPE, attention="AG")) == "AG"
