"""The curves over steps: learning rate, Muon's momentum and weight decay (nanochat's)."""

MOMENTUM = (0.85, 0.95)
MOMENTUM_STEPS = 300


def lr_multiplier(
    step: int, steps: int, warmup_ratio: float = 0.0, warmdown_ratio: float = 0.5, final_lr_frac: float = 0.0
) -> float:
    """Linear warm-up, constant, linear warm-down to final_lr_frac; `step` counts from 0."""
    warmup, warmdown = round(warmup_ratio * steps), round(warmdown_ratio * steps)
    if step < warmup:
        return (step + 1) / warmup
    if step <= steps - warmdown:
        return 1.0
    progress = (steps - step) / warmdown
    return progress + (1 - progress) * final_lr_frac


def muon_momentum(step: int) -> float:
    """0.85 to 0.95 over the first 300 steps."""
    low, high = MOMENTUM
    return low + (high - low) * min(step / MOMENTUM_STEPS, 1.0)


def weight_decay_multiplier(step: int, steps: int) -> float:
    """Muon's weight decay falls linearly to zero."""
    return 1 - step / steps
