"""Gaussian Kernel Attention: softmax(QK^T)V replaced by a row-normalised Gaussian kernel over the features themselves."""

from gka.attention.api import dot_product_attention, gaussian_attention, select_impl
from gka.attention.bandwidth import initial_log_sigma
from gka.attention.cost import AttentionCost, attention_cost
from gka.attention.layer import GaussianKernelAttention

__all__ = [
    "AttentionCost",
    "GaussianKernelAttention",
    "attention_cost",
    "dot_product_attention",
    "gaussian_attention",
    "initial_log_sigma",
    "select_impl",
]
__version__ = "0.1.0"
