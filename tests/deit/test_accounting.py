"""Parameters and FLOPs: the formulas against built models; tests/runs/test_paper_tables.py has the paper's figures."""

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deit_gka.accounting import AccountingConfig
from deit_gka.accounting import main as print_accounting
from deit_gka.model.accounting import cost_of, vit_cost
from deit_gka.model.attention import ATTENTION
from deit_gka.model.registry import SIZES, model_name
from tiny_vit import create, small
from vision_runs import in_process


def cost(kind: str, size: str, **settings):
    return vit_cost(kind, SIZES[size]["embed_dim"], SIZES[size]["depth"], SIZES[size]["num_heads"], **settings)


def check_counts(model) -> None:
    """What is counted from the model's shape is what its parameters are."""

    def numel(part):
        return sum(p.numel() for name, p in model.named_parameters() if part in name)

    ours = cost_of(model)
    counted = numel(""), numel(".attn."), numel(".mlp."), numel("log_sigma")
    assert counted == (ours.parameters, ours.attention, ours.mlp, ours.bandwidths)


@pytest.mark.parametrize("distilled", [False, True], ids=["plain", "distilled"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [*ATTENTION, "GGAV"])
def test_built_models_have_the_computed_cost(kind, size, distilled):
    """FlopCounterMode counts 2 x multiply-accumulates of matrix products and convolutions, as the paper does.

    GKA by SDPA, as on this device, carries |x_j|^2 / (2 sigma^2) in one more channel per head, in the Gram matrix and
    in the mixing, which the paper does not count.
    """
    pattern = {} if kind in ATTENTION else {"attention": kind}
    name = model_name(size, "gka" if pattern else kind, distilled)
    model = timm.create_model(name, device="meta", **pattern)
    ours = cost(kind, size, distilled=distilled)
    check_counts(model)
    assert cost_of(model) == ours
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, 3, 224, 224, device="meta"))
    assert counter.get_total_flops() == ours.flops + 8 * (197 + distilled) ** 2 * ours.bandwidths


@pytest.mark.parametrize(
    "settings",
    [
        dict(attention="vlt", value_bias=False),
        dict(attention="vlt", value_bias=False, qkv_bias=True, depth=1),
        dict(img_size=48, num_classes=0, in_chans=1),
        dict(mlp_ratio=3, patch_size=8),
        dict(channel_bandwidths=True, norm_weight=False, attention="GA"),
    ],
    ids=str,
)
def test_cost_of_other_shapes(settings):
    check_counts(small(**settings))


def test_offsets_and_channel_bandwidths_cost_no_flops():
    shape = dict(attention="GVA", depth=3)
    assert cost_of(create(**shape, spatial_offsets="LUD")) == cost_of(create(**shape)) is not None
    assert cost_of(create(channel_bandwidths=True)).flops == cost_of(create()).flops


def test_the_command_prints_a_row_for_a_pattern_and_names_the_flag_of_a_wrong_one(capsys):
    print_accounting(AccountingConfig(attention="GGGA"))
    (row,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("GGGA tiny"))
    assert row.split()[2:6] == ["4,716,931", "778,203", "3,550,464", "27"]
    assert "--attention" in in_process(print_accounting, AccountingConfig, "--attention", "GGX", capsys=capsys)
