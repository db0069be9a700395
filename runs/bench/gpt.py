"""Time whole language models: nanochat's training step, prefill and decoding with softmax attention and with GKA.

    python -m runs.bench.gpt                          depth 20 on CUDA, depths 4, 6 and 8 on a CPU
    python -m runs.bench.gpt --window-pattern L       no sliding windows, for which torch has no fast softmax kernel
    python -m runs.bench.gpt --phases decode-1 decode-8   decoding alone

The real model and the real optimiser (Muon + AdamW, at rates of 0, so that weights stay what they are). On CUDA the
trainer's own setting: 16 rows of 2,048 tokens, vocabulary 32,768, windows SSSL, bfloat16, model and optimiser compiled.
On a CPU: 4 rows of 512 tokens, vocabulary 4,096, no windows, training in float32 and in bfloat16 (-bf16, beside the
faster of both dtypes of softmax attention), both eager and compiled, of the first depth the other phases too. Prefill
is one forward pass without gradient over a single row. Decoding is one more token for each of 1 or 8 rows, uncompiled,
in the device's usual dtype, after a row's length of tokens in the cache. "gka" is the paper's form, whose cached
features are keys and values, "gka-offsets" the demo's form with head offsets. "gka-normalised" is that form without
them (`--gka-values normalised`): it derives its keys from the cached values; "gka-keys", the same model, keeps both.
`python -m runs.bench.report` prints the tables.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch

from nanochat_gka.model.accounting import flops_per_token, parameter_counts
from nanochat_gka.model.config import GPTConfig
from runs.bench import baselines, models
from runs.bench.config import ComparisonConfig, Counts, with_dtype
from runs.bench.device import release_memory
from runs.bench.gpt_models import DECODE, PREFILL, TRAINING, Candidate, Subject
from runs.bench.measurement import Measurement, Plan
from runs.bench.models import Key
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from trainkit_gka import compiling
from trainkit_gka.cli import Bounds, UserError, run
from trainkit_gka.distributed import Runtime, setup
from trainkit_gka.hardware import peak_flops
from trainkit_gka.progress import progress_bar

BENCHMARK = "gpt"
DECODE_ONLY = ("gka-normalised", "gka-keys")
OFFSETS = "gka-offsets"
OFFSET_LETTERS = "PS"  # as in the demo
ROLES = models.ROLES | dict.fromkeys((OFFSETS, *DECODE_ONLY), "variant")
WINDOWS = {"cuda": "SSSL", "cpu": "L"}
# Of the flags, what a line of the results says.
SETTINGS = ("sequence_len", "vocab_size", "window_pattern", "head_offsets", "compile")
CountOrDefault = Annotated[int, Bounds(1, other=(0, "the device's own"))]
# No CUDA graph: the optimiser sends its rates to the device at every step, and a step is long enough to hide launches.
PLANS = {"cuda": Plan(rounds=30, seconds=60), "cpu": Plan(rounds=20, warmup=1, seconds=15)}


@dataclass
class GPTBenchConfig(ComparisonConfig):
    """Time training, prefill and decoding of nanochat with softmax attention and with GKA.

    Appends to RESULTS/bench_gpt_<hardware>.jsonl.
    """

    kinds: list[Literal[(*models.MODEL_KINDS, OFFSETS, *DECODE_ONLY)]] = field(default_factory=list)
    """Kinds of attention; empty = softmax, softmax-cudnn (CUDA only), gka; for training also gka-offsets, with head
    offsets; for decoding also gka-normalised and gka-keys, with values before rotation."""
    phases: list[Literal["training", "prefill", "decode-1", "decode-8"]] = field(default_factory=list)
    """What to time; empty = everything at the first depth, training at the others."""
    depth: Counts = field(default_factory=list)
    """Numbers of layers; empty = 20 on CUDA, 4 6 8 on a CPU."""
    batch_size: CountOrDefault = 0
    """Rows of a training step; 0 = 16 on CUDA, 4 on a CPU."""
    sequence_len: CountOrDefault = 0
    """Tokens of a row; 0 = 2048 on CUDA, 512 on a CPU."""
    vocab_size: CountOrDefault = 0
    """Tokens in the vocabulary; 0 = 32768 on CUDA, 4096 on a CPU."""
    window_pattern: str = ""
    """Windows by layer, as the trainer's: L full context, S half of it; empty = SSSL on CUDA, L on a CPU, where torch's
    softmax attention has no windows."""
    head_offsets: str = ""
    """Head offsets of the gka model, as the trainer's."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether to use torch.compile; auto = on, but off with --quick. On a CPU eager models take part beside it."""

    def case(self, depth: int, device_type: str) -> str:
        """The case's name: d20 or d4, with what is not the device's own setting, so that no target is judged by it."""
        settings = {"b": self.batch_size, "t": self.sequence_len, "v": self.vocab_size}
        given = "".join(f"-{letter}{value}" for letter, value in settings.items() if value)
        windows = "" if self.window_pattern in ("", WINDOWS[device_type]) else f"-{self.window_pattern}"
        return f"d{depth}{given}{windows}"

    def fill(self, device_type: str) -> "GPTBenchConfig":
        """The configuration with the device's defaults in the empty places."""
        cuda = device_type == "cuda"
        batch_size, sequence_len, vocab_size = (16, 2048, 32768) if cuda else (4, 512, 4096)
        return replace(
            self,
            kinds=self.kinds or [*models.default_kinds(cuda), OFFSETS, *DECODE_ONLY],
            depth=self.depth or ([20] if cuda else [4] if self.quick else [4, 6, 8]),
            dtypes=self.dtypes_on(device_type),
            batch_size=self.batch_size or batch_size,
            sequence_len=self.sequence_len or sequence_len,
            vocab_size=self.vocab_size or vocab_size,
            window_pattern=self.window_pattern or WINDOWS[device_type],
            compile=("on" if cuda or not self.quick else "off") if self.compile == "auto" else self.compile,
        )

    def model_config(self, kind: str, depth: int) -> GPTConfig:
        """The model's shape. Raises UserError."""
        attention = kind.split("-")[0]
        values = "normalised" if kind in (OFFSETS, *DECODE_ONLY) else "rotated"
        offsets = (self.head_offsets or OFFSET_LETTERS) if kind == OFFSETS else self.head_offsets
        gka = {"head_offsets": offsets, "gka_values": values} if attention == "gka" else {}
        try:
            return GPTConfig.from_depth(
                depth,
                sequence_len=self.sequence_len,
                vocab_size=self.vocab_size,
                window_pattern=self.window_pattern,
                attention=attention,
                **gka,
            )
        except ValueError as error:
            raise UserError(str(error)) from None


