"""Time whole language models: nanochat's training step, prefill and decoding with softmax attention and with GKA.

    python -m runs.bench.gpt                          depth 20 on CUDA, depth 4 on a CPU
    python -m runs.bench.gpt --window-pattern L       no sliding windows, for which torch has no fast softmax kernel
    python -m runs.bench.gpt --phases decode-1 decode-8   decoding alone

The real model and the real optimiser (Muon + AdamW). On CUDA the trainer's own setting: 16 rows of 2,048 tokens,
vocabulary 32,768, bfloat16, model and optimiser compiled. On a CPU: 4 rows of 512 tokens, vocabulary 4,096, float32,
uncompiled. Prefill is one forward pass without gradient over a single row. Decoding is one more token for each of 1 or
8 rows, uncompiled, after a row's length of tokens in the cache. "gka" is the paper's form, whose cached features are
keys and values. "gka-normalised" is ours (`--gka-values normalised`): it derives its keys from the cached values;
"gka-keys", the same model, keeps both. `python -m runs.bench.report` prints the tables.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

import torch

from nanochat_gka.model.accounting import flops_per_token, parameter_counts
from nanochat_gka.model.blocks import fill_uniform
from nanochat_gka.model.cache import KVCache
from nanochat_gka.model.config import GKA_VALUES, GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.model.loss import IGNORE_INDEX
from nanochat_gka.training.hardware import peak_flops
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from runs.bench import models
from runs.bench.config import CaseConfig
from runs.bench.device import release_memory
from runs.bench.measurement import Measurement, Plan
from runs.bench.results import Recorder
from runs.bench.timing import interleave
from trainkit.cli import Bounds, UserError, run
from trainkit.distributed import Runtime, setup
from trainkit.progress import progress_bar

BENCHMARK = "gpt"
TRAINING, PREFILL = "training", "prefill"
DECODE = {"decode-1": 1, "decode-8": 8}  # rows
DECODE_ONLY = ("gka-normalised", "gka-keys")
SEED, WINDOWS = 0, "SSSL"
# Of the flags, what a line of the results says.
SETTINGS = ("depth", "sequence_len", "vocab_size", "window_pattern", "head_offsets", "compile")
GATE_TOKENS = 512  # float64 attention builds T x T matrices
CountOrDefault = Annotated[int, Bounds(1, other=(0, "the device's own"))]
# No CUDA graph: the optimiser sends its rates to the device at every step, and a step is long enough to hide launches.
PLANS = {"cuda": Plan(rounds=30, seconds=60), "cpu": Plan(rounds=20, warmup=2, seconds=15)}


@dataclass
class GPTBenchConfig(CaseConfig):
    """Time training, prefill and decoding of nanochat with softmax attention and with GKA.

    Appends to RESULTS/bench_gpt_<hardware>.jsonl.
    """

    kinds: list[Literal[(*models.MODEL_KINDS, *DECODE_ONLY)]] = field(default_factory=list)
    """Kinds of attention; empty = softmax, softmax-cudnn (CUDA only), gka; for decoding also gka-normalised and
    gka-keys, with values before rotation."""
    phases: list[Literal["training", "prefill", "decode-1", "decode-8"]] = field(
        default_factory=lambda: [TRAINING, PREFILL, *DECODE]
    )
    """What to time."""
    depth: CountOrDefault = 0
    """Number of layers; 0 = 20 on CUDA, 4 on a CPU."""
    batch_size: CountOrDefault = 0
    """Rows of a training step; 0 = 16 on CUDA, 4 on a CPU."""
    sequence_len: CountOrDefault = 0
    """Tokens of a row; 0 = 2048 on CUDA, 512 on a CPU."""
    vocab_size: CountOrDefault = 0
    """Tokens in the vocabulary; 0 = 32768 on CUDA, 4096 on a CPU."""
    window_pattern: str = WINDOWS
    """Windows by layer, as the trainer's: L full context, S half of it."""
    head_offsets: str = ""
    """Head offsets of the gka model, as the trainer's."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether to use torch.compile; auto = on CUDA."""

    def case(self, device_type: str) -> str:
        """The case's name: d20 or d4, with what is not the device's own setting, so that no target is judged by it."""
        settings = {"b": self.batch_size, "t": self.sequence_len, "v": self.vocab_size}
        given = "".join(f"-{letter}{value}" for letter, value in settings.items() if value)
        windows = "" if self.window_pattern == WINDOWS else f"-{self.window_pattern}"
        return f"d{self.fill(device_type).depth}{given}{windows}"

    def fill(self, device_type: str) -> "GPTBenchConfig":
        """The configuration with the device's defaults in the empty places."""
        cuda = device_type == "cuda"
        depth, batch_size, sequence_len, vocab_size = (20, 16, 2048, 32768) if cuda else (4, 4, 512, 4096)
        return replace(
            self,
            kinds=self.kinds or [*models.default_kinds(cuda), *DECODE_ONLY],
            depth=self.depth or depth,
            batch_size=self.batch_size or batch_size,
            sequence_len=self.sequence_len or sequence_len,
            vocab_size=self.vocab_size or vocab_size,
            compile=("on" if cuda else "off") if self.compile == "auto" else self.compile,
        )

    def model_config(self, kind: str) -> GPTConfig:
        """The model's shape. Raises UserError."""
        attention = kind.split("-")[0]
        values = "normalised" if kind in DECODE_ONLY else GKA_VALUES[0]
        gka = {"head_offsets": self.head_offsets, "gka_values": values} if attention == "gka" else {}
        try:
            return GPTConfig.from_depth(
                self.depth,
                sequence_len=self.sequence_len,
                vocab_size=self.vocab_size,
                window_pattern=self.window_pattern,
                attention=attention,
                **gka,
            )
        except ValueError as error:
            raise UserError(str(error)) from None


