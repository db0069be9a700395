"""Time the parts of a language training step: where its milliseconds go, for softmax attention and for GKA.

    python -m runs.bench.parts                     depth 12 on CUDA, depth 4 on a CPU
    python -m runs.bench.parts --shapes d20-L      another depth

Both models have the preset's additions. Each part runs alone, forward and backward (the optimiser its step), compiled
by itself, at the model's shapes, and counts as often as a step has it. The compiler fuses parts of a model with their
neighbours, so that together they may take longer than the step; the remainder is then negative. Matrix products are
timed without the norm in front of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from nanochat_gka.model.blocks import norm
from nanochat_gka.model.gpt import GPT
from runs.bench.gpt import Case, GPTBenchConfig, LanguageCandidate, LanguageSubject
from runs.bench.models import TRAINING
from runs.bench.program import Comparison, time_cases
from runs.bench.timing import Measurement, Plan, interleave, release_memory
from runs.table import Table
from trainkit_gka import compiling
from trainkit_gka.cli import run
from trainkit_gka.distributed import Runtime, setup

ROLES = {"softmax-preset": "baseline", "gka-preset": "ours"}
USUAL = {"cuda": "d12-L", "cpu": "d4"}
STEP, REMAINDER = "step", "remainder"
STEP_PLANS = {"cuda": Plan(rounds=20, seconds=4), "cpu": Plan(rounds=5, warmup=1, seconds=10)}
PART_PLANS = {"cuda": Plan(20, seconds=10, sample_ms=1.0, graph=True), "cpu": Plan(5, warmup=1, seconds=10)}


@dataclass
class PartsConfig(GPTBenchConfig):
    """Time the parts of a language training step.

    Appends to RESULTS/bench_parts_<hardware>.jsonl; a part's milliseconds are those of all its `calls` in a step. A
    shape is one of runs.bench.gpt; the standard ones are depth 12 on CUDA, depth 4 on a CPU.
    """


class Part(NamedTuple):
    """What a step does `calls` times. The work is the same in both models, unless the part is a model's own."""

    name: str
    calls: int
    function: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...] = ()
    own: bool = False


def parts_of(model: GPT, ids: torch.Tensor, targets: torch.Tensor) -> Iterator[Part]:
    """The parts of a training step on ids and targets, (B, T) each, without the optimiser."""
    layers, gka, dtype = model.attentions, model.config.attention == "gka", model.dtype
    first, places = layers[0], slice(0, ids.shape[1])
    embedded = next(layer for layer in layers if layer.ve_gate is not None)
    table = model.value_embeds[str(embedded.layer)]

    def draw() -> torch.Tensor:
        x = torch.randn(*ids.shape, model.config.n_embd, device=model.device)
        return norm(first.heads(x)).flatten(2).to(dtype).requires_grad_()

    def head_inputs() -> torch.Tensor:
        return first.heads(draw()).detach().requires_grad_()

    def count(part: str) -> int:
        return sum(getattr(layer, part) is not None for layer in layers)

    def residual(x, x0):
        x = model.resid_lambdas[0].to(dtype) * x + model.x0_lambdas[0].to(dtype) * x0
        return x + x0 + x0

    def add_value_embedding(values, x):
        return embedded.add_value_embedding(values, x, table(ids).to(dtype))

    x, x0, q, k, v = draw(), draw(), head_inputs(), head_inputs(), head_inputs()
    yield Part("embedding", 1, lambda: model.transformer.wte(ids).to(dtype))
    yield Part("norms", 2 * len(layers) + 2, norm, (x,))
    yield Part("residual stream", len(layers), residual, (x, x0))
    yield Part("projections", sum(len(layer.projections) + 1 for layer in layers), first.c_proj, (x,))
    yield Part("norms of heads", 2 * len(layers), norm, (q,))
    yield Part("rotary positions", (1 if gka else 2) * len(layers), lambda q: model.rotary(q, places), (q,))
    yield Part("channel bandwidths", count("channel_log_scales"), first.scaled, (x,))
    yield Part("head offsets", count("pairing"), first.pairing, (k, v))
    yield Part("head gates", count("head_gate"), lambda q, x: q * first.gates(x)[..., None], (q, x))
    yield Part("value embeddings", count("ve_gate"), add_value_embedding, (v, x))
    for window in sorted({layer.window for layer in layers}):
        alike = [layer for layer in layers if layer.window == window]
        attend = compiling.twin(alike[0])
        attend.pairing = None
        mix = partial(lambda attend, q, *stored: attend.attend(model.rotary, q, stored), attend)
        yield Part(f"attention to {window}", len(alike), mix, (q, v, k) if gka else (q, k, v), own=True)
    yield Part("MLPs", len(layers), model.transformer.h[0].mlp, (x,))
    yield Part("head and loss", 1, lambda x: model.loss(x, targets, "mean"), (x,))


