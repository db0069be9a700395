"""Gaussian Kernel Attention: a row-normalised Gaussian kernel over the features in place of softmax(QK^T)V."""

from gka.api import dot_product_attention, gaussian_attention, gaussian_weights, select_impl
from gka.autocast import without_autocast
from gka.bandwidth import bandwidth_warnings, initial_log_sigma, inverse_variance
from gka.cost import AttentionCost, attention_cost
from gka.decoding import decode_attention
from gka.kernel import log_kernel
from gka.kinds import KINDS, Kind, layer_kinds
from gka.layer import GaussianKernelAttention
from gka.multihead import GaussianMultiheadAttention, replace_multihead

__all__ = [
    "KINDS",
    "AttentionCost",
    "GaussianKernelAttention",
    "GaussianMultiheadAttention",
    "Kind",
    "attention_cost",
    "bandwidth_warnings",
    "decode_attention",
    "dot_product_attention",
    "gaussian_attention",
    "gaussian_weights",
    "initial_log_sigma",
    "inverse_variance",
    "layer_kinds",
    "log_kernel",
    "replace_multihead",
    "select_impl",
    "without_autocast",
]
__version__ = "0.1.0"
