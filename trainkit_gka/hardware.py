"""Peak bf16 rates of GPUs, for the model FLOPs utilisation, and devices without bfloat16."""

import platform
import re
import timeit

import torch

SIDE, TURNS = 256, 5  # of the product that is timed

# Dense bf16 TFLOP/s with float32 accumulation (data sheets), by a word of the name; specific words come first.
PEAK_TFLOPS = {
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIE": 756,
    "H100": 989,
    "H800": 989,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L4": 121,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of `device`, or None if it is not a known GPU, or a slice of one (MIG)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).upper()
    if re.search(r"\bMIG\b", name):
        return None
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)


def slow_bfloat16(dtype: torch.dtype, device: torch.device, advice: str) -> str | None:
    """A note with `advice` if `dtype` is bfloat16 and `device` a processor or a GPU that has no instructions for it."""
    if dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"note: this GPU has no instructions for bfloat16 (it is older than the A100); {advice}"
    is_x86 = device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if dtype == torch.bfloat16 and is_x86 and not torch.cpu._is_avx512_bf16_supported():
        return f"note: this processor has no instructions for bfloat16; {advice}"
    return None


def bfloat16_products_are_slow(device: torch.device) -> bool:
    """Whether a product of bfloat16 matrices takes more than twice as long on `device` as through float32.

    That is timed in turns, in a third of a second at most on a CPU. Without instructions for bfloat16 torch multiplies
    in a scalar loop, 30 times slower than float32; with AVX-512 alone it is 4 to 5 times slower; with AMX or
    AVX512-BF16 it is faster, and a busy machine must not turn that round: two runs would differ in their bits.
    """
    if device.type != "cpu":
        return False
    a = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).bfloat16()
    products = (lambda: a @ a, lambda: (a.float() @ a.float()).bfloat16())
    turns = [[timeit.timeit(product, number=1) for product in products] for _ in range(TURNS)]
    narrow, through_float32 = map(min, zip(*turns))
    return narrow > 2 * through_float32
