"""Time the attention operator: Gaussian kernel attention against softmax attention's fastest kernels.

    python -m runs.bench.attention                           every case for the device present
    python -m runs.bench.attention --only vit lm-full        the cases whose names begin so
    python -m runs.bench.attention --shapes 16x2048x10x128cw1024n

Cases: vit-{ti,s,b} (DeiT's 197 tokens), lm-full and lm-window (nanochat's depth 20: causal, and its window), sweep-N
(equal tokens in all, N = 64 ...), decode-bB-N (one query for each of B sequences against N cached tokens: GKA's one
cache against keys and values). Forward, and forward + backward. bfloat16 on CUDA, float32 on a CPU.
`python -m runs.bench.report` prints the tables.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from nanochat_gka.model.config import GPTConfig
from runs.bench.config import CaseConfig
from runs.bench.device import buffers_for, release_memory
from runs.bench.measurement import Measurement, Plan
from runs.bench.operators import FORWARD, FULL, Case, Operator, gate, inputs, normalise, operators
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from trainkit.cli import UserError, run
from trainkit.distributed import setup
from trainkit.progress import progress_bar

BENCHMARK = "attention"
D20 = GPTConfig.from_depth(20)
VIT_HEADS = {"vit-ti": 3, "vit-s": 6, "vit-b": 12}
PLANS = {"cuda": Plan(rounds=50, seconds=10, sample_ms=1.0, graph=True), "cpu": Plan(rounds=25, warmup=2, seconds=1.5)}


@dataclass
class AttentionConfig(CaseConfig):
    """Time Gaussian kernel attention beside softmax attention, the operator alone.

    Appends to RESULTS/bench_attention_<hardware>.jsonl.
    """

    shapes: list[str] = field(default_factory=list)
    """Time these instead of the standard cases: BxTxHxD, then c (causal), wN (window N), n (RMS-normalised heads),
    d (decode), such as 16x2048x10x128cw1024n."""
    skip: list[str] = field(default_factory=list)
    """Leave out candidates with one of these in their name, such as flex or eager."""

    def check(self) -> None:
        super().check()
        try:
            self.parsed = [Case.parse(shape) for shape in self.shapes]
        except ValueError as error:
            raise UserError(f"--shapes: {error}") from None


def standard_cases(device_type: str, quick: bool) -> list[Case]:
    """The cases of the targets, in sizes that the device can do; `quick` keeps one of each kind."""
    cuda = device_type == "cuda"
    cases = [
        Case(name, 256 if cuda else 8, 197, heads, 64) for name, heads in VIT_HEADS.items() if cuda or name == "vit-ti"
    ]
    batch, tokens = (16, D20.sequence_len) if cuda else (1, 512)
    full = Case("lm-full", batch, tokens, D20.n_head, D20.head_dim, causal=True, constant_norm=True)
    # nanochat's S layers see so many earlier tokens and the token itself.
    cases += [full, replace(full, name="lm-window", window=D20.window(0) * tokens // D20.sequence_len)]
    total, longest, heads = (65536, 16384, 6) if cuda else (1024, 1024, 3)
    lengths = [64 * 2**k for k in range(9) if 64 * 2**k <= longest]
    cases += [
        Case(f"sweep-{length}", total // length, length, heads, 64) for length in (lengths[::4] if quick else lengths)
    ]
    caches = [(1, 1024), (1, 2048), (1, 8192), (32, 1024), (32, 2048), (32, 8192)] if cuda else [(1, 1024), (8, 1024)]
    cases += [
        Case(f"decode-b{b}-{n}", b, n, D20.n_head, D20.head_dim, constant_norm=True, queries=1)
        for b, n in (caches[::3] if quick else caches)
    ]
    return [case for case in cases if case.name not in ("vit-s", "vit-b", "lm-window")] if quick else cases


def make_calls(case: Case, phase: str, candidates: dict[str, Operator], buffers: int, device, dtype):
    """name -> call(n): the operator, forward or forward and backward, on the n-th set of inputs."""
    sets = {}
    for family in {operator.family for operator in candidates.values()}:
        drawn = (inputs(case, family, device, dtype, seed=10 + n) for n in range(buffers))
        sets[family] = [
            tuple(t.detach().requires_grad_(phase == FULL) for t in (normalise(case, s) if family == "gka" else s))
            for s in drawn
        ]
    grads = [inputs(case, "gka", device, dtype, seed=100 + n)[0] for n in range(buffers)] if phase == FULL else []

    def forward(operator: Operator, n: int) -> None:
        with torch.no_grad():
            operator.function(*sets[operator.family][n])

    def full(operator: Operator, n: int) -> None:
        tensors = sets[operator.family][n]
        torch.autograd.grad(operator.function(*tensors), tensors, grads[n])

    return {name: partial(forward if phase == FORWARD else full, operator) for name, operator in candidates.items()}


def measure(
    case: Case, phase: str, plan: Plan, device: torch.device, skip: list[str]
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """One comparison: what every candidate gave, and its role."""
    torch._dynamo.reset()  # FlexAttention compiles for each shape, and torch stops at eight
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    candidates = operators(case, device, dtype, phase)
    candidates = {name: each for name, each in candidates.items() if not any(word in name for word in skip)}
    roles = {name: operator.role for name, operator in candidates.items()}
    bytes_each = case.batch * case.tokens * case.heads * case.head_dim * dtype.itemsize
    buffers = buffers_for(device, bytes_each)
    try:
        calls = make_calls(case, phase, candidates, buffers, device, dtype)
    except torch.OutOfMemoryError as error:
        measured = {name: Measurement() for name in candidates}
        for measurement in measured.values():
            measurement.fail(error)
        return measured, roles
    gates = {name: partial(gate, operator, case, phase, device, dtype) for name, operator in candidates.items()}
    return interleave(calls, device, replace(plan, buffers=buffers), gates), roles


def main(config: AttentionConfig) -> None:
    config.check()
    device = setup(config.device_type).device
    cases = {case.name: case for case in config.parsed or standard_cases(device.type, config.quick)}
    chosen = [
        (cases[name], phase)
        for name in config.select(list(cases))
        for phase in ((FORWARD,) if cases[name].queries else (FORWARD, FULL))
    ]
    recorder, plan = Recorder(config, BENCHMARK, device), PLANS[device.type].adjust(config)
    with progress_bar() as bar:
        task = bar.add_task("attention", total=len(chosen), status="")
        for case, phase in chosen:
            bar.update(task, status=f"{case.name} {phase}")
            measured, roles = measure(case, phase, plan, device, config.skip)
            settings = {**case.settings(), "dtype": "bfloat16" if device.type == "cuda" else "float32"}
            recorder.record(case.name, phase, measured, roles, settings)
            release_memory()
            bar.advance(task)


if __name__ == "__main__":
    run(main, AttentionConfig)
