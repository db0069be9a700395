"""Parameters and FLOPs of built models; tests/runs/test_tables.py has the paper's figures."""

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tiny
from deit_gka.accounting import AccountingConfig, cost_of, deit_cost, main
from deit_gka.model.registry import MODELS, model_name
from tiny_vit import create

OTHER_SHAPES = [
    dict(attention="vlt", value_bias=False, qkv_bias=True, depth=1),
    dict(attention="GAV", depth=3, img_size=(32, 48), num_classes=0, in_chans=1, qkv_bias=False),
    dict(attention="GAV", depth=3, mlp_ratio=3, patch_size=8, reg_tokens=4),
    dict(channel_bandwidths=True, norm_weight=False, attention="GA"),
    dict(attention="GAV", depth=3, spatial_offsets="LUD"),
]


def check_flops(model, size):
    """FlopCounterMode counts 2 x multiply-accumulates of matrix products and convolutions, as the paper does.

    GKA by SDPA, as on this device, carries |x_j|^2 / (2 sigma^2) in one more channel per head, in the Gram matrix and
    in the mixing, which the paper does not count.
    """
    cost, tokens = cost_of(model), model.patch_embed.num_patches + model.num_prefix_tokens
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, *size, device="meta"))
    assert counter.get_total_flops() == cost.flops + 8 * tokens**2 * cost.bandwidths


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model_name(*model))
def test_flops_are_those_of_matrix_products(model):
    check_flops(timm.create_model(model_name(*model), device="meta"), (3, 224, 224))


@pytest.mark.parametrize("settings", OTHER_SHAPES, ids=str)
def test_flops_of_other_shapes(settings):
    height, width = settings.get("img_size", (32, 32))
    check_flops(create(**settings, device="meta"), (settings.get("in_chans", 3), height, width))


def test_what_is_counted_of_which_model():
    for name in ("vit_tiny_r_s16_p8_224", "resnet18", "vit_base_patch16_siglip_224"):  # a hybrid; an attention pool
        assert cost_of(timm.create_model(name, device="meta")) is None
    model, cost = create(attention="GA"), deit_cost("tiny", "GGGA")
    counted = cost_of(model)
    assert counted.attention == sum(p.numel() for block in model.blocks for p in block.attn.parameters())
    assert (cost.parameters, cost.attention, cost.mlp, cost.bandwidths) == (4_716_931, 778_203, 3_550_464, 27)


def test_the_command_prints_a_row_for_a_pattern_and_names_the_flag_of_a_wrong_one(capsys):
    main(AccountingConfig(attention="GGGA"))
    (row,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("GGGA tiny"))
    assert row.split()[2:6] == ["4,716,931", "778,203", "3,550,464", "27"]
    assert "--attention" in tiny.refused(main, AccountingConfig, "--attention", "GGX")
