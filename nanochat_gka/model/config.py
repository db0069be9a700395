"""The model's shape, and the one dial: depth -> width, heads, windows, attention of every layer."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from gka import KINDS, layer_kinds
from gka.offsets import DELAYS
from trainkit_gka.cli import Bounds, Count, Group, UserError

CHOICES = {
    "gka_values": ("rotated", "unrotated"),
    "value_embeds": ("auto", "every-second", "every-layer", "none"),
    "offset_layers": ("gka", "all"),
}
# Settings that only gka layers have. Those of the first line are of all layers where offset_layers=all.
ADDITIONS = ("head_offsets", "channel_bandwidths", "head_gates")
GKA_SETTINGS = ("gka_values", "sigma_squared")
# Former names of values, which runs, checkpoints and the patches state.
RENAMED = {"gka_values": {"normalised": "unrotated"}, "value_embeds": {"all": "every-second"}}
# Settings of research forms, which runs of the study state: a commit that has other values of them, and the only ones.
RESEARCH_SETTINGS = {
    "0438d460": {"mixing": "none", "rotary": "full", "kernel": "gaussian", "gka_window": 0},
    "f22b2c1d": {"short_conv": 0, "short_conv_lr": 0.02, "project_value_embeds": False},
}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a model. The first seven fields are nanochat's; the defaults of the others leave its baseline unchanged.

    `ModelFlags` documents the others; for head_offsets see `gka.offsets`, for channel bandwidths and head gates
    `attention`. document_start: the id of the token that begins a document, if the documents of a row do not see each
    other; -1 if they do. Raises ValueError naming the field.
    """

    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"
    attention: str = "softmax"
    value_embeds: str = "auto"
    head_offsets: str = ""
    gka_values: str = "rotated"
    sigma_squared: float = 0.0
    offset_layers: str = "gka"
    channel_bandwidths: bool = False
    head_gates: bool = False
    document_start: int = -1

    def __post_init__(self):
        for name in ("sequence_len", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads, width = self.n_head, self.n_embd
        if self.n_kv_head != heads:
            raise ValueError(f"n_kv_head must equal n_head, as in nanochat; got {self.n_kv_head} and {heads}")
        if width % heads or self.head_dim % 2:
            raise ValueError(f"n_embd / n_head must be an even whole number (rotary pairs), got {width} / {heads}")
        if width < 32:
            raise ValueError(f"n_embd must be at least 32 (the value gate reads 32 channels), got {width}")
        _check_letters("window_pattern", self.window_pattern, "SL")
        layer_kinds(self.attention, self.n_layer)
        if self.head_offsets:
            _check_letters("head_offsets", self.head_offsets, DELAYS)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not (math.isfinite(self.sigma_squared) and self.sigma_squared >= 0):
            raise ValueError(f"sigma_squared must be positive and finite, or 0 (automatic); got {self.sigma_squared}")
        if not -1 <= self.document_start < self.vocab_size:
            raise ValueError(f"document_start must be an id below {self.vocab_size}, or -1; got {self.document_start}")
        for name in unused_settings(self.attention, self.n_layer, self.offset_layers):
            if getattr(self, name) != getattr(type(self), name):
                none = f"attention={self.attention} has none in {self.n_layer} layers"
                advice = "; offset_layers=all gives it to all" if name in ADDITIONS else ""
                raise ValueError(f"{name} is for gka layers, and {none}{advice}")

    @classmethod
    def from_depth(cls, depth: int, *, aspect_ratio: int = 64, head_dim: int = 128, **settings) -> "GPTConfig":
        """nanochat's dial: width = depth * aspect_ratio rounded up to whole heads of head_dim channels."""
        heads = -(-depth * aspect_ratio // head_dim)
        return cls(n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=heads * head_dim, **settings)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "GPTConfig":
        """The shape that a checkpoint or an exported model states; a setting that it lacks has its default.

        Raises TypeError or ValueError, also for a setting that is not known.
        """
        saved, types = settings_of_today(saved), {field.name: type(field.default) for field in fields(cls)}
        if unknown := sorted(saved.keys() - types.keys()):
            raise ValueError(f"it has settings that are not known here: {', '.join(unknown)}; a later version made it")
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        for name, value in saved.items():
            if not isinstance(value, (int, float) if types[name] is float else types[name]):
                raise TypeError(f"{name} must be {words[types[name]]}, got {value!r}")
        if not has_gka(saved.get("attention", cls.attention), saved.get("n_layer", cls.n_layer)):
            saved.pop("gka_values", None)  # softmax models were saved with a value of it that means nothing
        return cls(**saved)

    def window(self, layer: int) -> int:
        """Tokens before the query that stay visible: T for L, the last layer always, T // 2 for S."""
        letter = self.window_pattern[layer % len(self.window_pattern)].upper()
        long = layer == self.n_layer - 1 or letter == "L"
        return self.sequence_len if long else self.sequence_len // 2

    def offset_pattern(self, layer: int) -> str:
        """The letters of the layer's head offsets, tiled over the heads; empty without."""
        return self.head_offsets.upper() if self.has_additions(layer) else ""

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding tables and the head: the vocabulary rounded up to a multiple of 64."""
        return -(-self.vocab_size // 64) * 64

    @property
    def initial_sigma_squared(self) -> float:
        return self.sigma_squared or (self.head_dim / 4 if self.head_offsets else float(self.head_dim))

    def layer_attention(self, layer: int) -> str:
        """The name of the layer's kind, see `gka.KINDS`."""
        return layer_kinds(self.attention, self.n_layer)[layer]

    def has_value_embedding(self, layer: int) -> bool:
        if self.value_embeds == "every-layer":
            return True
        every_second = layer % 2 == (self.n_layer - 1) % 2
        learns_values = "V" in KINDS[self.layer_attention(layer)].input_projections
        return every_second and (self.value_embeds == "every-second" or (self.value_embeds == "auto" and learns_values))

    def has_additions(self, layer: int) -> bool:
        """Whether the layer has the model's head offsets, channel bandwidths and head gates."""
        return self.offset_layers == "all" or self.layer_attention(layer) == "gka"

    @property
    def form(self) -> str:
        """The attention in words: its kind or pattern, and all that is not the paper's form."""
        words = {
            KINDS[self.attention].label if self.attention in KINDS else f"pattern {self.attention.upper()}": True,
            f"head offsets {self.head_offsets.upper()}": self.head_offsets,
            f"values {self.gka_values}": self.gka_values != "rotated",
            "channel bandwidths": self.channel_bandwidths,
            "head gates": self.head_gates,
            f"value embeddings {self.value_embeds}": self.value_embeds != "auto",
            "documents apart": self.document_start >= 0,
        }
        return ", ".join(text for text, applies in words.items() if applies)


def settings_of_today(saved: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model or run, by today's names and without those of research forms.

    Raises ValueError if one asks for such a form.
    """
    settings = dict(saved)
    for commit, values in RESEARCH_SETTINGS.items():
        for name, value in values.items():
            if settings.pop(name, value) != value:
                raise ValueError(f"{name}={saved[name]} is a research form, which only commit {commit} can compute")
    for name, names in RENAMED.items():
        if isinstance(value := settings.get(name), str):
            settings[name] = names.get(value, value)
    return settings


def unused_settings(attention: str, depth: int, offset_layers: str) -> tuple[str, ...]:
    """The settings that no layer of such a model has."""
    if has_gka(attention, depth):
        return ()
    return GKA_SETTINGS if offset_layers == "all" else (*ADDITIONS, *GKA_SETTINGS)


def has_gka(attention: str, num_layers: int) -> bool:
    """Whether one of the layers is gka; False for a pattern that `layer_kinds` refuses."""
    try:
        return "gka" in layer_kinds(attention, num_layers)
    except ValueError:
        return False


def _check_letters(name: str, pattern: str, letters) -> None:
    if not pattern or any(letter.upper() not in letters for letter in pattern):
        raise ValueError(f"{name} must be made of the letters {', '.join(letters)}, got {pattern!r}")


@dataclass(frozen=True)
class ModelFlags:
    """The flags that shape a model; every command that builds one inherits them."""

    depth: Annotated[int, Bounds(1, 1000), Group.MODEL] = 20
    """Number of layers; width, heads, horizon and learning rates follow from it."""
    aspect_ratio: Annotated[Count, Group.MODEL] = 64
    """Width per layer."""
    head_dim: Annotated[Count, Group.MODEL] = 128
    """Channels per head."""
    window_pattern: Annotated[str, Group.MODEL] = "SSSL"
    """A letter per layer, tiled: L full context, S half of it; the last layer is always L."""
    attention: Annotated[str, Group.MODEL] = "gka"
    """Kind of attention, such as gka, softmax or vlt, or a letter per layer (A softmax, G gka, V vlt), tiled: GGGA."""
    value_embeds: Annotated[Literal["auto", "every-second", "every-layer", "none"], Group.MODEL] = "auto"
    """Layers with gated value embeddings; auto = nanochat's: every second layer, if its attention learns values;
    every-second = whatever its attention is; every-layer = the other layers too."""
    head_offsets: Annotated[str, Group.MODEL] = ""
    """A letter per head of gka layers, tiled: N pairs key j with value j, P with value j-1, S key j-1 with value j;
    empty = the paper's form. A fixed case of KV shifting attention (arXiv 2411.19574)."""
    gka_values: Annotated[Literal["rotated", "unrotated"], Group.MODEL] = "rotated"
    """What gka heads mix: rotated = the features that are in the kernel (the paper's section 5.1); unrotated, not the
    paper's = the same before rotation."""
    sigma_squared: Annotated[float, Bounds(0), Group.MODEL] = 0.0
    """Starting sigma^2 of gka heads; 0 = head_dim, or head_dim / 4 with head offsets."""
    offset_layers: Annotated[Literal["gka", "all"], Group.MODEL] = "gka"
    """Layers that have the head offsets, channel bandwidths and head gates; all gives them to softmax and vlt layers
    too, as a control."""
    channel_bandwidths: Annotated[bool, Group.MODEL] = False
    """Learn a scale for each channel of what is compared, beside sigma for each head (automatic relevance
    determination); not the paper's form."""
    head_gates: Annotated[bool, Group.MODEL] = False
    """Multiply each head's output by a gate that reads the token (arXiv 2505.06708); not the paper's form."""

    def shape(self, depth: int, sequence_len: int, vocab_size: int) -> GPTConfig:
        """The model's shape at `depth` with these settings. Raises UserError naming the setting."""
        names = {field.name for field in fields(GPTConfig)} | {"aspect_ratio", "head_dim"}
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}
        settings |= {"sequence_len": sequence_len, "vocab_size": vocab_size}
        if depth != self.depth:  # a reference for this model, which may lack the layers that some settings are for
            for name in unused_settings(self.attention, depth, self.offset_layers):
                settings.pop(name, None)
        try:
            return GPTConfig.from_depth(depth, **settings)
        except ValueError as error:
            raise UserError(str(error)) from None
