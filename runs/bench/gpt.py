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
features are keys and values, "gka-offsets" the demo's form with head offsets. "gka-preset" is the study's preset (head
offsets, channel bandwidths, head gates, value embeddings), "softmax-preset" softmax attention with the same additions.
"gka-normalised" has neither (`--gka-values normalised`): it derives its keys from the cached values; "gka-keys", the
same model, keeps both.
`python -m runs.bench.report` prints the tables.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch

from nanochat_gka.model.accounting import flops_per_token, parameter_counts
from nanochat_gka.model.blocks import fill_uniform
from nanochat_gka.model.cache import KVCache
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.model.loss import IGNORE_INDEX
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from runs.bench import baselines, models
from runs.bench.models import CandidateKey
from runs.bench.program import USUAL_DTYPE, ComparisonConfig, Counts, Recorder
from runs.bench.timing import Measurement, Plan, interleave, release_memory
from trainkit_gka import compiling
from trainkit_gka.cli import Bounds, UserError, run
from trainkit_gka.distributed import Runtime, setup
from trainkit_gka.hardware import peak_flops
from trainkit_gka.progress import progress_bar

BENCHMARK = "gpt"
TRAINING, PREFILL = "training", "prefill"
DECODE = {"decode-1": 1, "decode-8": 8}  # rows
SEED = 0
GATE_TOKENS = 512  # float64 attention builds T x T matrices
DECODE_ONLY = ("gka-normalised", "gka-keys")
OFFSETS, PRESET, SOFTMAX_PRESET = "gka-offsets", "gka-preset", "softmax-preset"
TRAIN_ONLY = (OFFSETS, PRESET, SOFTMAX_PRESET)
ADDITIONS = dict(head_offsets="PS", channel_bandwidths=True, head_gates=True)
# What a kind has beside its attention; the preset has value embeddings in the layers where softmax attention has them.
FORMS = {
    **{kind: dict(gka_values="normalised") for kind in DECODE_ONLY},
    OFFSETS: dict(gka_values="normalised", head_offsets="PS"),
    PRESET: dict(gka_values="normalised", value_embeds="all", **ADDITIONS),
    SOFTMAX_PRESET: dict(offset_layers="all", **ADDITIONS),
}
ROLES = models.ROLES | dict.fromkeys((OFFSETS, PRESET, *DECODE_ONLY), "variant") | {SOFTMAX_PRESET: "other"}
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

    kinds: list[Literal[(*models.MODEL_KINDS, *TRAIN_ONLY, *DECODE_ONLY)]] = field(default_factory=list)
    """Kinds of attention; empty = softmax, softmax-cudnn (CUDA only), gka; for training also gka-offsets, gka-preset
    and softmax-preset; for decoding also gka-normalised and gka-keys, with values before rotation."""
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
        """The case's name: d20 or d4, with every setting that is not the device's usual one."""
        settings = {"b": self.batch_size, "t": self.sequence_len, "v": self.vocab_size}
        differing = "".join(f"-{letter}{value}" for letter, value in settings.items() if value)
        windows = "" if self.window_pattern in ("", WINDOWS[device_type]) else f"-{self.window_pattern}"
        return f"d{depth}{differing}{windows}"

    def fill(self, device_type: str) -> "GPTBenchConfig":
        """The configuration with the device's defaults in the empty places."""
        cuda = device_type == "cuda"
        batch_size, sequence_len, vocab_size = (16, 2048, 32768) if cuda else (4, 512, 4096)
        return replace(
            self,
            kinds=self.kinds or [*models.default_kinds(cuda), *TRAIN_ONLY, *DECODE_ONLY],
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
        attention, form = kind.split("-")[0], dict(FORMS.get(kind, {}))
        if self.head_offsets and attention == "gka":
            form["head_offsets"] = self.head_offsets
        try:
            return GPTConfig.from_depth(
                depth,
                sequence_len=self.sequence_len,
                vocab_size=self.vocab_size,
                window_pattern=self.window_pattern,
                attention=attention,
                **form,
            )
        except ValueError as error:
            raise UserError(str(error)) from None


class LanguageWeights:
    """The weights, the batch and the optimisers, eager and compiled, that the candidates of one kind share."""

    def __init__(self, kind: str, config: GPTConfig, batch_size: int, runtime: Runtime):
        self.kind, self.device, self.runtime = kind, runtime.device, runtime
        torch.manual_seed(SEED)
        self.model = build(config, self.device)
        # They start at zero, with which attention would have no effect, and products would be quicker than real ones.
        for block in self.model.transformer.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                fill_uniform(linear.weight, linear.in_features)
        self.optimizers: dict[bool, MuonAdamW] = {}
        generator = torch.Generator(self.device).manual_seed(SEED)
        shape = (batch_size, config.sequence_len)
        self.ids, self.targets = (
            torch.randint(config.vocab_size, shape, generator=generator, device=self.device) for _ in range(2)
        )
        self.answers: dict[str, torch.Tensor] = {}
        self.judged = slice(0, 1), slice(0, GATE_TOKENS)
        self.few_targets = torch.full_like(self.targets, IGNORE_INDEX)
        self.few_targets[self.judged] = self.targets[self.judged]

    def optimizer(self, compile: bool) -> MuonAdamW:
        """At rates of 0."""
        if compile not in self.optimizers:
            groups = parameter_groups(self.model, OptimConfig(), lr_scale=0.0)
            self.optimizers[compile] = MuonAdamW(groups, self.runtime, compile=compile)
        return self.optimizers[compile]

    def exact(self, phase: str) -> torch.Tensor:
        """What is judged of a phase, in float64; computed once for all candidates."""
        if phase not in self.answers:
            model = copy.deepcopy(self.model).double()
            if phase in DECODE:
                self.answers[phase] = model(self.ids[:1])[:, -1].detach()
            else:
                few = self.ids[self.judged], self.few_targets[self.judged]
                self.answers[phase] = self.answer(phase, model, model, *few)
        return self.answers[phase]

    def answer(self, phase: str, network, model, ids, targets) -> torch.Tensor:
        """The gradient of all parameters of `model`, or logits, of a network."""
        if phase == TRAINING:
            return models.gradient(model, lambda: network(ids, targets))
        with torch.inference_mode():
            return network(ids)[self.judged].double()


class LanguageCandidate:
    """The shared model in one dtype, in a mode of torch.compile or "off".

    `train(n)` is a whole step, `prefill(n)` a forward pass over one row, `decode(rows)(n)` one token more for each row.
    """

    def __init__(self, shared: LanguageWeights, dtype: str, mode: str = "off"):
        self.shared, self.dtype, self.optimizer = shared, dtype, shared.optimizer(mode != "off")
        self.kind, self.ids, self.targets = shared.kind, shared.ids, shared.targets
        self.model = models.twin(shared.model)
        if dtype != USUAL_DTYPE[shared.device.type]:
            self.model.compute_in(getattr(torch, dtype))
        self.network = models.compiled(self.model, self.kind, mode)
        self.cache: KVCache | None = None

    def train(self, n: int) -> None:
        self.network(self.ids, self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prefill(self, n: int) -> None:
        with torch.inference_mode():
            self.network(self.ids[:1])

    @torch.inference_mode()
    def decode(self, rows: int) -> Callable[[int], torch.Tensor]:
        """Fill the caches of `rows` rows, and return the step that runs the rows' last token.

        The step leaves the lengths as they were.
        """
        tokens = self.ids[:1].expand(rows, -1)
        cache = self.model.new_cache(rows, tokens.shape[1], keep_keys=self.kind == "gka-keys", last_only=True)
        self.cache = cache
        self.model(tokens[:, :-1], context=cache)
        before = list(cache.lengths)

        @torch.inference_mode()
        def step(n: int) -> torch.Tensor:
            logits = self.model(tokens[:, -1:], context=cache)
            cache.lengths = list(before)
            return logits

        return step

    def gate(self, phase: str) -> str | None:
        """Why the model is wrong, or None.

        The same weights in float64 judge the beginning of the first row, or, of decoding, its last token. What comes
        later cannot reach back to the beginning and, without targets, has no gradient.
        """
        shared, half = self.shared, self.dtype == "bfloat16"
        if phase in DECODE:
            with torch.inference_mode():
                cache = self.cache
                got, self.cache = self.decode(1)(0)[:, 0].double(), cache
                plain = self.model(self.ids[:1])[:, -1]
            return models.model_gate("logits", got, shared.exact(phase), plain, half)
        rows = slice(None) if phase == TRAINING else slice(0, 1)
        got = shared.answer(phase, self.network, self.model, self.ids[rows], shared.few_targets[rows])
        few = self.ids[shared.judged], shared.few_targets[shared.judged]
        plain = shared.answer(phase, self.model, self.model, *few)
        return models.model_gate("logits" if phase == PREFILL else "gradient", got, shared.exact(phase), plain, half)

    def held_mib(self) -> float:
        """What the model holds between steps: weights, optimiser state and the batch."""
        state = [value for group in self.optimizer.groups for value in group.state.values()]
        return models.tensors_mib([*self.model.parameters(), *self.model.buffers(), *state, self.ids, self.targets])


def measure(
    phase: str, candidates: dict[CandidateKey, LanguageCandidate], device: torch.device, plan: Plan
) -> dict[CandidateKey, Measurement]:
    """One comparison of the kinds, in all dtypes."""

    def step(candidate: LanguageCandidate) -> Callable[[int], object]:
        if phase in DECODE:
            return candidate.decode(DECODE[phase])
        return candidate.train if phase == TRAINING else candidate.prefill

    steps = {key: step(candidate) for key, candidate in candidates.items()}
    measured = interleave(steps, device, plan, {key: partial(c.gate, phase) for key, c in candidates.items()})
    models.add_held(measured, candidates)
    return measured


def takes_part(key: CandidateKey, phase: str, usual: str) -> bool:
    """Whether a candidate is timed in a phase.

    Kinds that differ in how a cache is read are timed in decoding alone, which has one dtype; the one that differs in
    the kernel of long attention everywhere else, forms with additions in training.
    """
    if key.kind in TRAIN_ONLY:
        return phase == TRAINING
    if phase in DECODE:
        return key.kind != models.HELD and key.dtype == usual and key.mode != models.EAGER
    return key.kind not in DECODE_ONLY


@baselines.fastest_in_language_models()
def time_depth(depth: int, phases: list[str], config: GPTBenchConfig, runtime: Runtime, save: Callable) -> None:
    """Time all phases of one depth; save(phase, dtype, measured, candidates) gets every comparison."""
    device, usual = runtime.device, config.dtypes[0]
    modes = models.modes("default" if config.compile == "on" else "off", device)
    candidates: dict[CandidateKey, LanguageCandidate] = {}
    failed: dict[CandidateKey, Measurement] = {}
    for kind in config.kinds:
        keys = [CandidateKey(kind, dtype, mode) for dtype in config.dtypes for mode in modes]
        keys = [key for key in keys if any(takes_part(key, phase, usual) for phase in phases)]
        try:
            if keys:
                shape = config.model_config(kind, depth)
                shared = LanguageWeights(kind, shape, config.batch_size, runtime)
                candidates |= {key: LanguageCandidate(shared, key.dtype, modes[key.mode]) for key in keys}
        except torch.OutOfMemoryError as error:
            for key in keys:
                failed[key] = Measurement()
                failed[key].fail(error)
    for phase in phases:
        built = {key: candidate for key, candidate in candidates.items() if takes_part(key, phase, usual)}
        timed = measure(phase, built, device, config.adjust(PLANS[device.type]))
        measured = {key: m for key, m in failed.items() if takes_part(key, phase, usual)} | timed
        for dtype in dict.fromkeys(key.dtype for key in measured):
            save(phase, dtype, measured, candidates)
        release_memory()


def main(config: GPTBenchConfig) -> None:
    runtime = setup(config.device_type)
    device, requested = runtime.device, config
    config = config.fill(device.type)
    names = {depth: requested.case(depth, device.type) for depth in config.depth}
    wanted = config.select(list(names.values()))
    for kind in config.kinds:
        config.model_config(kind, config.depth[0])
    config = replace(config, compile=compiling.mode("--compile", requested.compile, config.compile, runtime))
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
    measured: dict[CandidateKey, Measurement], candidates: dict[CandidateKey, LanguageCandidate],
) -> None:  # fmt: skip
    """Write one comparison of one dtype."""
    rows = DECODE.get(phase, config.batch_size if phase == TRAINING else 1)
    settings = {"depth": depth, **{key: getattr(config, key) for key in SETTINGS}, "dtype": dtype, "batch": rows}
    settings["compile"] = "off" if phase in DECODE else config.compile  # of candidates that are not called eager
    tokens = rows * (1 if phase in DECODE else config.sequence_len)

    def extra(key: CandidateKey, measurement: Measurement) -> dict[str, Any]:
        return rates(candidates[key], phase, tokens, measurement) if key in candidates else {}

    models.record(recorder, case, phase, measured, ROLES, settings, extra)


def rates(candidate: LanguageCandidate, phase: str, tokens: int, measurement: Measurement) -> dict[str, Any]:
    """Tokens per second, and the share of the device's peak; of decoding, the cache's size too.

    A forward pass has a third of a training step's FLOPs.
    """
    model, cache = candidate.model, candidate.cache
    held = {"cache_mib": cache.nbytes / 2**20} if phase in DECODE and cache else {}
    form = {"gka_values": model.config.gka_values} if candidate.kind.startswith("gka") else {}
    flops = flops_per_token(model) / (1 if phase == TRAINING else 3)
    speed = tokens / measurement.median_ms * 1e3 if measurement.median_ms else None
    peak = peak_flops(candidate.shared.device)
    utilisation = speed * flops / peak if speed and peak else None
    sizes = {"flops_per_token": flops, "parameters": parameter_counts(model)["total"]}
    return {"items_per_second": speed, **sizes, "mfu": utilisation, **held, **form}


if __name__ == "__main__":
    run(main, GPTBenchConfig)