def measure(phase: str, candidates: dict[Key, Candidate], device: torch.device, plan: Plan) -> dict[Key, Measurement]:
    """One comparison of the kinds, in all dtypes."""

    def step(candidate: Candidate) -> Callable[[int], object]:
        if phase in DECODE:
            return candidate.decode(DECODE[phase])
        return candidate.train if phase == TRAINING else candidate.prefill

    steps = {key: step(candidate) for key, candidate in candidates.items()}
    measured = interleave(steps, device, plan, {key: partial(c.gate, phase) for key, c in candidates.items()})
    models.add_held(measured, candidates)
    return measured


def takes_part(key: Key, phase: str, usual: str) -> bool:
    """Whether a candidate is timed in a phase.

    Kinds that differ in how a cache is read are timed in decoding alone, which has one dtype; the one that differs in
    the kernel of long attention everywhere else, head offsets in training.
    """
    if key.kind == OFFSETS:
        return phase == TRAINING
    if phase in DECODE:
        return key.kind != models.HELD and key.dtype == usual and key.mode != models.EAGER
    return key.kind not in DECODE_ONLY


@baselines.fastest_in_language_models()
def time_depth(depth: int, phases: list[str], config: GPTBenchConfig, runtime: Runtime, save: Callable) -> None:
    """Time all phases of one depth; save(phase, dtype, measured, candidates) gets every comparison."""
    device, usual = runtime.device, config.dtypes[0]
    modes = models.modes("default" if config.compile == "on" else "off", device)
    candidates: dict[Key, Candidate] = {}
    failed: dict[Key, Measurement] = {}
    for kind in config.kinds:
        keys = [Key(kind, dtype, mode) for dtype in config.dtypes for mode in modes]
        keys = [key for key in keys if any(takes_part(key, phase, usual) for phase in phases)]
        try:
            if keys:
                shape = config.model_config(kind, depth)
                subject = Subject(kind, shape, config.batch_size, runtime)
                candidates |= {key: Candidate(subject, key.dtype, modes[key.mode]) for key in keys}
        except torch.OutOfMemoryError as error:
            for key in keys:
                failed[key] = Measurement()
                failed[key].fail(error)
    for phase in phases:
        built = {key: candidate for key, candidate in candidates.items() if takes_part(key, phase, usual)}
        timed = measure(phase, built, device, PLANS[device.type].adjust(config))
        measured = {key: m for key, m in failed.items() if takes_part(key, phase, usual)} | timed
        for dtype in dict.fromkeys(key.dtype for key in measured):
            save(phase, dtype, measured, candidates)
        release_memory()


