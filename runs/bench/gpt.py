"""Time whole language models: nanochat's training step, prefill and decoding with softmax attention and with GKA.

    python -m runs.bench.gpt                          depth 20 on CUDA, depths 4, 6 and 8 on a CPU
    python -m runs.bench.gpt --only "d4 decode"       decoding alone
    python -m runs.bench.gpt --shapes d20-L           no sliding windows, for which torch has no fast softmax kernel
    python -m runs.bench.gpt --shapes d12-b8-t1024-v32768-SSSL

The real model and the real optimiser (Muon + AdamW, at rates of 0, so that weights stay what they are). On CUDA the
trainer's own setting: 16 rows of 2,048 tokens, vocabulary 32,768, windows SSSL, bfloat16, model and optimiser compiled.
On a CPU: 4 rows of 512 tokens, vocabulary 4,096, no windows, training in float32 and in bfloat16 (-bf16, beside the
faster of both dtypes of softmax attention), both eager and compiled, of the first depth the other phases too. Prefill
is one forward pass without gradient over a single row. Decoding is one more token for each of 1 or 8 rows, uncompiled,
in the device's usual dtype, after a row's length of tokens in the cache. "gka" is the paper's form, whose cached
features are keys and values, "gka-offsets" the demo's form with head offsets, "gka-preset" the study's preset,
"softmax-preset" softmax attention with the same additions. "gka-normalised" derives its keys from the cached values;
"gka-keys", the same model, keeps both. `python -m runs.bench.report` prints the tables.
"""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nanochat_gka.model.accounting import flops_per_token, parameter_counts
from nanochat_gka.model.blocks import fill_uniform
from nanochat_gka.model.cache import KVCache
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.model.loss import IGNORE_INDEX
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from runs.bench import baselines, models
from runs.bench.models import HELD, TRAINING, CandidateKey, ModelConfig
from runs.bench.program import USUAL_DTYPE, Comparison, time_cases
from runs.bench.timing import Measurement, Plan
from trainkit_gka import compiling
from trainkit_gka.cli import run
from trainkit_gka.distributed import Runtime, setup
from trainkit_gka.hardware import peak_flops

PREFILL = "prefill"
DECODE = {"decode-1": 1, "decode-8": 8}  # rows
PHASES = (TRAINING, PREFILL, *DECODE)
SEED = 0
GATE_TOKENS = 512  # float64 attention builds T x T matrices
# Rows, tokens, vocabulary and windows of what is trained; on a CPU torch's softmax attention has no windows.
USUAL = {"cuda": ("16", "2048", "32768", "SSSL"), "cpu": ("4", "512", "4096", "L")}
# No CUDA graph: the optimiser sends its rates to the device at every step, and a step is long enough to hide launches.
PLANS = {"cuda": Plan(rounds=30, seconds=60), "cpu": Plan(rounds=20, warmup=1, seconds=15)}

# Role, phases, and what a kind has beside its attention; the preset has value embeddings in the layers where softmax
# attention has them. Kinds that differ in how a cache is read are timed in decoding alone, additions in training.
ADDITIONS = dict(head_offsets="PS", channel_bandwidths=True, head_gates=True)
UNROTATED = dict(gka_values="unrotated")
KINDS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "softmax": ("baseline", PHASES, {}),
    HELD: ("baseline", (TRAINING, PREFILL), {}),
    "gka": ("ours", PHASES, {}),
    "gka-offsets": ("variant", (TRAINING,), dict(head_offsets="PS", **UNROTATED)),
    "gka-preset": ("variant", (TRAINING,), dict(value_embeds="every-second", **UNROTATED, **ADDITIONS)),
    "softmax-preset": ("other", (TRAINING,), dict(offset_layers="all", **ADDITIONS)),
    "gka-normalised": ("variant", tuple(DECODE), UNROTATED),
    "gka-keys": ("variant", tuple(DECODE), UNROTATED),
}


@dataclass
class GPTBenchConfig(ModelConfig):
    """Time training, prefill and decoding of nanochat with softmax attention and with GKA.

    Appends to RESULTS/bench_gpt_<hardware>.jsonl. A shape is dDEPTH, then -bROWS of a training step, -tTOKENS of a row,
    -vVOCABULARY and -WINDOWS by layer (L full context, S half of it), as in d12-b8-t1024-v32768-SSSL; what it leaves
    out is the device's usual.
    """


