"""Time the attention operator: Gaussian kernel attention against softmax attention's fastest kernels.

    python -m runs.bench.attention                           every case for the device present
    python -m runs.bench.attention --only vit lm-full        the cases whose names begin so
    python -m runs.bench.attention --shapes 16x2048x10x128cw1024n

Cases: vit-{ti,s,b} (DeiT's 197 tokens), lm-full and lm-window (causal, and with a window; on CUDA nanochat's depth 20,
on a CPU 2,048 tokens, and 512 as lm-short-*), sweep-N (equal tokens in all, N = 64 ...), decode-bB-N (one query for
each of B sequences against N cached tokens: GKA's one cache, of keys that are values, against keys and values),
decode-derived-bB-N (the same, with GKA's keys computed from the cache), padded (512 tokens, lengths uniform in 64 to
512) and padded-full (lengths that are all 512, and no lengths). Forward, and forward + backward. On CUDA
bfloat16. On a CPU float32, then bfloat16 (-bf16, beside the faster of both dtypes of softmax attention); with one
thread, then with all. `python -m runs.bench.report` prints the tables.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from nanochat_gka.model.config import GPTConfig
from runs.bench.operators import FORWARD, FULL, Case, Operator, gate, inputs, normalise, operators
from runs.bench.program import ComparisonConfig, Recorder, with_dtype
from runs.bench.timing import Measurement, Plan, buffers_for, interleave, release_memory
from trainkit_gka.cli import UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import progress_bar

BENCHMARK = "attention"
D20 = GPTConfig.from_depth(20)
VIT_HEADS = {"vit-ti": 3, "vit-s": 6, "vit-b": 12}
# Name, batch, tokens, heads, head_dim.
CAUSAL = {
    "cuda": [("lm-full", 16, D20.sequence_len, D20.n_head, D20.head_dim)],
    "cpu": [("lm-full", 1, 2048, 8, 64), ("lm-short-full", 4, 512, 4, 32)],
}
CPU_WINDOW = 256  # earlier tokens in reach
SLOW = ("vit-s", "vit-b", "lm-window", "lm-short-window")  # --quick leaves them out
ONE_DTYPE = ("sweep-", "decode-")  # cases in the device's usual dtype alone
PLANS = {"cuda": Plan(rounds=50, seconds=10, sample_ms=1.0, graph=True), "cpu": Plan(rounds=25, warmup=2, seconds=1.5)}


@dataclass
class AttentionConfig(ComparisonConfig):
    """Time Gaussian kernel attention beside softmax attention, the operator alone.

    Appends to RESULTS/bench_attention_<hardware>.jsonl.
    """

    shapes: list[str] = field(default_factory=list)
    """Time these instead of the standard cases: BxTxHxD, then pN (padded, lengths N to T), or c (causal), wN (window
    N), n (RMS-normalised heads), d (decode), dk (decode, keys derived from the cache): 16x2048x10x128cw1024n."""
    skip: list[str] = field(default_factory=list)
    """Leave out candidates with one of these in their name, such as flex or eager."""

    def check(self) -> None:
        try:
            self.parsed = [Case.parse(shape) for shape in self.shapes]
        except ValueError as error:
            raise UserError(f"--shapes: {error}") from None


def standard_cases(device_type: str, quick: bool) -> list[Case]:
    """The cases, in sizes that the device can do; `quick` keeps one of each kind."""
    cuda = device_type == "cuda"
    cases = [Case(name, 256 if cuda else 8, 197, heads, 64) for name, heads in VIT_HEADS.items()]
    for name, batch, tokens, heads, head_dim in CAUSAL[device_type]:
        full = Case(name, batch, tokens, heads, head_dim, causal=True, constant_norm=True)
        window = D20.window(0) if cuda else CPU_WINDOW
        cases += [full, replace(full, name=name.replace("full", "window"), window=window)]
    total, longest, heads = (65536, 16384, 6) if cuda else (1024, 1024, 3)
    lengths = [64 * 2**k for k in range(9) if 64 * 2**k <= longest]
    cases += [
        Case(f"sweep-{length}", total // length, length, heads, 64) for length in (lengths[::4] if quick else lengths)
    ]
    caches = [(1, 1024), (1, 2048), (1, 8192), (32, 1024), (32, 2048), (32, 8192)] if cuda else [(1, 1024), (8, 1024)]
    for derived in (False, True):
        cases += [
            Case(
                f"decode{'-derived' if derived else ''}-b{b}-{n}",
                b, n, D20.n_head, D20.head_dim, constant_norm=True, queries=1, derived=derived,
            )
            for b, n in (caches[::3] if quick else caches)
        ]  # fmt: skip
    padded = Case("padded", 64 if cuda else 8, 512, 12 if cuda else 4, 64, shortest=64)
    cases += [padded, replace(padded, name="padded-full", shortest=512)]
    return [case for case in cases if case.name not in SLOW] if quick else cases


def make_calls(case: Case, phase: str, candidates: dict[str, Operator], buffers: int, device):
    """name -> call(n): the operator, forward or forward and backward, on the n-th set of inputs."""
    sets, grads = {}, {}
    for family, dtype in {(operator.family, operator.dtype) for operator in candidates.values()}:
        drawn = (inputs(case, family, device, dtype, seed=10 + n) for n in range(buffers))
        sets[family, dtype] = [
            tuple(t.detach().requires_grad_(phase == FULL) for t in (normalise(case, s) if family == "gka" else s))
            for s in drawn
        ]
        if phase == FULL:
            grads[dtype] = [inputs(case, "gka", device, dtype, seed=100 + n)[0] for n in range(buffers)]

    def forward(operator: Operator, n: int) -> None:
        with torch.no_grad():
            operator.function(*sets[operator.family, operator.dtype][n])

    def full(operator: Operator, n: int) -> None:
        tensors = sets[operator.family, operator.dtype][n]
        torch.autograd.grad(operator.function(*tensors), tensors, grads[operator.dtype][n])

    return {name: partial(forward if phase == FORWARD else full, operator) for name, operator in candidates.items()}


def measure(
    case: Case, phase: str, dtype: torch.dtype, plan: Plan, device: torch.device, skip: list[str]
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """One comparison: what every candidate gave, and its role."""
    torch._dynamo.reset()  # FlexAttention compiles for each shape, and torch stops at eight
    candidates = operators(case, device, dtype, phase)
    candidates = {name: each for name, each in candidates.items() if not any(word in name for word in skip)}
    roles = {name: operator.role for name, operator in candidates.items()}
    bytes_each = case.batch * case.tokens * case.heads * case.head_dim * dtype.itemsize
    buffers = buffers_for(device, bytes_each)
    try:
        calls = make_calls(case, phase, candidates, buffers, device)
    except torch.OutOfMemoryError as error:
        measured = {name: Measurement() for name in candidates}
        for measurement in measured.values():
            measurement.fail(error)
        return measured, roles
    gates = {name: partial(gate, operator, case, phase, device) for name, operator in candidates.items()}
    return interleave(calls, device, replace(plan, buffers=buffers), gates), roles


def main(config: AttentionConfig) -> None:
    config.check()
    device = setup(config.device_type).device
    cases = {}
    for case in config.parsed or standard_cases(device.type, config.quick):
        for dtype in config.dtypes_on(device.type):
            name = with_dtype(case.name, dtype, device.type)
            if name == case.name or config.parsed or not case.name.startswith(ONE_DTYPE):
                cases[name] = case, dtype
    chosen = config.select(list(cases))
    plan = config.adjust(PLANS[device.type])
    all_threads = [torch.get_num_threads()]
    with progress_bar() as bar:
        for threads in config.with_threads(sorted({1, *all_threads}) if device.type == "cpu" else all_threads):
            recorder = Recorder(config, BENCHMARK, device)
            task = bar.add_task(f"attention, {threads} threads", total=len(chosen), status="")
            for name in chosen:
                bar.update(task, status=name)
                case, dtype = cases[name]
                for phase in (FORWARD,) if case.queries else (FORWARD, FULL):
                    measured, roles = measure(case, phase, getattr(torch, dtype), plan, device, config.skip)
                    recorder.record(name, phase, measured, roles, {**case.settings(), "dtype": dtype})
                    release_memory()
                bar.advance(task)


if __name__ == "__main__":
    run(main, AttentionConfig)
