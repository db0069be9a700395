"""The families of models that the study compares: the fields of a trial that one differs by from the next."""

from typing import Any

from gka.kinds import KINDS
from runs.study.forms.config import parse

Family = dict[str, Any]  # fields of a trial

OFFSETS = dict(head_offsets="PS")
EVERYWHERE = dict(head_offsets="PS", offset_layers="all")
UNROTATED = dict(gka_values="normalised")
# auto gives softmax value embeddings in half of its layers, as nanochat does, and GKA and VLT none.
FAMILIES = {
    "softmax": dict(attention="softmax"),
    "softmax + offsets": dict(attention="softmax", **EVERYWHERE),
    "softmax + VE": dict(attention="softmax", value_embeds="every-layer"),
    "GKA": dict(attention="gka"),
    "GKA unrotated": dict(attention="gka", **UNROTATED),
    "GKA + offsets": dict(attention="gka", **OFFSETS, **UNROTATED),
    "GKA + offsets + VE": dict(attention="gka", value_embeds="every-layer", **OFFSETS, **UNROTATED),
    "VLT + offsets": dict(attention="vlt", **EVERYWHERE),
}
# Trained after the first ones have their rates: the same at other settings.
FURTHER = {
    "softmax without VE": dict(attention="softmax", value_embeds="none"),
    "softmax + offsets without VE": dict(attention="softmax", value_embeds="none", **EVERYWHERE),
    "softmax + offsets + VE": dict(attention="softmax", value_embeds="every-layer", **EVERYWHERE),
    "GKA + offsets rotated": dict(attention="gka", **OFFSETS),
    "GKA + offsets + half VE": dict(attention="gka", value_embeds="all", **OFFSETS, **UNROTATED),
    "VLT": dict(attention="vlt"),
}
# Value embeddings in no layer, in half of the layers as nanochat's, and in every layer.
VALUE_EMBEDS = {
    "softmax": ("softmax without VE", "softmax", "softmax + VE"),
    "softmax + offsets": ("softmax + offsets without VE", "softmax + offsets", "softmax + offsets + VE"),
    "GKA + offsets": ("GKA + offsets", "GKA + offsets + half VE", "GKA + offsets + VE"),
}
# auto gives a hybrid's softmax layers value embeddings.
# A pattern of layers needs the depth, so that the smallest size cannot choose a rate: it comes from the family named.
HYBRIDS = {
    "GGGA": dict(attention="GGGA", **UNROTATED),
    "GGGA + offsets": dict(attention="GGGA", **EVERYWHERE, **UNROTATED),
    "GGGA + offsets without VE": dict(attention="GGGA", value_embeds="none", **EVERYWHERE, **UNROTATED),
    "GGGGGA + offsets": dict(attention="GGGGGA", **EVERYWHERE, **UNROTATED),
}
# Offsets of several tokens, and others in other layers. Some need four heads or layers; all take the rate of PS.
FURTHER_APART = ("P2S2", "P4S4", "PSP2S2", "PSP4S4")
BY_LAYER = ("PS,P2S2", "P,S", "PS,N", "N,PS", "PS,PS,N,N", "N,N,PS,PS")
OTHER_OFFSETS = {"GKA + offsets": (*FURTHER_APART, *BY_LAYER), "softmax + offsets": ("P2S2", "PSP2S2")}
PATTERNS = {
    f"{name} {pattern}": {**FAMILIES[name], "head_offsets": pattern}
    for name, patterns in OTHER_OFFSETS.items()
    for pattern in patterns
}
RATE_OF = {"GGGA": "GKA unrotated"} | {name: "GKA + offsets" for name in HYBRIDS if name != "GGGA"}
RATE_OF |= {f"{name} {pattern}": name for name, patterns in OTHER_OFFSETS.items() for pattern in patterns}
# What attention is compared with: none of it, and weights that do not depend on what is compared.
REFERENCES = {
    "no attention": dict(attention="gka", kernel="none"),
    "causal mean": dict(attention="gka", kernel="mean", **UNROTATED),
    "previous token": dict(attention="gka", kernel="previous", **UNROTATED),
}
# Relatives of head offsets, each on GKA and on softmax. Half of the rotation alone is the partial offset's control.
MIXINGS = {
    "KV shift": dict(mixing="kv-shift"),
    "token shift": dict(mixing="token-shift"),
    "Canon": dict(mixing="canon"),
    "partial offset": dict(mixing="partial", rotary="half"),
}
REPAIRS = {
    **{f"GKA + {name}": dict(attention="gka", **UNROTATED, **mixing) for name, mixing in MIXINGS.items()},
    **{f"softmax + {n}": dict(attention="softmax", offset_layers="all", **mixing) for n, mixing in MIXINGS.items()},
    "GKA unrotated, half rotary": dict(attention="gka", rotary="half", **UNROTATED),
    "softmax, half rotary": dict(attention="softmax", rotary="half"),
}
# GKA + offsets with something else in the place of the kernel, or bandwidths that stay where they start.
KERNELS = {
    "offsets, fixed sigma": dict(attention="gka", learn_sigma=False, **OFFSETS, **UNROTATED),
    "offsets, causal mean": dict(attention="gka", kernel="mean", **OFFSETS, **UNROTATED),
    "offsets, tied softmax": dict(attention="gka", kernel="tied-softmax", **OFFSETS, **UNROTATED),
    "tied softmax": dict(attention="gka", kernel="tied-softmax", **UNROTATED),
}
# The same over few slots, the query's own among them: is the kernel more than its width? A slot of a P head holds the
# value of the token before, so that a mean over 2 mixes three tokens: P heads the two before the query, S heads the
# query and the one before.
NARROW = {
    **{
        f"offsets, mean of {tokens} tokens": dict(
            attention="gka", kernel="mean", gka_window=tokens - 1, **OFFSETS, **UNROTATED
        )
        for tokens in (2, 4, 8, 16, 64)
    },
    **{
        f"offsets, Gaussian over {tokens} tokens": dict(attention="gka", gka_window=tokens - 1, **OFFSETS, **UNROTATED)
        for tokens in (8, 64)
    },
}
KERNELS |= NARROW
# A bandwidth for every channel, a gate for every head, and both. Softmax and VLT are controls: the same vector before
# their projections, the same gate. All take the rate of the form without.
LEARNED = {
    "channels + gates": dict(channel_bandwidths=True, head_gates=True),
    "channels": dict(channel_bandwidths=True),
    "gates": dict(head_gates=True),
}
# Their own rates, each of channels and of gates: the slowest within 0.0005 of the best of the group `channel-rates`.
OWN_RATES = {
    "GKA + offsets + half VE": (4.0, 0.25),
    "softmax + offsets": (1.0, 0.25),
    "GGGA + offsets": (1.0, 1.0),  # GKA + offsets', for the pattern needs four layers
    "GKA + offsets": (1.0, 1.0),
    "VLT + offsets": (4.0, 0.25),
    "GKA unrotated": (0.25, 0.25),
    "GKA": (0.25, 1.0),
}
WITHOUT = {name: {**FAMILIES, **FURTHER, **HYBRIDS}[name] for name in OWN_RATES}