@dataclass(frozen=True)
class Case:
    """A depth, and the rows, tokens, vocabulary and windows of its training."""

    name: str
    depth: int
    batch: int
    tokens: int
    vocab: int
    windows: str
    phases: tuple[str, ...] = PHASES

    @classmethod
    def parse(cls, text: str, device_type: str, phases: tuple[str, ...] = PHASES) -> "Case":
        """Raises ValueError."""
        count = r"([1-9]\d*)"
        match = re.fullmatch(rf"d{count}(?:-b{count})?(?:-t{count})?(?:-v{count})?(?:-([SL]+))?", text)
        if not match:
            raise ValueError(f"expected dDEPTH, then -bROWS, -tTOKENS, -vVOCABULARY, -WINDOWS of S, L, got {text!r}")
        depth, *parts = match.groups()
        *numbers, windows = (part or usual for part, usual in zip(parts, USUAL[device_type], strict=True))
        return cls(text, int(depth), *map(int, numbers), windows, phases)

    def config(self, kind: str) -> GPTConfig:
        """The model's shape. Raises ValueError."""
        shape = dict(sequence_len=self.tokens, vocab_size=self.vocab, window_pattern=self.windows)
        return GPTConfig.from_depth(self.depth, attention=kind.split("-")[0], **shape, **KINDS[kind][2])


def standard_cases(device_type: str, quick: bool) -> list[Case]:
    """Everything at the first depth, training at the others."""
    first, *more = ["d20"] if device_type == "cuda" else ["d4"] if quick else ["d4", "d6", "d8"]
    return [Case.parse(first, device_type), *(Case.parse(name, device_type, (TRAINING,)) for name in more)]


class LanguageSubject(models.Subject):
    """A language model of one kind, random tokens, and optimisers, eager and compiled.

    The beginning of the first row is judged: what comes later cannot reach back to it. Only training has many rows.
    """

    def __init__(self, case: Case, phase: str, runtime: Runtime, kind: str):
        self.runtime, config = runtime, case.config(kind)
        torch.manual_seed(SEED)
        model = build(config, runtime.device)
        # They start at zero, with which attention would have no effect, and products would be quicker than real ones.
        for block in model.transformer.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                fill_uniform(linear.weight, linear.in_features)
        self.optimizers: dict[bool, MuonAdamW] = {}
        generator = torch.Generator(runtime.device).manual_seed(SEED)
        shape = (case.batch if phase == TRAINING else 1, config.sequence_len)
        ids, targets = (
            torch.randint(config.vocab_size, shape, generator=generator, device=runtime.device) for _ in range(2)
        )
        super().__init__(kind, phase, model, ids, targets, (slice(0, 1), slice(0, GATE_TOKENS)), IGNORE_INDEX)

    def network(self, dtype, mode):
        model = compiling.twin(self.model)
        if dtype != USUAL_DTYPE[self.runtime.device.type]:
            model.compute_in(getattr(torch, dtype))
        if mode != compiling.BLOCKS:
            return models.compiled(model, self.kind, mode), model
        network = compiling.twin(model)
        models.compile_blocks(network.transformer.h, self.kind)
        network.loss = torch.compile(network.loss, dynamic=False)
        return network, model

    def compute(self, network, dtype, inputs, targets=None):
        return network(inputs, targets)

    def optimizer(self, compiled):
        if compiled not in self.optimizers:
            groups = parameter_groups(self.model, OptimConfig(), lr_scale=0.0)
            self.optimizers[compiled] = MuonAdamW(groups, self.runtime, compile=compiled)
        return self.optimizers[compiled]

    def state(self, optimizer):
        return [part for group in optimizer.groups for unit in group.units for part in unit.state.values()]


