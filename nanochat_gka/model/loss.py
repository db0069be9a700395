"""Cross-entropy of capped logits; in bfloat16 on a CPU some rows at a time, so that a step stays in the cache."""

import torch
import torch.nn.functional as F

LOGIT_CAP = 20.0
IGNORE_INDEX = -1
ROWS_AT_ONCE = 32  # half a megabyte of float32 logits at a vocabulary of 4,096


def capped(logits: torch.Tensor) -> torch.Tensor:
    """float32 logits of any shape, capped smoothly at +-20."""
    return LOGIT_CAP * torch.tanh(logits.float() / LOGIT_CAP)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """Of logits (N, V), not yet capped, and targets (N,), -1 ignored: float32 nats, reduced as in torch."""
    by_rows = logits.device.type == "cpu" and logits.dtype == torch.bfloat16 and logits.requires_grad
    if not by_rows or reduction == "none" or torch.compiler.is_compiling():
        return F.cross_entropy(capped(logits), targets, ignore_index=IGNORE_INDEX, reduction=reduction)
    total = _SumByRows.apply(logits, targets)
    return total if reduction == "sum" else total / (targets != IGNORE_INDEX).sum()


class _SumByRows(torch.autograd.Function):
    """The sum of the losses. The forward pass computes the gradient too, while what it needs is in the cache."""

    @staticmethod
    def forward(ctx, logits, targets):
        gradient, total = torch.empty(logits.shape, dtype=logits.dtype), logits.new_zeros((), dtype=torch.float32)
        for some, own, out in zip(*(tensor.split(ROWS_AT_ONCE) for tensor in (logits, targets, gradient))):
            tanh = torch.tanh(some.float() / LOGIT_CAP)
            log_probabilities = F.log_softmax(LOGIT_CAP * tanh, dim=-1)
            counts, places = (own != IGNORE_INDEX).float()[:, None], own.clamp(min=0)[:, None]
            total -= (log_probabilities.gather(1, places) * counts).sum()
            # d loss / d capped = p - [target]; d capped / d logit = 1 - tanh^2.
            down = log_probabilities.exp_().scatter_add_(1, places, torch.full_like(counts, -1.0))
            out.copy_(down.mul_(tanh.square_().neg_().add_(1)).mul_(counts))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, of_sum):
        [gradient] = ctx.saved_tensors
        return gradient * of_sum.to(gradient.dtype), None
