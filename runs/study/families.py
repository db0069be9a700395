"""The families of models that the study compares: the fields of a cell that one differs by from the next."""

from typing import Any

Family = dict[str, Any]  # fields of a cell

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
# Trained after the first ones have their rates: the same at other settings, and hybrids.
FURTHER = {
    "softmax without VE": dict(attention="softmax", value_embeds="none"),
    "softmax + offsets + VE": dict(attention="softmax", value_embeds="every-layer", **EVERYWHERE),
    "GKA + offsets rotated": dict(attention="gka", **OFFSETS),
    "GKA + offsets + half VE": dict(attention="gka", value_embeds="all", **OFFSETS, **UNROTATED),
    "VLT": dict(attention="vlt"),
    "GGGA": dict(attention="GGGA", **UNROTATED),
    "GGGA + offsets": dict(attention="GGGA", **EVERYWHERE, **UNROTATED),
    "GGGGGA + offsets": dict(attention="GGGGGA", **EVERYWHERE, **UNROTATED),
}
