"""AdamW with the paper's decay exclusions, the cosine schedule and the weight average (timm's), and their state."""

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn

from deit_gka.recipe import Recipe

Tensors = dict[str, torch.Tensor]


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; 1-D parameters (biases, norms, log_sigma), positions and the CLS token are not decayed (timm's rule)."""
    fused = {"fused": True} if next(model.parameters()).is_cuda else {}
    return create_optimizer_v2(
        model, "adamw", lr=recipe.scaled_lr, weight_decay=recipe.weight_decay, betas=recipe.opt_betas, **fused
    )


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> CosineLRScheduler:
    """Linear warm-up, then a cosine whose clock started with it; `step_update(n)` sets the rate of update n."""
    return CosineLRScheduler(
        optimizer,
        t_initial=recipe.epochs * steps_per_epoch,
        lr_min=recipe.min_lr,
        warmup_t=round(recipe.warmup_epochs * steps_per_epoch),
        warmup_lr_init=recipe.warmup_lr,
        t_in_epochs=False,
    )


def make_average(model: nn.Module, recipe: Recipe) -> ModelEmaV3 | None:
    """The exponential moving average of the weights; None without a decay.

    With warm-up its decay is that of a plain mean until it reaches the recipe's.
    """
    warmup = dict(use_warmup=recipe.model_ema_warmup, warmup_power=1.0)
    return ModelEmaV3(model, decay=recipe.model_ema_decay, **warmup) if recipe.model_ema_decay else None


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensors:
    """The optimiser's state as {"exp_avg/blocks.0...": tensor}."""
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    return {f"{key}/{name}": value for name, state in states.items() for key, value in state.items()}


def load_state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Tensors) -> None:
    """Undo `state_tensors`. The tensors are on the model's device."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        kind, name = key.split("/", 1)
        optimizer.state[parameters[name]][kind] = value