class Candidate:
    """One model with its optimiser.

    `train(n)` is a whole step, `prefill(n)` a forward pass over one row, `decode(rows)(n)` one token more for each row.
    """

    def __init__(self, kind: str, config: GPTBenchConfig, runtime: Runtime):
        self.kind, self.config, self.device = kind, config, runtime.device
        torch.manual_seed(SEED)
        self.model = build(config.model_config(kind), self.device)
        # They start at zero, with which attention would have no effect, and products would be quicker than real ones.
        for block in self.model.transformer.h:
            for linear in (block.attn.c_proj, block.mlp.c_proj):
                fill_uniform(linear.weight, linear.in_features)
        mode = "default" if config.compile == "on" else "off"
        self.network = models.compiled(self.model, kind, mode)
        self.optimizer = MuonAdamW(
            parameter_groups(self.model, OptimConfig(), lr_scale=1e-3), runtime, compile=mode != "off"
        )
        generator = torch.Generator(self.device).manual_seed(SEED)
        shape = (config.batch_size, config.sequence_len)
        self.ids, self.targets = (
            torch.randint(config.vocab_size, shape, generator=generator, device=self.device) for _ in range(2)
        )
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
        if phase in DECODE:
            with torch.inference_mode():
                cache = self.cache
                got, self.cache = self.decode(1)(0)[:, 0].double(), cache
                plain = self.model(self.ids[:1])[:, -1]
                want = copy.deepcopy(self.model).double()(self.ids[:1])[:, -1]
            return models.model_gate("logits", got, want, plain, half=self.device.type == "cuda")
        twin = copy.deepcopy(self.model)
        few = slice(0, 1), slice(0, GATE_TOKENS)
        targets = torch.full_like(self.targets, IGNORE_INDEX)
        targets[few] = self.targets[few]

        def answer(network, model, ids, targets) -> torch.Tensor:
            if phase == TRAINING:
                return models.gradient(model, lambda: network(ids, targets))
            with torch.inference_mode():
                return network(ids)[few].double()

        rows = slice(None) if phase == TRAINING else few[0]
        got = answer(self.network, self.model, self.ids[rows], targets[rows])
        plain = answer(twin, twin, self.ids[few], targets[few])
        twin = twin.double()
        want = answer(twin, twin, self.ids[few], targets[few])
        return models.model_gate(
            "logits" if phase == PREFILL else "gradient", got, want, plain, half=self.device.type == "cuda"
        )

    def held_mib(self) -> float:
        """What the model holds between steps: weights, optimiser state and the batch."""
        state = [value for group in self.optimizer.groups for value in group.state.values()]
        return models.tensors_mib([*self.model.parameters(), *self.model.buffers(), *state, self.ids, self.targets])


