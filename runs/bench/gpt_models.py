"""The language models that runs/bench/gpt.py times: their phases, and the gate that each must pass first."""

import copy
from collections.abc import Callable

import torch

from nanochat_gka.model.blocks import fill_uniform
from nanochat_gka.model.cache import KVCache
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.model.loss import IGNORE_INDEX
from nanochat_gka.training.optim import MuonAdamW, OptimConfig, parameter_groups
from runs.bench import models
from runs.bench.config import USUAL_DTYPE
from trainkit_gka.distributed import Runtime

TRAINING, PREFILL = "training", "prefill"
DECODE = {"decode-1": 1, "decode-8": 8}  # rows
SEED = 0
GATE_TOKENS = 512  # float64 attention builds T x T matrices


class Subject:
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


class Candidate:
    """A subject's model in one dtype, in a mode of torch.compile or "off".

    `train(n)` is a whole step, `prefill(n)` a forward pass over one row, `decode(rows)(n)` one token more for each row.
    """

    def __init__(self, subject: Subject, dtype: str, mode: str = "off"):
        self.subject, self.dtype, self.optimizer = subject, dtype, subject.optimizer(mode != "off")
        self.kind, self.ids, self.targets = subject.kind, subject.ids, subject.targets
        self.model = models.twin(subject.model)
        if dtype != USUAL_DTYPE[subject.device.type]:
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
        subject, half = self.subject, self.dtype == "bfloat16"
        if phase in DECODE:
            with torch.inference_mode():
                cache = self.cache
                got, self.cache = self.decode(1)(0)[:, 0].double(), cache
                plain = self.model(self.ids[:1])[:, -1]
            return models.model_gate("logits", got, subject.exact(phase), plain, half)
        rows = slice(None) if phase == TRAINING else slice(0, 1)
        got = subject.answer(phase, self.network, self.model, self.ids[rows], subject.few_targets[rows])
        few = self.ids[subject.judged], subject.few_targets[subject.judged]
        plain = subject.answer(phase, self.model, self.model, *few)
        return models.model_gate("logits" if phase == PREFILL else "gradient", got, subject.exact(phase), plain, half)

    def held_mib(self) -> float:
        """What the model holds between steps: weights, optimiser state and the batch."""
        state = [value for group in self.optimizer.groups for value in group.state.values()]
        return models.tensors_mib([*self.model.parameters(), *self.model.buffers(), *state, self.ids, self.targets])
