"""Cross-entropy of capped logits; on a CPU in bfloat16 or without gradients by rows, which stay in the cache."""

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
    in_cache = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    if in_cache and reduction == "none" and not logits.requires_grad:
        pairs = zip(logits.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE))
        return torch.cat([_of_rows(rows, row_targets, "none") for rows, row_targets in pairs])
    if not in_cache or reduction == "none" or not (logits.dtype == torch.bfloat16 and logits.requires_grad):
        return _of_rows(logits, targets, reduction)
    total = _SumByRows.apply(logits, targets)
    return total if reduction == "sum" else total / (targets != IGNORE_INDEX).sum()


def _of_rows(logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(capped(logits), targets, ignore_index=IGNORE_INDEX, reduction=reduction)


class _SumByRows(torch.autograd.Function):
    """The sum of the losses. The forward pass computes the gradient too, while the rows are in the cache."""

    @staticmethod
    def forward(ctx, logits, targets):
        gradient, total = torch.empty(logits.shape, dtype=logits.dtype), logits.new_zeros((), dtype=torch.float32)
        for rows, row_targets, out in zip(*(tensor.split(ROWS_AT_ONCE) for tensor in (logits, targets, gradient))):
            tanh = torch.tanh(rows.float() / LOGIT_CAP)
            log_probabilities = F.log_softmax(LOGIT_CAP * tanh, dim=-1)
            counts, places = (row_targets != IGNORE_INDEX).float()[:, None], row_targets.clamp(min=0)[:, None]
            total -= (log_probabilities.gather(1, places) * counts).sum()
            # d loss / d capped = p - [target]; d capped / d logit = 1 - tanh^2.
            down = log_probabilities.exp_().scatter_add_(1, places, torch.full_like(counts, -1.0))
            out.copy_(down.mul_(tanh.square_().neg_().add_(1)).mul_(counts))
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, of_sum):
        [gradient] = ctx.saved_tensors
        return gradient * of_sum, None  # of_sum has no dimensions: a float32 product, rounded once
