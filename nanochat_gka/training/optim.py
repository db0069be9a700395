"""Muon for the blocks' matrices, AdamW for the rest: nanochat's groups and rules, on any number of ranks.

Gradients are summed over ranks (the loss is already divided by the global token count). Work and state are dealt out:
Muon's matrices of one shape, stacked; each large tensor of AdamW's, flat. Every rank reduces, updates and keeps the
state of its own share, then the results are gathered. AdamW's small tensors are all-reduced and updated everywhere.
Every transfer is started before any is waited for.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist

from nanochat_gka.model.accounting import REFERENCE_BATCH
from nanochat_gka.model.attention import ADAMW_PARTS
from nanochat_gka.model.gpt import GPT
from nanochat_gka.training.muon import muon_update, second_moment_shape
from trainkit_gka.cli import Bounds, Group, UserError
from trainkit_gka.distributed import Runtime

# Newer torch renames the two collectives and warns about the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
ADAMW_MOMENTS = {"exp_avg": (), "exp_avg_sq": ()}  # names in saved state, and the shape of an entry
MUON_BETA2 = 0.95
ADAM_EPS = 1e-10
X0_BETAS = (0.96, 0.95)
LAMBDA_LR_FACTOR = 0.01  # resid_lambdas are a hundred times slower than x0_lambdas
REFERENCE_WIDTH = 768
SMALLEST_DEALT = 1024  # numbers; dealing out a smaller tensor of AdamW's would save nothing

Rate = Annotated[float, Bounds(0, 1e38)]  # and its scaled value is a float32
Beta = Annotated[float, Bounds(0, 0.999999)]  # 1 in float32 would divide by 1 - beta = 0


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser's flags. Base rates are for steps of `lr_batch_size` tokens.

    The defaults are nanochat's; it has no sigma_lr, channel_lr and gate_lr, and always 2^19 tokens.
    """

    embedding_lr: Annotated[Rate, Group.OPTIMISER] = 0.3
    """Base learning rate of the embeddings (AdamW)."""
    unembedding_lr: Annotated[Rate, Group.OPTIMISER] = 0.004
    """Base learning rate of the output head (AdamW)."""
    matrix_lr: Annotated[Rate, Group.OPTIMISER] = 0.02
    """Base learning rate of the blocks' matrices (Muon)."""
    scalar_lr: Annotated[Rate, Group.OPTIMISER] = 0.5
    """Base learning rate of the residual scalars (AdamW)."""
    sigma_lr: Annotated[Rate, Group.OPTIMISER] = 0.005
    """Base learning rate of log sigma (AdamW)."""
    channel_lr: Annotated[Rate, Group.OPTIMISER] = 0.02
    """Base learning rate of the channel bandwidths' logarithms (AdamW)."""
    gate_lr: Annotated[Rate, Group.OPTIMISER] = 0.02
    """Base learning rate of the head gates (AdamW)."""
    lr_batch_size: Annotated[int, Bounds(1), Group.OPTIMISER] = REFERENCE_BATCH
    """Tokens of a step for which the rates are; with others they go with the square root. Small steps want it lower:
    at 2,048 tokens the default makes rates a sixteenth."""
    weight_decay: Annotated[Rate, Group.OPTIMISER] = 0.2
    """Muon's weight decay before scaling; it falls to zero over the run."""
    adam_beta1: Annotated[Beta, Group.OPTIMISER] = 0.8
    """AdamW's averaging of the gradient."""
    adam_beta2: Annotated[Beta, Group.OPTIMISER] = 0.95
    """AdamW's averaging of the squared gradient."""


@dataclass
class ParameterGroup:
    """Parameters that are updated together. `initial_lr` is the rate at multiplier 1."""

    kind: str  # adamw or muon
    names: list[str]
    parameters: list[torch.Tensor]
    initial_lr: float
    betas: tuple[float, float] = (0.0, MUON_BETA2)
    weight_decay: float = 0.0
    units: list["Unit"] = field(default_factory=list)


