"""Parameters, FLOPs and sizes: the paper's tables from formulas, and the formulas against built models."""

import functools
import io

import pytest
import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deit_gka.accounting import AccountingConfig
from deit_gka.accounting import main as print_accounting
from deit_gka.model.accounting import MIB, cost_of, vit_cost
from deit_gka.model.attention import ATTENTION
from deit_gka.model.registry import SIZES, model_name
from operator_cases import AUTO_ON_CPU
from runs.paper import published
from tiny_vit import create, small
from vision_runs import in_process

SIZE_LETTERS = {"tiny": "Ti", "small": "S", "base": "B"}
PAPER_NAMES = {"softmax": "DeiT", "vlt": "VLT", "gka": "GKA"}
# The table of main results says 9.20 GFLOPs where the one of efficiency says 9.22: twice timm's published 4.61 GMACs,
# which count LayerNorm too. All eleven other figures count matrix products alone, as 9.20 and we do.
OTHER_COUNT = {("efficiency", "DeiT-S", "gflops"): "9.20"}
# Exact counts give these differences; the paper divided its own rounded figures (4.38 / 5.72, 1.98 / 2.51).
EXACT = {("main_results", "GKA-Ti", "delta_params"): "-23.3", ("main_results", "GKA-Ti", "delta_flops"): "-20.9"}
# The table of efficiency gives these sizes of the bare weights, and of a file that torch.save writes otherwise.
BARE_WEIGHTS = [("efficiency", "GKA-Ti"), ("efficiency", "DeiT-B"), ("efficiency", "GKA-B")]
ROWS = [
    pytest.param(table, kind, size, id=f"{table}-{kind}-{size}")
    for table in ("main_results", "efficiency", "ablation")
    for kind in PAPER_NAMES
    for size in SIZES
    if f"{PAPER_NAMES[kind]}-{SIZE_LETTERS[size]}" in published.rows(table)
]


def cost(kind: str, size: str, **settings):
    return vit_cost(kind, SIZES[size]["embed_dim"], SIZES[size]["depth"], SIZES[size]["num_heads"], **settings)


def reduction(new: float, old: float, digits: int) -> str:
    return f"{100 * (new / old - 1):.{digits}f}"


@functools.cache
def empty_model(kind: str, size: str) -> nn.Module:
    """A paper model with zeros for weights: nothing is spent on drawing 300M random numbers."""
    model = timm.create_model(model_name(size, kind), device="meta").to_empty(device="cpu").eval()
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


@functools.cache
def file_mib(kind: str, size: str) -> float:
    """Size of the file torch.save writes for the float32 state dict, in MiB (the paper's "MB")."""
    file = io.BytesIO()
    torch.save(empty_model(kind, size).state_dict(), file)
    return file.tell() / MIB


@pytest.mark.parametrize("table,kind,size", ROWS)
def test_costs_are_those_the_paper_prints(table, kind, size):
    """Figures as published.json has them, which is every table of the paper."""
    name, ours, twin = f"{PAPER_NAMES[kind]}-{SIZE_LETTERS[size]}", cost(kind, size), cost("softmax", size)
    printed = dict(published.rows(table)[name])
    digits = 1 if table == "main_results" else 0
    counts = {
        "params": f"{ours.parameters / 1e6:.2f}",
        "attention": f"{ours.attention / 1e6:.2f}",
        "mlp": f"{ours.mlp / 1e6:.2f}",
        "sigma": str(ours.bandwidths),
        "gflops": f"{ours.flops / 1e9:.2f}",
        "size": f"{ours.raw_mib if (table, name) in BARE_WEIGHTS else file_mib(kind, size):.1f}",
        "delta_params": reduction(ours.parameters, twin.parameters, digits),
        "delta_attention": reduction(ours.attention, twin.attention, digits),
        "delta_flops": reduction(ours.flops, twin.flops, digits),
    }
    compared = counts.keys() & printed.keys()
    assert {"params", "gflops"} <= compared and (table == "ablation" or {"attention", "mlp", "size"} <= compared)
    for column in compared:
        expected = (OTHER_COUNT | EXACT).get((table, name, column), printed[column])
        assert counts[column] == expected, column


