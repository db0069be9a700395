"""Two lines: which implementation this process takes on CPUs, and what the CPU kernel says if it is asked for."""

import torch

from gka import gaussian_attention, select_impl

if __name__ == "__main__":
    x, log_sigma = torch.randn(1, 9, 2, 16), torch.zeros(2)
    print(select_impl(x), gaussian_attention(x, log_sigma).shape[1])
    try:
        gaussian_attention(x, log_sigma, impl="cpu")
    except ValueError as error:
        print(error)