def measure(phase: str, candidates: dict[str, Candidate], device: torch.device, plan: Plan) -> dict[str, Measurement]:
    """One comparison of the kinds."""

    def step(candidate: Candidate) -> Callable[[int], object]:
        if phase in DECODE:
            return candidate.decode(DECODE[phase])
        return candidate.train if phase == TRAINING else candidate.prefill

    steps = {kind: step(candidate) for kind, candidate in candidates.items()}
    measured = interleave(steps, device, plan, {kind: partial(c.gate, phase) for kind, c in candidates.items()})
    models.add_held(measured, candidates)
    return measured


def takes_part(kind: str, phase: str) -> bool:
    """Whether a kind is timed in a phase: those that differ in how a cache is read are timed in decoding alone, the one
    that differs in the kernel of long attention everywhere else."""
    if kind in DECODE_ONLY:
        return phase in DECODE
    return kind != models.HELD or phase not in DECODE


def main(config: GPTBenchConfig) -> None:
    config.check()
    runtime = setup(config.device_type)
    device = runtime.device
    name, config = config.case(device.type), config.fill(device.type)
    config.select([name])
    recorder, plan = Recorder(config, BENCHMARK, device), PLANS[device.type].adjust(config)
    roles = models.ROLES | dict.fromkeys(DECODE_ONLY, "variant")
    settings = {key: getattr(config, key) for key in SETTINGS}
    settings["dtype"] = "bfloat16" if device.type == "cuda" else "float32"
    for kind in config.kinds:
        config.model_config(kind)
    with progress_bar() as bar:
        task = bar.add_task("gpt", total=len(config.phases), status="")
        candidates, failed = {}, {}
        for kind in config.kinds:
            try:
                candidates[kind] = Candidate(kind, config, runtime)
            except torch.OutOfMemoryError as error:
                failed[kind] = Measurement()
                failed[kind].fail(error)
        for phase in config.phases:
            bar.update(task, status=f"{name} {phase}")
            rows = DECODE.get(phase, config.batch_size if phase == TRAINING else 1)
            kinds = [kind for kind in config.kinds if takes_part(kind, phase)]
            built = {kind: candidates[kind] for kind in kinds if kind in candidates}
            measured = failed | measure(phase, built, device, plan)
            extra = partial(rates, candidates, phase, rows * (1 if phase in DECODE else config.sequence_len))
            lines = {kind: measured[kind] for kind in kinds}
            recorder.record(name, phase, lines, roles, {**settings, "batch": rows}, extra)
            release_memory()
            bar.advance(task)


def rates(candidates: dict[str, Candidate], phase: str, tokens: int, kind: str, measurement: Measurement) -> dict:
    """Tokens per second, and what they are of the device's peak; of decoding, the cache's size too.

    A forward pass has a third of a training step's FLOPs.
    """
    if kind not in candidates:
        return {}
    cache = candidates[kind].cache
    held = {"cache_mib": cache.nbytes / 2**20} if phase in DECODE and cache else {}
    form = {"gka_values": candidates[kind].model.config.gka_values} if kind.startswith("gka") else {}
    model, device = candidates[kind].model, candidates[kind].device
    flops = flops_per_token(model) / (1 if phase == TRAINING else 3)
    speed = tokens / measurement.median_ms * 1e3 if measurement.median_ms else None
    peak = peak_flops(device)
    utilisation = speed * flops / peak if speed and peak else None
    sizes = {"flops_per_token": flops, "parameters": parameter_counts(model)["total"]}
    return {"items_per_second": speed, **sizes, "mfu": utilisation, **held, **form}


if __name__ == "__main__":
    run(main, GPTBenchConfig)
