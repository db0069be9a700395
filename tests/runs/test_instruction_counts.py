"""Plain flash attention that ours is counted against, and the counting itself."""

import pytest
import torch
import torch.nn.functional as F

from gka.impl.triton.configs import Config
from runs.bench import instruction_counts, machine_code, softmax_kernels
from runs.sections.instructions import instructions
from trainkit_gka.results import read_results

# Two loops of a program of eight warps; the first loads one tile of keys, the second has an outer loop around it.
ASSEMBLY = """
        /*0000*/                   MUFU.EX2 R1, R2 ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0020*/              @!PT LDS RZ, [RZ] ;
        /*0030*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0040*/                   FFMA R1, R2, R3, R4 ;
        /*0050*/               @P0 STS.64 [R1], R2 ;
        /*0060*/              @!P2 BRA `(.L_x_0) ;
.L_x_1:
        /*0070*/                   MUFU.EX2 R1, R2 ;
.L_x_2:
        /*0080*/                   LDSM.16.M88.4 R4, [R3] ;
        /*0090*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*00a0*/                   BRA `(.L_x_2) ;
        /*00b0*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3);
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter takes CPU tensors")
@pytest.mark.parametrize("causal", [False, True])
def test_plain_flash_attention_is_softmax_attention_with_its_gradients(causal):
    q, k, v, dy = torch.randn(4, 1, 35, 2, 16)
    config = Config(32, 16, 4, 1)
    y, level = softmax_kernels.forward(q, k, v, causal, config)
    got = (y, *softmax_kernels.backward(dy, q, k, v, y, level, causal, config))
    exact = [tensor.double().transpose(1, 2).requires_grad_() for tensor in (q, k, v)]
    want = F.scaled_dot_product_attention(*exact, is_causal=causal)
    gradients = torch.autograd.grad(want, exact, dy.double().transpose(1, 2))
    for ours, theirs in zip(got, (want, *gradients), strict=True):
        torch.testing.assert_close(ours.double(), theirs.transpose(1, 2), rtol=0, atol=3e-6)


def test_innermost_loops_with_products_are_counted_by_class():
    first, second = machine_code.loops(ASSEMBLY)
    counts = machine_code.count(first, warps=8)
    assert counts == {
        "matrix": 256,
        "products": 64 * 32 * 16 * 2,
        "multiply_add": 256,
        "shared": 256,
        "shared_bytes": 256 * 8,
        "global": 256,
        "global_bytes": 256 * 16,
        "other": 256,
        "total": 5 * 256,
    }
    counts = machine_code.count(second, warps=1)
    assert counts["products"] == 16 * 8 * 16 and counts["shared_bytes"] == 32 * 16 and counts["mufu"] == 0


def test_the_file_has_every_kernel_with_all_its_products():
    """No less than the pass needs; more where warps repeat one another's products."""
    records = read_results(instruction_counts.FILE, "whole", "masked")
    needed = {"forward": 2, "queries": 3, "keys": 4, "symmetric": 5}
    for config, metrics in ((record["config"], record["metrics"]) for record in records):
        whole = metrics["whole"]
        assert whole["products"] >= needed[config["name"]] * config["head_dim"] and whole["mufu"] >= 1
        assert whole["total"] <= metrics["masked"]["total"] and metrics["stack"] == 0
    fields = ("capability", "head_dim", "attention", "phase")
    kinds = {tuple(record["config"][field] for field in fields) for record in records}
    assert len(kinds) == 3 * 2 * 2 * 2
    assert instructions().count("\n| forward") == instructions().count("\n| backward") == 3 * 2 * 3


def test_the_bytes_of_a_pass_are_those_of_its_tensors():
    """Forward: q, k, v in and y out, against x in and y out; rows of float32 besides."""

    def moved(attention):
        (kernel,) = instruction_counts.kernels_of(attention, "causal", "forward", 90, 64)
        return kernel.bytes_per_row()

    assert moved("softmax") == {"bytes_read": 3 * 128, "bytes_written": 128 + 4}
    assert moved("GKA") == {"bytes_read": 128, "bytes_written": 128 + 4}