class LanguageCandidate(models.Candidate):
    """The shared model in one dtype. In decoding a step is one token more for each row, after a full cache."""

    def __init__(self, subject: LanguageSubject, dtype: str, mode: str = "off"):
        super().__init__(subject, dtype, mode)
        self.cache: KVCache | None = None
        if subject.phase in DECODE:
            self.cache, self.step = self.decoder(DECODE[subject.phase])

    @torch.inference_mode()
    def decoder(self, rows: int) -> tuple[KVCache, Callable[[int], torch.Tensor]]:
        """The filled cache of `rows` rows, and the step that runs their last token; it leaves the lengths unchanged."""
        tokens = self.subject.inputs.expand(rows, -1)
        cache = self.model.new_cache(rows, tokens.shape[1], keep_keys=self.subject.kind == "gka-keys", last_only=True)
        self.model(tokens[:, :-1], context=cache)
        before = list(cache.lengths)

        @torch.inference_mode()
        def step(n: int) -> torch.Tensor:
            logits = self.model(tokens[:, -1:], context=cache)
            cache.lengths = list(before)
            return logits

        return cache, step

    def gate(self) -> str | None:
        if self.subject.phase not in DECODE:
            return super().gate()
        ids = self.subject.inputs
        model = copy.deepcopy(self.subject.model).double()
        with torch.inference_mode():
            _, step = self.decoder(rows=1)
            return self.compare(step(0)[:, 0].double(), model(ids)[:, -1], self.model(ids)[:, -1])


def takes_part(key: CandidateKey, phase: str, usual: str) -> bool:
    """Whether a candidate is timed in a phase; decoding has the usual dtype alone, and nothing compiled beside it."""
    return phase in KINDS[key.kind][1] and (phase not in DECODE or (key.dtype == usual and key.mode != models.EAGER))


def measure(
    config: GPTBenchConfig, mode: str, plan: Plan, runtime: Runtime, case: Case, phase: str
) -> Iterator[Comparison]:
    """A comparison in each dtype, all timed in turns."""
    device = runtime.device
    mode = "off" if phase in DECODE else mode
    keys = models.keys_of(KINDS, config, mode, device)
    keys = [key for key in keys if takes_part(key, phase, keys[0].dtype)]
    build_subject = partial(LanguageSubject, case, phase, runtime)
    with baselines.fastest_in_language_models():
        measured, candidates = models.measure(keys, build_subject, LanguageCandidate, mode, device, plan)
    rows = DECODE.get(phase, case.batch if phase == TRAINING else 1)
    tokens = rows * (1 if phase in DECODE else case.tokens)
    settings = {"depth": case.depth, "sequence_len": case.tokens, "vocab_size": case.vocab, "batch": rows}
    # compile: of candidates that are not called eager.
    settings |= {"window_pattern": case.windows, "head_offsets": "", "compile": "on" if mode == "default" else mode}

    def metrics(key: CandidateKey, measurement: Measurement) -> dict[str, Any]:
        return rates(candidates[key], tokens, measurement) if key in candidates else {}

    return models.comparisons(measured, {kind: role for kind, (role, *_) in KINDS.items()}, settings, metrics)


def rates(candidate: LanguageCandidate, tokens: int, measurement: Measurement) -> dict[str, Any]:
    """Tokens per second, and the share of the device's peak; of decoding, the cache's size too.

    A forward pass has a third of a training step's FLOPs.
    """
    model, subject = candidate.model, candidate.subject
    flops = flops_per_token(model) / (1 if subject.phase == TRAINING else 3)
    speed = tokens / measurement.median_ms * 1e3 if measurement.median_ms else None
    peak = peak_flops(subject.runtime.device)
    sizes = {"flops_per_token": flops, "parameters": parameter_counts(model)["total"]}
    numbers = {"items_per_second": speed, **sizes, "mfu": speed * flops / peak if speed and peak else None}
    numbers |= {"cache_mib": candidate.cache.nbytes / 2**20} if candidate.cache else {}
    return numbers | ({"gka_values": model.config.gka_values} if subject.kind.startswith("gka") else {})


def main(config: GPTBenchConfig) -> None:
    runtime = setup(config.device_type)
    device_type = runtime.device.type
    chosen = config.choose(Case.parse, standard_cases, device_type)
    mode = config.mode("default", runtime)
    timed = partial(measure, config, mode, config.adjust(PLANS[device_type]), runtime)
    time_cases("gpt", config, chosen, runtime.device, timed)


if __name__ == "__main__":
    run(main, GPTBenchConfig)