def parameter_groups(
    model: GPT, config: OptimConfig, lr_scale: float = 1.0, weight_decay_scale: float = 1.0
) -> list[ParameterGroup]:
    """Every parameter in one group, in nanochat's order. AdamW updates those that nanochat lacks, undecayed."""
    betas = (config.adam_beta1, config.adam_beta2)
    width_scale = (model.config.n_embd / REFERENCE_WIDTH) ** -0.5
    lr_scale *= math.sqrt(REFERENCE_BATCH / config.lr_batch_size)
    named = dict(model.named_parameters())

    def adamw(prefixes: tuple[str, ...], lr: float, betas=betas) -> ParameterGroup:
        names = [name for name in named if name.startswith(prefixes)]
        return ParameterGroup("adamw", names, [named.pop(name) for name in names], lr * lr_scale, betas)

    groups = [
        adamw(("lm_head",), config.unembedding_lr * width_scale),
        adamw(("transformer.wte",), config.embedding_lr * width_scale),
        adamw(("value_embeds",), config.embedding_lr * width_scale),
        adamw(("resid_lambdas",), config.scalar_lr * LAMBDA_LR_FACTOR),
        adamw(("x0_lambdas",), config.scalar_lr, X0_BETAS),
    ]
    for part, rate in ADAMW_PARTS.items():
        groups.append(adamw(tuple(name for name in named if f".attn.{part}." in f"{name}."), getattr(config, rate)))
    for shape in sorted({tuple(p.shape) for p in named.values()}):
        names = [name for name, p in named.items() if tuple(p.shape) == shape]
        if len(shape) != 2:
            raise ValueError(f"no optimiser group takes parameters of shape {shape}: {names}")
        matrices, decay = [named[name] for name in names], config.weight_decay * weight_decay_scale
        groups.append(ParameterGroup("muon", names, matrices, config.matrix_lr * lr_scale, weight_decay=decay))
    return [group for group in groups if group.parameters]


def check_decay(groups: list[ParameterGroup]) -> None:
    """Raises UserError if the first step's weight decay would take all of a matrix's entries away, or more."""
    shapes = [(g.initial_lr * g.weight_decay, *p.shape) for g in groups if g.kind == "muon" for p in g.parameters]
    largest = max(decay * max(1.0, rows / columns) ** 0.5 for decay, rows, columns in shapes)
    if largest >= 1:
        problem = f"--weight-decay with --matrix-lr would take {largest:.3g} of every matrix entry away in one step"
        raise UserError(f"{problem}; lower it until that is below 1")


def adamw_update(parameter, gradient, exp_avg, exp_avg_sq, step, lr, beta1, beta2) -> None:
    """One AdamW step without weight decay, in place; the hyperparameters are 0-d tensors."""
    exp_avg.lerp_(gradient, (1 - beta1).to(exp_avg.dtype))
    exp_avg_sq.lerp_(gradient.square(), (1 - beta2).to(exp_avg.dtype))
    root = (exp_avg_sq / (1 - beta2**step)).sqrt() + ADAM_EPS
    parameter.sub_(exp_avg / root * (lr / (1 - beta1**step)))


