"""Gaussian Kernel Attention: softmax(QK^T)V replaced by a row-normalised Gaussian kernel over the features themselves."""

from gka.attention.api import dot_product_attention, gaussian_attention, select_impl, without_autocast
from gka.attention.bandwidth import initial_log_sigma, inverse_variance
from gka.attention.cost import AttentionCost, attention_cost
from gka.attention.kernel import log_kernel
from gka.attention.layer import GaussianKernelAttention

__all__ = [
    "AttentionCost",
    "GaussianKernelAttention",
    "attention_cost",
    "dot_product_attention",
    "gaussian_attention",
    "initial_log_sigma",
    "inverse_variance",
    "log_kernel",
    "select_impl",
    "without_autocast",
]
__version__ = "0.1.0"
