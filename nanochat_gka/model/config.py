"""The model's shape, and the one dial: depth -> width, heads, windows, attention of every layer."""

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from gka import KINDS, layer_kinds
from nanochat_gka.model import offsets
from trainkit_gka.cli import Bounds, Count, UserError

GKA_VALUES = ("rotated", "normalised", "raw")  # the paper's form first, which is the default
BEFORE_ROTATED = "normalised"  # the default until 2026-11-22; a saved shape that does not say its values has these
VALUE_EMBEDS = ("auto", "all", "every-layer", "none")
OFFSET_LAYERS = ("gka", "all")
MIXINGS = ("none", "kv-shift", "partial", "token-shift", "canon")
ROTARY = ("full", "half")
KERNELS = ("gaussian", "mean", "previous", "tied-softmax", "none")


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a model. The first seven fields are nanochat's; the defaults of the others leave its baseline unchanged.

    attention: the name of a row of `gka.KINDS`, or one letter per layer (A softmax, G gka, V vlt), tiled: GGGA.
    value_embeds: which layers may have nanochat's gated value embeddings (every second layer, the last one always):
      auto = those among them whose attention learns W_V, all, none. every-layer is ours: the others have them too.
    gka_values: what gka heads mix. rotated is the paper's section 5.1: the features that are in the kernel, after
      rotation and norm. Ours are normalised (after the norm, before the rotation) and raw (the block input as it is).
    head_offsets: one letter per head, tiled: N pairs key j with value j, P (predecessor) key j with value j - 1, S
      (successor) key j - 1 with value j; P2 and S2 are of two tokens. Commas separate the patterns of layers of all
      kinds, tiled: PS,P2S2. Empty is the paper's form, all N. offset_layers: gka layers have them, or all.
      A fixed case of KV shifting attention (arXiv 2411.19574), see `mixing`.
    sigma_squared: starting sigma^2 of gka heads; 0 = head_dim, or head_dim / 4 in a model with head offsets or mixing.
    mixing: other ways to meet the token before, of the same layers as head_offsets and in their place; see `mixing`.
    kernel: what gka layers weigh tokens by; gaussian, or a baseline for studies, see `baselines`.
    gka_window: slots (tokens, but for head offsets) before the query that gka layers see, the last layer too; 0 = what
      window_pattern says.
    channel_bandwidths: a learned scale for each channel of what gka layers compare, before the rotation; in softmax and
      vlt layers, of what they project to queries and keys. head_gates: each head's output times a gate that reads the
      token. Of the same layers as head_offsets; see `attention`.
    rotary: full, or half: the slower half of the frequencies is not rotated, in all layers.
    Raises ValueError naming the field.
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
    mixing: str = "none"
    rotary: str = "full"
    kernel: str = "gaussian"
    gka_window: int = 0
    channel_bandwidths: bool = False
    head_gates: bool = False

    def __post_init__(self):
        for name in ("sequence_len", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        heads, width = self.n_head, self.n_embd
        if self.n_kv_head != heads:
            raise ValueError(
                f"n_kv_head must equal n_head (nanochat trains no other), got {self.n_kv_head} and {heads}"
            )
        if width % heads or self.head_dim % 2:
            raise ValueError(f"n_embd / n_head must be an even whole number (rotary pairs), got {width} / {heads}")
        if width < 32:
            raise ValueError(f"n_embd must be at least 32 (the value gate reads 32 channels), got {width}")
        _check_letters("window_pattern", self.window_pattern, "SL")
        layer_kinds(self.attention, self.n_layer)
        if self.head_offsets:
            longest = max(offset.tokens for heads in offsets.parse(self.head_offsets) for offset in heads)
            if longest >= self.sequence_len:
                raise ValueError(f"head_offsets must be below sequence_len, {self.sequence_len}, got {longest} tokens")
        choices_of = {"gka_values": GKA_VALUES, "value_embeds": VALUE_EMBEDS, "offset_layers": OFFSET_LAYERS}
        choices_of |= {"mixing": MIXINGS, "rotary": ROTARY, "kernel": KERNELS}
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not (math.isfinite(self.sigma_squared) and self.sigma_squared >= 0):
            allowed = "positive and finite, or 0 for the default"
            raise ValueError(f"sigma_squared must be {allowed}, got {self.sigma_squared}")
        if not 0 <= self.gka_window <= self.sequence_len:
            raise ValueError(f"gka_window must be 0 to sequence_len, {self.sequence_len}, got {self.gka_window}")
        self._check_mixing()
        self._check_kernel()
        if not has_gka(self.attention, self.n_layer):
            for_all = ("head_offsets", "mixing", "channel_bandwidths", "head_gates")  # with offset_layers=all
            everywhere = for_all if self.offset_layers == "all" else ()
            for name in (*for_all, "gka_values", "sigma_squared", "kernel", "gka_window"):
                if name not in everywhere and getattr(self, name) != getattr(type(self), name):
                    none = f"attention={self.attention} has none in {self.n_layer} layers"
                    advice = "; offset_layers=all gives it to all" if name in for_all else ""
                    raise ValueError(f"{name} is for gka layers, and {none}{advice}")

    def _check_mixing(self) -> None:
        if self.mixing != "none" and self.head_offsets:
            raise ValueError(f"head_offsets and mixing={self.mixing} do the same in two ways; choose one of them")
        if self.mixing == "partial" and self.rotary != "half":
            raise ValueError("mixing=partial moves the channels that are not rotated; it needs rotary=half")
        if self.rotary == "half" and self.head_dim % 4:
            raise ValueError(f"rotary=half needs a head_dim that is a multiple of 4, got {self.head_dim}")

    def _check_kernel(self) -> None:
        if self.kernel in ("mean", "previous", "none") and self.sigma_squared:
            raise ValueError(f"sigma_squared is for kernels with a bandwidth, and kernel={self.kernel} has none")
        mixes = self.head_offsets or self.mixing != "none" or self.value_embeds in ("all", "every-layer")
        if self.kernel == "none" and mixes:
            raise ValueError("kernel=none mixes nothing; leave head_offsets, mixing and value_embeds out")
        if self.kernel in ("previous", "none") and self.gka_window:
            raise ValueError(f"gka_window means nothing with kernel={self.kernel}; leave it out")
        if self.kernel != "gaussian" and self.channel_bandwidths:
            raise ValueError(f"channel_bandwidths are of the Gaussian kernel, and kernel={self.kernel} is given")
        if self.kernel == "none" and self.head_gates:
            raise ValueError("kernel=none has no heads' outputs; leave head_gates out")

    @classmethod
    def from_depth(cls, depth: int, *, aspect_ratio: int = 64, head_dim: int = 128, **fields) -> "GPTConfig":
        """nanochat's dial: width = depth * aspect_ratio rounded up to whole heads of head_dim channels."""
        if min(depth, aspect_ratio, head_dim) < 1:
            given = f"{depth}, {aspect_ratio}, {head_dim}"
            raise ValueError(f"depth, aspect_ratio and head_dim must be at least 1, got {given}")
        heads = -(-depth * aspect_ratio // head_dim)
        return cls(n_layer=depth, n_head=heads, n_kv_head=heads, n_embd=heads * head_dim, **fields)

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> "GPTConfig":
        """The shape that a checkpoint states, in the form it was trained in, whatever the defaults are today.

        Models without gka layers were saved with `gka_values` too, which mean nothing there; a gka model that does not
        state them is older than rotated values. Raises TypeError or ValueError, for settings that are not known too.
        """
        kinds = {field.name: type(field.default) for field in fields(cls)}
        if unknown := sorted(saved.keys() - kinds.keys()):
            raise ValueError(f"it has settings that are not known here: {', '.join(unknown)}; a later version made it")
        words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
        for name, value in saved.items():
            if not isinstance(value, (int, float) if kinds[name] is float else kinds[name]):
                raise TypeError(f"{name} must be {words[kinds[name]]}, got {value!r}")
        config = cls(**{name: value for name, value in saved.items() if name != "gka_values"})
        if not has_gka(config.attention, config.n_layer):
            return config
        return replace(config, gka_values=saved.get("gka_values", BEFORE_ROTATED))

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding tables and the head: the vocabulary rounded up to a multiple of 64."""
        return -(-self.vocab_size // 64) * 64

    @property
    def initial_sigma_squared(self) -> float:
        has_mixing = self.head_offsets or self.mixing != "none"
        return self.sigma_squared or (self.head_dim / 4 if has_mixing else float(self.head_dim))

    def layer_attention(self, layer: int) -> str:
        """The name of the layer's kind, see `gka.KINDS`."""
        return layer_kinds(self.attention, self.n_layer)[layer]

    def window(self, layer: int) -> int:
        """Tokens before the query that stay visible: T for L, the last layer always, T // 2 for S; or `gka_window`."""
        if self.gka_window and self.layer_attention(layer) == "gka":
            return self.gka_window
        long = layer == self.n_layer - 1 or _tiled(self.window_pattern, layer) == "L"
        return self.sequence_len if long else self.sequence_len // 2

    def has_value_embedding(self, layer: int) -> bool:
        if self.value_embeds == "every-layer":
            return True
        every_second = layer % 2 == (self.n_layer - 1) % 2
        learns_values = "V" in KINDS[self.layer_attention(layer)].input_projections
        return every_second and (self.value_embeds == "all" or (self.value_embeds == "auto" and learns_values))

    @property
    def unrotated_channels(self) -> list[slice]:
        """Of a head's D: rotary pairs a channel of the first half with one of the second."""
        quarter = self.head_dim // 4
        return [slice(quarter, 2 * quarter), slice(3 * quarter, None)] if self.rotary == "half" else []

    @property
    def needs_own_cache(self) -> str:
        """The setting, or "", for which keys and values of past tokens are not what a cache must hold."""
        if self.mixing in ("token-shift", "canon"):  # they read the inputs of earlier tokens
            return f"mixing={self.mixing}"
        return "kernel=none" if self.kernel == "none" else ""

    def layer_mixing(self, layer: int) -> str:
        """The mixing of a layer, "none" in layers that have neither mixing nor head offsets."""
        return self.mixing if self.is_varied(layer) else "none"

    def is_varied(self, layer: int) -> bool:
        """Whether the layer has the model's head offsets, mixing, channel bandwidths and head gates."""
        return self.offset_layers == "all" or self.layer_attention(layer) == "gka"

    def offset_pattern(self, layer: int) -> tuple[offsets.HeadOffset, ...]:
        """What a layer's heads repeat; empty for layers without head offsets."""
        if not self.head_offsets or not self.is_varied(layer):
            return ()
        patterns = offsets.parse(self.head_offsets)
        return patterns[layer % len(patterns)]

    def offsets_of(self, layer: int) -> list[tuple[slice, offsets.HeadOffset]]:
        """Of every letter of a layer's pattern, the heads that have it, a slice of the H, and what it says."""
        own = self.offset_pattern(layer)
        return [(slice(place, self.n_head, len(own)), offset) for place, offset in enumerate(own[: self.n_head])]


def has_gka(attention: str, num_layers: int) -> bool:
    """Whether one of the layers is gka; False for a pattern that `layer_kinds` refuses."""
    try:
        return "gka" in layer_kinds(attention, num_layers)
    except ValueError:
        return False


def _tiled(pattern: str, index: int) -> str:
    return pattern[index % len(pattern)].upper()


def _check_letters(name: str, pattern: str, letters) -> None:
    if not pattern or any(letter.upper() not in letters for letter in pattern):
        raise ValueError(f"{name} must be made of the letters {', '.join(letters)}, got {pattern!r}")


@dataclass(frozen=True)
class ModelFlags:
    """The flags that shape a model; every command that builds one inherits them."""

    depth: Annotated[int, Bounds(1, 10**6)] = 20
    """Number of layers; width, heads, horizon and learning rates follow from it."""
    aspect_ratio: Count = 64
    """Width per layer."""
    head_dim: Count = 128
    """Channels per head."""
    window_pattern: str = "SSSL"
    """A letter per layer, tiled: L full context, S half of it; the last layer is always L; see gka_window."""
    attention: str = "softmax"
    """Kind of attention, such as softmax, gka or vlt, or a letter per layer (A softmax, G gka, V vlt), tiled: GGGA."""
    value_embeds: Literal["auto", "all", "every-layer", "none"] = "auto"
    """Layers with gated value embeddings; auto = nanochat's: every second layer, if its attention learns values; all =
    every second layer of any kind; every-layer = the other layers too."""
    head_offsets: str = ""
    """A letter per head of gka layers, tiled: N pairs key j with value j, P with value j-1, S key j-1 with value j, P2
    and S2 likewise two tokens apart; PS,N gives every second layer, of whatever kind, another pattern; empty = the
    paper's form. A fixed case of KV shifting attention (arXiv 2411.19574)."""
    gka_values: Literal["rotated", "normalised", "raw"] = "rotated"
    """What gka heads mix: rotated = the features that are in the kernel (the paper's section 5.1). Ours: normalised =
    the same before rotation, raw = the block input."""
    sigma_squared: Annotated[float, Bounds(0)] = 0.0
    """Starting sigma^2 of gka heads; 0 = head_dim, or head_dim / 4 with head offsets or mixing."""
    offset_layers: Literal["gka", "all"] = "gka"
    """Layers that have the head offsets, mixing, channel bandwidths and head gates; all gives them to softmax and vlt
    layers too, as a control."""
    mixing: Literal["none", "kv-shift", "partial", "token-shift", "canon"] = "none"
    """How attention meets the token before, in place of head offsets: kv-shift (arXiv 2411.19574) and partial
    (modded-nanogpt PR 169) mix keys and values, token-shift (RWKV) and canon (arXiv 2512.17351) the layer's input."""
    rotary: Literal["full", "half"] = "full"
    """Channels that are rotated; half leaves those of the slower frequencies alone, in all layers."""
    kernel: Literal["gaussian", "mean", "previous", "tied-softmax", "none"] = "gaussian"
    """What gka layers weigh tokens by. For studies: mean weighs all alike, previous takes the token before,
    tied-softmax compares by dot products, none leaves attention out."""
    gka_window: Annotated[int, Bounds(0)] = 0
    """Slots (tokens, but for head offsets) before the query that gka layers see, the last layer too; 0 = what the
    window pattern says."""
    channel_bandwidths: bool = False
    """Learn a scale for each channel of what is compared, beside sigma for each head (automatic relevance
    determination); not the paper's form."""
    head_gates: bool = False
    """Multiply each head's output by a gate that reads the token (arXiv 2505.06708); not the paper's form."""

    def shape(self, depth: int, sequence_len: int, vocab_size: int) -> GPTConfig:
        """The model's shape at `depth` with these settings. Raises UserError naming the setting."""
        settings = {field.name: getattr(self, field.name) for field in fields(ModelFlags) if field.name != "depth"}
        try:
            return GPTConfig.from_depth(depth, sequence_len=sequence_len, vocab_size=vocab_size, **settings)
        except ValueError as error:
            raise UserError(str(error)) from None
