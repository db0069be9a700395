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
from itertools import chain
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
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, in names of saved state
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
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def parameter_groups(
    model: GPT, config: OptimConfig, lr_scale: float = 1.0, weight_decay_scale: float = 1.0
) -> list[ParameterGroup]:
    """Every parameter in one group, in nanochat's order. What is not nanochat's is updated by AdamW, without decay."""
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
    muon = [group for group in groups if group.kind == "muon"]
    largest = max(
        g.initial_lr * g.weight_decay * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 for g in muon for p in g.parameters
    )
    if largest >= 1:
        raise UserError(
            f"--weight-decay with --matrix-lr would take {largest:.3g} of every matrix entry away in one step; "
            "lower it until that is below 1"
        )


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


class MuonAdamW:
    """The optimiser of a GPT. `step` takes the schedule's values.

    State is saved and loaded whole, whatever the number of ranks. through_float32: how Muon multiplies bfloat16
    (`muon.product`).
    """

    def __init__(
        self, groups: list[ParameterGroup], runtime: Runtime, compile: bool = False, through_float32: bool = False
    ):
        self.groups, self.runtime, self.steps = groups, runtime, 0
        self.deal, self.everywhere = Dealer(runtime), Dealer(runtime, deals=False)
        # For a CPU one program serves many shapes: it is as fast as one for each, and compiled sooner.
        dynamic = runtime.device.type == "cpu"
        self._adamw, self._muon = (
            torch.compile(f, dynamic=dynamic) if compile else f
            for f in (adamw_update, partial(muon_update, through_float32=through_float32))
        )
        for group in self._groups("muon"):
            first, share = group.parameters[0], self.deal.share(len(group.parameters))
            group.state["momentum_buffer"] = first.new_zeros(share, *first.shape)
            group.state["second_momentum_buffer"] = first.new_zeros(share, *second_moment_shape(first.shape))
        for state, key, parameter, deal in self._moments():
            state[key] = parameter.new_zeros(deal.share(parameter.numel()))

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
        reductions = [self._reduce_muon(g) if g.kind == "muon" else self._reduce_adamw(g) for g in self.groups]
        gathers = []
        for group, (gradients, works) in zip(self.groups, reductions):
            wait(works)
            lr = self._scalar(group.initial_lr * lr_multiplier)
            if group.kind == "muon":
                gathers.append(self._update_muon(group, gradients, lr, momentum, weight_decay_multiplier))
            else:
                gathers += self._update_adamw(group, gradients, lr)
        for parameters, updated, works in gathers:
            wait(works)
            if parameters:
                torch._foreach_copy_(parameters, updated)

    def _groups(self, kind: str) -> list[ParameterGroup]:
        return [group for group in self.groups if group.kind == kind]

    def _scalar(self, value: float) -> torch.Tensor:
        """A hyperparameter as a 0-d tensor on the device: a number would be compiled in."""
        return torch.tensor(float(value), device=self.runtime.device)

    # Muon

    def _reduce_muon(self, group: ParameterGroup):
        return self.deal.reduce(self.deal.pad(torch.stack([parameter.grad for parameter in group.parameters])))

    def _update_muon(self, group: ParameterGroup, gradients, lr, momentum, weight_decay_multiplier):
        """(parameters, their new values, the transfers to wait for)."""
        count, share = len(group.parameters), self.deal.share(len(group.parameters))
        stacked = self.deal.pad(torch.stack(group.parameters))
        part, mine = self.deal.part(stacked), max(0, min(share, count - self.runtime.rank * share))  # without padding
        if mine:
            state = (group.state[name][:mine] for name in ("momentum_buffer", "second_momentum_buffer"))
            momentum, weight_decay, beta2 = (
                self._scalar(v) for v in (momentum, group.weight_decay * weight_decay_multiplier, group.betas[1])
            )
            self._muon(part[:mine], gradients[:mine], *state, momentum, lr, weight_decay, beta2)
        return group.parameters, list(stacked[:count].unbind()), self.deal.gather(stacked)

    # AdamW, of flat tensors

    def _dealer(self, parameter: torch.Tensor) -> Dealer:
        return self.deal if parameter.numel() >= SMALLEST_DEALT else self.everywhere

    def _reduce_adamw(self, group: ParameterGroup):
        deals = ((self._dealer(parameter), parameter.grad.flatten()) for parameter in group.parameters)
        gradients, works = zip(*(deal.reduce(deal.pad(gradient)) for deal, gradient in deals))
        return gradients, list(chain(*works))

    def _update_adamw(self, group: ParameterGroup, gradients, lr):
        """(parameters, their new values, the transfers to wait for) of each tensor."""
        beta1, beta2, step = (self._scalar(value) for value in (*group.betas, self.steps))
        gathers = []
        for name, parameter, gradient in zip(group.names, group.parameters, gradients):
            deal, moments = self._dealer(parameter), (group.state[f"{name}.{moment}"] for moment in MOMENTS)
            flat = deal.pad(parameter.flatten())
            self._adamw(deal.part(flat), gradient, *moments, step, lr, beta1, beta2)
            updated = flat[: parameter.numel()].view_as(parameter)
            padded = len(flat) > parameter.numel()  # otherwise they are the same memory
            gathers.append(([parameter] * padded, [updated] * padded, deal.gather(flat)))
        return gathers

    # State

    def _moments(self) -> Iterator[tuple[dict[str, torch.Tensor], str, torch.Tensor, Dealer]]:
        """AdamW's two moments of every parameter: the group's state, the key in it, the parameter, its dealer."""
        for group in self._groups("adamw"):
            for name, parameter in zip(group.names, group.parameters):
                for moment in MOMENTS:
                    yield group.state, f"{name}.{moment}", parameter, self._dealer(parameter)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All optimiser state by parameter name, gathered from every rank (a collective: call it on all of them).

        With several ranks only rank 0 gets it, on the CPU: together it may not fit a GPU.
        """
        result = {"steps": torch.tensor(self.steps)}
        several = self.runtime.world_size > 1

        def add(key: str, value: torch.Tensor) -> None:
            if self.runtime.is_main:
                result[key] = value.to("cpu", copy=True) if several else value

        for group in self._groups("muon"):
            for key, part in group.state.items():
                for name, value in zip(group.names, self.deal.gathered(part, len(group.names))):
                    add(f"{name}.{key}", value)
        for state, key, parameter, deal in self._moments():
            add(key, deal.gathered(state[key], parameter.numel()).view_as(parameter))
        return result

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take this rank's part of a state saved by any number of ranks. Raises KeyError if a tensor is missing."""
        self.steps = int(state["steps"])
        for group in self._groups("muon"):
            first = self.runtime.rank * self.deal.share(len(group.names))
            for key, part in group.state.items():
                for slot, name in zip(part, group.names[first : first + len(part)]):
                    slot.copy_(state[f"{name}.{key}"])
        for here, key, _, deal in self._moments():
            here[key].copy_(deal.part(deal.pad(state[key].flatten())))