def gradients_of(part: Part, model: GPT, compiled: bool) -> Callable[[int], Any]:
    """A call of the part, forward and backward to its inputs and to the parameters that it reads."""

    def outputs(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        results = function(*part.inputs)
        return results if isinstance(results, tuple) else (results,)

    every = [*part.inputs, *model.parameters()]
    down = [torch.randn_like(t) for t in outputs(part.function)]
    read = torch.autograd.grad(outputs(part.function), every, down, allow_unused=True)
    leaves = [t for t, gradient in zip(every, read, strict=True) if gradient is not None]
    function = torch.compile(part.function, dynamic=False) if compiled else part.function
    return lambda n: torch.autograd.grad(outputs(function), leaves, down)


def optimise(candidate: LanguageCandidate) -> Callable[[int], None]:
    """The optimiser's step, with the gradients of a batch."""
    subject, parameters = candidate.subject, list(candidate.model.parameters())
    subject.compute(candidate.model, candidate.dtype, subject.inputs, subject.targets).backward()
    gradients = [parameter.grad for parameter in parameters]

    def step(n: int) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        candidate.optimizer.step()
        candidate.optimizer.zero_grad()

    return step


def measure(config: PartsConfig, runtime: Runtime, case: Case, phase: str) -> Iterator[Comparison]:
    """In each dtype a comparison of both models in every part, and at last in the step; then the table is printed."""
    for dtype in config.dtypes_on(runtime.device.type):
        yield from measure_in(dtype, config, runtime, case)
        release_memory()


def measure_in(dtype: str, config: PartsConfig, runtime: Runtime, case: Case) -> Iterator[Comparison]:
    """`measure` in one dtype."""
    device, mode = runtime.device, config.mode("default", runtime)
    torch._dynamo.reset()
    compiling.allow_many_programs()
    calls: dict[tuple[str, str], Callable[[int], Any]] = {}  # by part and, if it is a model's own, kind
    counts: dict[str, dict[str, int]] = {}
    steps: dict[tuple[str, str], Callable[[int], Any]] = {}
    gates = {}
    for kind in ROLES:
        candidate = LanguageCandidate(LanguageSubject(case, TRAINING, runtime, kind), dtype, mode)
        subject = candidate.subject
        for part in parts_of(candidate.model, subject.inputs, subject.targets):
            counts.setdefault(part.name, {})[kind] = part.calls
            name = (part.name, kind if part.own else "")
            if part.calls and name not in calls:
                calls[name] = gradients_of(part, candidate.model, mode != "off")
        steps |= {("optimiser", kind): optimise(candidate), (STEP, kind): candidate.step}
        gates[STEP, kind] = candidate.gate
    measured = interleave(calls, device, config.adjust(PART_PLANS[device.type]))
    measured |= interleave(steps, device, config.adjust(STEP_PLANS[device.type]), gates)
    counts |= {name: dict.fromkeys(ROLES, 1) for name, _ in steps}

    settings = {"depth": case.depth, "sequence_len": case.tokens, "vocab_size": case.vocab, "batch": case.batch}
    settings |= {"window_pattern": case.windows, "compile": "on" if mode == "default" else mode, "dtype": dtype}
    times: dict[str, dict[str, float | None]] = {}
    for name, calls_of in counts.items():
        taken = {kind: measured.get((name, kind)) or measured[name, ""] for kind in ROLES}
        taken = {kind: of_step(one, calls_of[kind]) for kind, one in taken.items()}
        times[name] = {kind: one.median_ms for kind, one in taken.items()}
        yield Comparison(settings, taken, ROLES, {kind: {"calls": calls_of[kind]} for kind in ROLES}, part=name)
    table(times).show()


def of_step(one: Measurement, calls: int) -> Measurement:
    """The measurement of a call as that of all in a step."""
    names = ("median_ms", "low_ms", "high_ms")
    return replace(one, **{name: value and calls * value for name in names for value in [getattr(one, name)]})


def table(times: dict[str, dict[str, float | None]]) -> Table:
    """Milliseconds and shares of the step by part and kind, and what of the step no part explains."""
    whole = times[STEP]
    parts = [row for name, row in times.items() if name != STEP]
    rest = {kind: whole[kind] and whole[kind] - sum(row[kind] or 0.0 for row in parts) for kind in ROLES}
    rows = []
    for name, row in {**times, REMAINDER: rest}.items():
        known = {kind: t for kind, t in row.items() if t is not None and whole[kind]}
        cells = [f"{known[kind]:.3f} ({known[kind] / whole[kind]:.1%})" if kind in known else "" for kind in ROLES]
        rows.append([name, *cells])
    return Table.of(["", *ROLES], rows, title="Milliseconds of a training step")


def standard_cases(device_type: str, quick: bool) -> list[Case]:
    return [Case.parse(USUAL[device_type], device_type, (TRAINING,))]


def main(config: PartsConfig) -> None:
    runtime = setup(config.device_type)
    chosen = config.choose(partial(Case.parse, phases=(TRAINING,)), standard_cases, runtime.device.type)
    time_cases("parts", config, chosen, runtime.device, partial(measure, config, runtime))


if __name__ == "__main__":
    run(main, PartsConfig)
