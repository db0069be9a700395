"""One trial of the study: a model and its training, as data; the trainer's flags for it, its key, and its cost."""

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from nanochat_gka.model.accounting import flops_per_token, meta_model
from nanochat_gka.model.config import ModelFlags
from nanochat_gka.model.forms import with_flags
from nanochat_gka.training.optim import OptimConfig
from runs.store import key_of
from runs.study import forms

ASPECT_RATIO, HEAD_DIM = 64, 64  # nanochat's width, 64 per layer; half its head_dim: a depth of 2 has two heads
EVAL_TOKENS = 2**17  # of each split
EVALUATE_ALONG_FROM = 2**22  # tokens; shorter runs are evaluated at their end alone
SAVE_EVERY = 2**18  # tokens
CURVE_POINTS = 64
COMPILED_FROM = 4  # layers; below, compiling costs more than it saves, though programs are kept for the next run
# The trainer shrinks rates by the root of a step's tokens over 2^19. Times 16, rate 1 is nanochat's own rate at 2,048.
BATCH_FACTOR = 16
KIND = "study"  # of the rows of finished trials
SHAPING = with_flags(ModelFlags, forms.NAME)
RATES = ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "sigma_lr")


@dataclass(frozen=True)
class Trial:
    """What one run computes. The first fields shape the model, as the trainer's flags of the same names do.

    rate: multiplies every learning rate; 1 is nanochat's at `batch` 2,048. tokens: of the whole training. batch: tokens
    of a step. learn_sigma: False keeps the bandwidths where they start. channel_rate, gate_rate: multiply the learning
    rates of channel bandwidths and head gates once more.
    """

    depth: int
    attention: str
    head_offsets: str = ""
    offset_layers: str = "gka"
    value_embeds: str = "auto"
    gka_values: str = "rotated"
    sigma_squared: float = 0.0
    window_pattern: str = "L"
    rate: float = 1.0
    seed: int = 0
    tokens: int = 2**20
    batch: int = 2048
    dtype: str = "bfloat16"
    mixing: str = "none"
    rotary: str = "full"
    kernel: str = "gaussian"
    learn_sigma: bool = True
    gka_window: int = 0
    channel_bandwidths: bool = False
    head_gates: bool = False
    channel_rate: float = 1.0
    gate_rate: float = 1.0
    head_dim: int = HEAD_DIM

    @classmethod
    def from_row(cls, saved: dict[str, Any]) -> "Trial":
        """The trial that a row of the results states. Raises TypeError for one of another version."""
        return cls(**saved)

    @property
    def steps(self) -> int:
        return self.tokens // self.batch

    @property
    def label(self) -> str:
        """What differs from the defaults, for people: d2 gka PS normalised rate 2 seed 1 1,048,576 tokens."""
        own = [f"d{self.depth}", self.attention]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if field.name == "learn_sigma":
                own += [] if value else ["fixed sigma"]
            elif isinstance(value, bool):
                own += [field.name.replace("_", " ")] if value else []
            elif value != field.default and field.name not in ("rate", "seed", "tokens"):
                own.append(str(value) if isinstance(value, str) else f"{field.name} {value:g}")
        return " ".join([*own, f"rate {self.rate:g}", f"seed {self.seed}", f"{self.tokens:,} tokens"])

    def computed(self) -> dict[str, Any]:
        """The trainer's settings that decide what is computed, by flag."""
        shape = {name: getattr(self, name) for name in _names(SHAPING) if hasattr(self, name)}
        defaults = OptimConfig()
        rates = {name: round(getattr(defaults, name) * BATCH_FACTOR * self.rate, 9) for name in RATES}
        if not self.learn_sigma:
            rates["sigma_lr"] = 0.0
        for name, has_it, own in (
            ("channel_lr", self.channel_bandwidths, self.channel_rate),
            ("gate_lr", self.head_gates, self.gate_rate),
        ):
            if has_it:  # so that older keys stay
                rates[name] = round(getattr(defaults, name) * BATCH_FACTOR * self.rate * own, 9)
        return {
            **shape,
            "aspect_ratio": ASPECT_RATIO,
            "num_iterations": self.steps,
            "total_batch_size": self.batch,
            "seed": self.seed,
            "dtype": self.dtype,
            **rates,
        }

    def flags(self) -> list[Any]:
        """Words for the trainer, without the places of data and results."""
        along = self.steps // 4 if self.tokens >= EVALUATE_ALONG_FROM else -1
        ways = {
            "compile": "on" if self.depth >= COMPILED_FROM else "off",
            "eval_every": along,
            "eval_tokens": EVAL_TOKENS,
            "sample_every": -1,
            "save_every": max(1, SAVE_EVERY // self.batch),
            "keep": 1,
            "log_every": max(1, self.steps // CURVE_POINTS),
        }
        words = ["--forms", forms.NAME]
        for name, value in {**self.computed(), **ways}.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words += [flag] if value else []
            elif value != "":
                words += [flag, value]
        return words

    def key(self, data: dict[str, Any]) -> str:
        """A hash of everything that is computed, and of the identity of the rows it is computed from."""
        said = {name: value for name, value in self.computed().items() if value != LEFT_OUT.get(name)}
        said = {**said, "eval_tokens": EVAL_TOKENS, "data": data}
        return key_of(said)

    def flops(self, sequence_len: int, vocab_size: int) -> int:
        """Of its training, by the project's accounting."""
        return self.tokens * _flops_per_token(self, sequence_len, vocab_size)


def _names(config: type) -> list[str]:
    return [field.name for field in fields(config)]


# Shaping flags' defaults: settings that have them are left out of keys, so that a new flag changes no old key. That of
# --attention is another one since.
LEFT_OUT = {field.name: field.default for field in fields(SHAPING)} | {"attention": "softmax"}


@cache
def _flops_per_token(trial: Trial, sequence_len: int, vocab_size: int) -> int:
    shape = {name: value for name, value in asdict(trial).items() if name in _names(SHAPING)}
    flags = SHAPING(**shape, aspect_ratio=ASPECT_RATIO)
    return flops_per_token(meta_model(flags.shape(trial.depth, sequence_len, vocab_size)))