def check_counts(model: nn.Module) -> None:
    """What is counted from the model's shape is what its parameters are."""

    def numel(part):
        return sum(p.numel() for name, p in model.named_parameters() if part in name)

    ours = cost_of(model)
    counted = numel(""), numel(".attn."), numel(".mlp."), numel("log_sigma")
    assert counted == (ours.parameters, ours.attention, ours.mlp, ours.bandwidths)


def flops_of(model: nn.Module, device: str) -> int:
    """FlopCounterMode counts 2 x multiply-accumulates of matrix products and convolutions, as the paper does.

    It knows our fused kernels, but of torch's on CPUs only the "math" backend.
    """
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, 3, 224, 224, device=device))
    return counter.get_total_flops()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ATTENTION)
def test_built_models_have_the_computed_cost(kind, size):
    """GKA by SDPA, where no compiler is, carries |x_j|^2 / (2 sigma^2) in one more channel per head, in the Gram
    matrix and in the mixing: 4 N^2 per head and block that the paper does not count (0.3 % of GKA-Ti).
    """
    model, ours = empty_model(kind, size), cost(kind, size)
    check_counts(model)
    assert cost_of(model) == ours
    if size == "tiny":  # the others have the same layers
        extra_channels = 8 * 197**2 * ours.bandwidths if AUTO_ON_CPU == "sdpa" else 0
        assert flops_of(model, "cpu") - extra_channels == ours.flops


@pytest.mark.parametrize("kind", ATTENTION)
def test_built_distilled_models_have_the_computed_cost(kind):
    model = timm.create_model(model_name("tiny", kind, distilled=True), device="meta")
    check_counts(model)
    norms = 8 * 198**2 * cost_of(model).bandwidths  # on this device, one more channel as above
    assert flops_of(model, "meta") == cost_of(model).flops + norms


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


def test_cost_is_the_sum_over_layers_and_offsets_are_free(capsys):
    model = timm.create_model(model_name("small", "gka"), attention="GGAV", device="meta")
    check_counts(model)
    assert cost_of(model) == cost("GGAV", "small") and cost_of(model).bandwidths == 36
    kinds = [cost(kind, "small").flops for kind in ("gka", "gka", "softmax", "vlt")]
    assert cost_of(model).flops == sum(kinds) / 4
    shape = dict(attention="GVA", depth=3)
    assert cost_of(create(**shape, spatial_offsets="LUD")) == cost_of(create(**shape)) is not None
    assert cost_of(create(channel_bandwidths=True)).flops == cost_of(create()).flops
    assert cost("vlt", "tiny", value_bias=False).parameters == 5_272_744

    print_accounting(AccountingConfig(attention="GGGA"))
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + len(SIZES) * (len(ATTENTION) + 1)
    (row,) = (row for row in rows if row.startswith("GGGA tiny"))
    assert row.split()[2:6] == ["4,716,931", "778,203", "3,550,464", "27"]
    message = in_process(print_accounting, AccountingConfig, "--attention", "GGX", capsys=capsys)
    assert "--attention must be one of" in message


def test_the_papers_models_say_what_they_cost():
    for size, kind in (*((size, "gka") for size in SIZES), ("tiny", "vlt")):
        said, ours = timm.model_entrypoint(model_name(size, kind)).__doc__, cost(kind, size)
        assert f" {ours.parameters / 1e6:.2f}M parameters, {ours.flops / 1e9:.2f} GFLOPs at 224 pixels" in said


UNKNOWN = {
    "four register tokens and DeiT III": ("deit3_small_patch16_224", dict(reg_tokens=4)),
    "no qkv bias": ("vit_tiny_patch16_224", dict(qkv_bias=False)),
    "register tokens": ("vit_tiny_patch16_224", dict(reg_tokens=4)),
    "layer scale": ("deit3_small_patch16_224", {}),
    "four stages": ("swin_tiny_patch4_window7_224", {}),
    "not square": ("deit_tiny_gka_patch16_224", dict(img_size=(64, 32))),
}


@pytest.mark.parametrize("label", UNKNOWN)
def test_cost_is_none_or_right(label):
    name, settings = UNKNOWN[label]
    model = timm.create_model(name, device="meta", **settings)
    ours = cost_of(model)
    assert ours is None or ours.parameters == sum(p.numel() for p in model.parameters())
