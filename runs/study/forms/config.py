"""The settings of the study's forms: a model's shape with more fields, and the flags of the same names."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal

from gka.offsets import DELAYS
from nanochat_gka.model.config import GPTConfig
from runs.study.forms.attention import varied
from trainkit_gka.cli import Bounds

MIXINGS = ("none", "kv-shift", "partial", "value-share", "token-shift", "canon")
ROTARY = ("full", "half")
KERNELS = ("gaussian", "mean", "previous", "tied-softmax", "others", "none")


@dataclass(frozen=True)
class StudyShape(GPTConfig):
    """A model's shape with the settings of the study.

    gka_values: raw too: the block input as it is, neither normalised nor rotated.
    head_offsets: P and S may have a number of tokens, P2, and commas separate the patterns of layers: PS,P2S2. Layers
      repeat the patterns, whatever kind they are.
    mixing: other ways to meet the token before, of the same layers as head_offsets and in their place, but for
      value-share, which they may have too; see `mixing`.
    rotary: full, or half: the slower half of the frequencies is not rotated, in all layers.
    kernel: what gka layers weigh tokens by; gaussian, or a baseline, see `attention`.
    gka_window: slots (tokens, but for head offsets) before the query that gka layers see, the last layer too; 0 = what
      window_pattern says.
    Raises ValueError naming the field.
    """

    mixing: str = "none"
    rotary: str = "full"
    kernel: str = "gaussian"
    gka_window: int = 0

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **GPTConfig.CHOICES,
        "gka_values": (*GPTConfig.CHOICES["gka_values"], "raw"),
        "mixing": MIXINGS,
        "rotary": ROTARY,
        "kernel": KERNELS,
    }
    FOR_VARIED: ClassVar[tuple[str, ...]] = (*GPTConfig.FOR_VARIED, "mixing")
    FOR_GKA: ClassVar[tuple[str, ...]] = (*GPTConfig.FOR_GKA, "kernel", "gka_window")

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.gka_window <= self.sequence_len:
            raise ValueError(f"gka_window must be 0 to sequence_len, {self.sequence_len}, got {self.gka_window}")
        if self.mixing not in ("none", "value-share") and self.head_offsets:
            raise ValueError(f"head_offsets and mixing={self.mixing} do the same in two ways; choose one of them")
        if self.mixing == "partial" and self.rotary != "half":
            raise ValueError("mixing=partial moves the channels that are not rotated; it needs rotary=half")
        if self.rotary == "half" and self.head_dim % 4:
            raise ValueError(f"rotary=half needs a head_dim that is a multiple of 4, got {self.head_dim}")
        self._check_kernel()

    def _check_offsets(self) -> None:
        longest = max(
            (tokens for pattern in parse(self.head_offsets) for head in pattern for tokens in head), default=0
        )
        if longest >= self.sequence_len:
            raise ValueError(f"head_offsets must be below sequence_len, {self.sequence_len}, got {longest} tokens")

    def _check_kernel(self) -> None:
        if self.kernel in ("mean", "previous", "none") and self.sigma_squared:
            raise ValueError(f"sigma_squared is for kernels with a bandwidth, and kernel={self.kernel} has none")
        if self.kernel == "none" and (self.meets_other_tokens or self.value_embeds in ("all", "every-layer")):
            raise ValueError("kernel=none mixes nothing; leave head_offsets, mixing and value_embeds out")
        if self.kernel in ("previous", "none") and self.gka_window:
            raise ValueError(f"gka_window means nothing with kernel={self.kernel}; leave it out")
        if self.kernel not in ("gaussian", "others") and self.channel_bandwidths:
            raise ValueError(f"channel_bandwidths are of the Gaussian kernel, and kernel={self.kernel} is given")
        if self.kernel == "none" and self.head_gates:
            raise ValueError("kernel=none has no heads' outputs; leave head_gates out")

    def variation(self, layer, kind):
        return varied(self, layer, kind)

    @staticmethod
    def words_of(settings):
        mixing = [] if settings.mixing == "none" else [settings.mixing]
        others = ["half-rotary"] if settings.rotary == "half" else []
        others += [] if settings.kernel == "gaussian" else [settings.kernel]
        return mixing, others + ([f"window-{settings.gka_window}"] if settings.gka_window else [])

    @property
    def rotated_frequencies(self):
        return self.head_dim // 4 if self.rotary == "half" else super().rotated_frequencies

    @property
    def meets_other_tokens(self):
        return self.mixing != "none" or super().meets_other_tokens

    def window(self, layer):
        own = self.gka_window if self.layer_attention(layer) == "gka" else 0
        return own or super().window(layer)

    def offset_pattern(self, layer):
        patterns = parse(self.head_offsets)
        return patterns[layer % len(patterns)] if patterns and self.is_varied(layer) else ()

    def layer_mixing(self, layer: int) -> str:
        """The mixing of a layer, "none" in layers that have none."""
        return self.mixing if self.is_varied(layer) else "none"


@cache
def parse(head_offsets: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The patterns of layers: of each head by how many tokens its keys and its values are late. Raises ValueError."""
    if not head_offsets:
        return ()
    layers = [re.findall(r"([NPS])([0-9]*)", pattern) for pattern in head_offsets.upper().split(",")]
    heads = [head for layer in layers for head in layer]
    said = ",".join("".join(letter + number for letter, number in layer) for layer in layers)
    if said != head_offsets.upper() or not all(layers) or any(letter == "N" and number for letter, number in heads):
        form = "with a number of tokens after P or S (none: 1) and a comma between the patterns of layers"
        raise ValueError(f"head_offsets must be made of the letters {', '.join(DELAYS)}, {form}, got {head_offsets!r}")
    if any(number and int(number) < 1 for _, number in heads):
        raise ValueError(f"head_offsets must be of at least 1 token, got {head_offsets!r}; N is a head without")
    return tuple(
        tuple(tuple(late * int(number or 1) for late in DELAYS[letter]) for letter, number in own) for own in layers
    )


@dataclass(frozen=True)
class StudyFlags:
    """The flags of the study's forms."""

    gka_values: Literal["rotated", "normalised", "raw"] = "rotated"
    """What gka heads mix: rotated = the features that are in the kernel (the paper's section 5.1). Ours: normalised =
    the same before rotation, raw = the block input."""
    head_offsets: str = ""
    """A letter per head of gka layers, tiled: N pairs key j with value j, P with value j-1, S key j-1 with value j, P2
    and S2 likewise two tokens apart; PS,N gives every second layer, of whatever kind, another pattern; empty = the
    paper's form. A fixed case of KV shifting attention (arXiv 2411.19574)."""
    mixing: Literal["none", "kv-shift", "partial", "value-share", "token-shift", "canon"] = "none"
    """How attention meets the token before. In place of head offsets: kv-shift (arXiv 2411.19574) and partial
    (modded-nanogpt PR 169) mix keys and values, token-shift (RWKV) and canon (arXiv 2512.17351) the layer's input. With
    head offsets or without: value-share adds a learned share of its value to every channel."""
    rotary: Literal["full", "half"] = "full"
    """Channels that are rotated; half leaves those of the slower frequencies alone, in all layers."""
    kernel: Literal["gaussian", "mean", "previous", "tied-softmax", "others", "none"] = "gaussian"
    """What gka layers weigh tokens by: mean weighs all alike, previous takes the token before, tied-softmax compares by
    dot products, others leaves the query's own slot out of its row, none leaves attention out."""
    gka_window: Annotated[int, Bounds(0)] = 0
    """Slots (tokens, but for head offsets) before the query that gka layers see, the last layer too; 0 = what the
    window pattern says."""