class Dealer:
    """A tensor in equal shares of its first dimension for the ranks, or with deals=False whole on every rank.

    Zeros pad the end. `padded`: a result of `pad`.
    """

    def __init__(self, runtime: Runtime, deals: bool = True):
        self.several = runtime.world_size > 1
        self.rank, self.ranks = (runtime.rank, runtime.world_size) if deals else (0, 1)

    def share(self, count: int) -> int:
        """A rank's part of a dimension of `count`; the last ranks may hold padding."""
        return -(-count // self.ranks)

    def pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, or a copy with zeros after it if the shares would not be equal."""
        padding = self.share(len(tensor)) * self.ranks - len(tensor)
        return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor

    def part(self, padded: torch.Tensor) -> torch.Tensor:
        """This rank's share, a view."""
        share = self.share(len(padded))
        return padded[self.rank * share : (self.rank + 1) * share]

    def reduce(self, padded: torch.Tensor):
        """(this rank's share of the sum over ranks, the transfers to wait for)."""
        if self.ranks == 1:
            return padded, [dist.all_reduce(padded, async_op=True)] if self.several else []
        part = torch.empty_like(self.part(padded))
        return part, [reduce_scatter(part, padded, async_op=True)]

    def gather(self, padded: torch.Tensor):
        """The transfers that bring every rank's share of `padded` to all of them, in place."""
        return [] if self.ranks == 1 else [all_gather(padded, self.part(padded).clone(), async_op=True)]

    def gathered(self, part: torch.Tensor, count: int) -> torch.Tensor:
        """The ranks' shares together, without the padding (a collective)."""
        if self.ranks == 1:
            return part
        padded = part.new_empty(len(part) * self.ranks, *part.shape[1:])
        all_gather(padded, part)
        return padded[:count]


def wait(works) -> None:
    """Wait for transfers."""
    for work in works:
        work.wait()


class Unit:
    """Parameters that are updated as one tensor: Muon's matrices of one shape, stacked, or one of AdamW's, flat.

    state: this rank's share of each moment, whose entry for a matrix or a number has the shape in `moments`.
    """

    def __init__(self, deal: Dealer, names: list[str], parameters: list[torch.Tensor], moments: dict[str, tuple]):
        self.deal, self.names, self.parameters = deal, names, parameters
        self.is_stack = () not in moments.values()
        self.count = len(parameters) if self.is_stack else parameters[0].numel()
        share = deal.share(self.count)
        self.state = {moment: parameters[0].new_zeros(share, *shape) for moment, shape in moments.items()}

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A tensor for each parameter as one, padded; a view of a flat one if it needs no padding."""
        return self.deal.pad(torch.stack(tensors) if self.is_stack else tensors[0].flatten())

    def split(self, joined: torch.Tensor) -> list[torch.Tensor]:
        """The reverse of `join`: views."""
        joined = joined[: self.count]
        return list(joined.unbind()) if self.is_stack else [joined.view_as(self.parameters[0])]


class MuonAdamW:
    """The optimiser of a GPT. `step` takes the schedule's values.

    State is saved and loaded whole, whatever the number of ranks. through_float32: how Muon multiplies bfloat16
    (`muon.product`).
    """

    def __init__(
        self, groups: list[ParameterGroup], runtime: Runtime, compile: bool = False, through_float32: bool = False
    ):
        self.groups, self.runtime, self.steps = groups, runtime, 0
        # For a CPU one program serves many shapes: it is as fast as one for each, and compiled sooner.
        dynamic = runtime.device.type == "cpu"
        self._adamw, self._muon = (
            torch.compile(f, dynamic=dynamic) if compile else f
            for f in (adamw_update, partial(muon_update, through_float32=through_float32))
        )
        deal = Dealer(runtime)
        everywhere = Dealer(runtime, deals=False)
        for group in groups:
            if group.kind == "muon":
                shape = group.parameters[0].shape
                moments = {"momentum_buffer": shape, "second_momentum_buffer": second_moment_shape(shape)}
                group.units = [Unit(deal, group.names, group.parameters, moments)]
            else:
                group.units = [
                    Unit(deal if p.numel() >= SMALLEST_DEALT else everywhere, [name], [p], ADAMW_MOMENTS)
                    for name, p in zip(group.names, group.parameters)
                ]

    def zero_grad(self) -> None:
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None

    @torch.no_grad()
    def step(self, lr_multiplier: float = 1.0, momentum: float = 0.95, weight_decay_multiplier: float = 1.0) -> None:
        """Reduce, update, gather. A parameter that got no gradient counts as zero gradient."""
        self.steps += 1
        for group in self.groups:
            for parameter in group.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        units = [unit for group in self.groups for unit in group.units]
        reductions = iter([unit.deal.reduce(unit.join([p.grad for p in unit.parameters])) for unit in units])
        gathers = []
        for group in self.groups:
            lr = group.initial_lr * lr_multiplier
            if group.kind == "muon":
                update = self._muon
                numbers = (momentum, lr, group.weight_decay * weight_decay_multiplier, MUON_BETA2)
            else:
                update, numbers = self._adamw, (self.steps, lr, *group.betas)
            # As 0-d tensors on the device: numbers would be compiled in.
            scalars = [torch.tensor(float(number), device=self.runtime.device) for number in numbers]
            for unit in group.units:
                gradient, works = next(reductions)
                wait(works)
                joined = unit.join(unit.parameters)
                part = unit.deal.part(joined)
                # The last ranks may have padding, which AdamW leaves 0.
                mine = max(0, min(len(part), unit.count - unit.deal.rank * len(part))) if unit.is_stack else len(part)
                if mine:
                    update(part[:mine], gradient[:mine], *(state[:mine] for state in unit.state.values()), *scalars)
                gathers.append((unit, joined, unit.deal.gather(joined)))
        for unit, joined, works in gathers:
            wait(works)
            if unit.is_stack or len(joined) > unit.count:  # otherwise they are the same memory
                torch._foreach_copy_(unit.parameters, unit.split(joined))

    def _states(self) -> Iterator[tuple[Unit, str, torch.Tensor]]:
        """Every unit with its moments and this rank's share of them."""
        for group in self.groups:
            for unit in group.units:
                for moment, part in unit.state.items():
                    yield unit, moment, part

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All optimiser state by parameter name, gathered from every rank (a collective: call it on all of them).

        With several ranks only rank 0 gets it, on the CPU: together it may not fit a GPU.
        """
        result = {"steps": torch.tensor(self.steps)}
        several = self.runtime.world_size > 1
        for unit, moment, part in self._states():
            values = unit.split(unit.deal.gathered(part, unit.count))
            for name, value in zip(unit.names, values) if self.runtime.is_main else ():
                result[f"{name}.{moment}"] = value.to("cpu", copy=True) if several else value
        return result

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of a state saved by any number of ranks. Raises KeyError if a tensor is missing."""
        self.steps = int(state["steps"])
        for unit, moment, part in self._states():
            part.copy_(unit.deal.part(unit.join([state[f"{name}.{moment}"] for name in unit.names])))