def main(config: GPTBenchConfig) -> None:
    config.check()
    runtime = setup(config.device_type)
    device, asked = runtime.device, config
    config = config.fill(device.type)
    names = {depth: asked.case(depth, device.type) for depth in config.depth}
    wanted = config.select(list(names.values()))
    for kind in config.kinds:
        config.model_config(kind, config.depth[0])
    config = replace(config, compile=compiling.mode("--compile", asked.compile, config.compile, runtime))
    with progress_bar() as bar:
        for threads in config.with_threads():
            recorder = Recorder(config, BENCHMARK, device)
            task = bar.add_task(f"gpt, {threads} threads", total=len(wanted), status="")
            for depth, name in names.items():
                if name not in wanted:
                    continue
                bar.update(task, status=name)
                everything = depth == config.depth[0]
                phases = config.phases or [TRAINING, *((PREFILL, *DECODE) if everything else ())]
                time_depth(depth, phases, config, runtime, partial(record, recorder, name, depth, config))
                bar.advance(task)


def record(
    recorder: Recorder, case: str, depth: int, config: GPTBenchConfig, phase: str, dtype: str,
    measured: dict[Key, Measurement], candidates: dict[Key, Candidate],
) -> None:  # fmt: skip
    """Write one comparison of one dtype."""
    named = models.comparison(measured, dtype, ROLES)
    rows = DECODE.get(phase, config.batch_size if phase == TRAINING else 1)
    settings = {"depth": depth, **{key: getattr(config, key) for key in SETTINGS}, "dtype": dtype, "batch": rows}
    settings["compile"] = "off" if phase in DECODE else config.compile  # of candidates that are not called eager
    tokens = rows * (1 if phase in DECODE else config.sequence_len)

    def extra(label: str, measurement: Measurement) -> dict[str, Any]:
        candidate = candidates.get(named[label])
        return {} if candidate is None else rates(candidate, phase, tokens, measurement)

    recorder.record(
        with_dtype(case, dtype, recorder.device.type),
        phase,
        {label: measured[key] for label, key in named.items()},
        {label: ROLES[key.kind] for label, key in named.items()},
        settings,
        extra,
    )


def rates(candidate: Candidate, phase: str, tokens: int, measurement: Measurement) -> dict[str, Any]:
    """Tokens per second, and what they are of the device's peak; of decoding, the cache's size too.

    A forward pass has a third of a training step's FLOPs.
    """
    model, cache = candidate.model, candidate.cache
    held = {"cache_mib": cache.nbytes / 2**20} if phase in DECODE and cache else {}
    form = {"gka_values": model.config.gka_values} if candidate.kind.startswith("gka") else {}
    flops = flops_per_token(model) / (1 if phase == TRAINING else 3)
    speed = tokens / measurement.median_ms * 1e3 if measurement.median_ms else None
    peak = peak_flops(candidate.subject.device)
    utilisation = speed * flops / peak if speed and peak else None
    sizes = {"flops_per_token": flops, "parameters": parameter_counts(model)["total"]}
    return {"items_per_second": speed, **sizes, "mfu": utilisation, **held, **form}


if __name__ == "__main__":
    run(main, GPTBenchConfig)