def _with(name: str, learned: str) -> Family:
    channel_rate, gate_rate = OWN_RATES[name]
    fields = LEARNED[learned]
    rates = dict(channel_rate=channel_rate) if "channel_bandwidths" in fields else {}
    rates |= dict(gate_rate=gate_rate) if "head_gates" in fields else {}
    return {**WITHOUT[name], **fields, **rates}


CHANNELS = {f"{name} + {learned}": _with(name, learned) for learned in LEARNED for name in WITHOUT}
RATE_OF |= {f"{name} + {learned}": RATE_OF.get(name, name) for learned in LEARNED for name in WITHOUT}
# What else might help the preset, and softmax with the same as a control of what did.
PRESET, RIVAL = "GKA + offsets + half VE + channels + gates", "softmax + offsets + channels + gates"
WIDE_HEADS = {f"{name}, heads of 128": {**CHANNELS[name], "head_dim": 128} for name in (PRESET, RIVAL)}
IDEAS = {
    **WIDE_HEADS,
    f"{PRESET}, no own slot": {**CHANNELS[PRESET], "kernel": "others"},
    f"{PRESET}, shared values": {**CHANNELS[PRESET], "mixing": "value-share"},
}
RATE_OF |= {name: RATE_OF[name.partition(",")[0]] for name in IDEAS}
ALL = {**FAMILIES, **FURTHER, **HYBRIDS, **REFERENCES, **REPAIRS, **KERNELS, **PATTERNS, **CHANNELS, **IDEAS}


def shape_of(name: str) -> Family:
    """What the family is as a model: its fields without learning rates."""
    return {field: value for field, value in ALL[name].items() if field not in ("channel_rate", "gate_rate")}


def rate_source(family: Family) -> Family:
    """The family whose learning rate this one takes: itself, but for hybrids and patterns of offsets (`RATE_OF`)."""
    name = next((name for name in RATE_OF if ALL[name] == family), None)
    return ALL[RATE_OF[name]] if name else family


def fits_depth(family: Family, depth: int) -> bool:
    """Whether a model of this depth has the whole of the family's pattern of layers and heads."""
    of_layers, of_heads = family["attention"], parse(family.get("head_offsets") or "N")
    longest = max(len(of_heads), *map(len, of_heads))  # the study's models have a head for each layer
    return longest <= depth and (of_layers in KINDS or len(of_layers) <= depth)
