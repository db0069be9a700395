"""Peak bf16 rates of known GPUs, for the model FLOPs utilisation."""

import re

import torch

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
    """Peak bf16 FLOP/s of `device`, or None if it is not a known GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).upper()
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name)), None)
