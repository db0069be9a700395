"""Small language models in every form of the study."""

import dataclasses

import torch

import tiny_gpt
from nanochat_gka.model.gpt import GPT
from runs.study.forms.config import StudyShape

SHAPE = StudyShape(**dataclasses.asdict(tiny_gpt.SHAPE))
GKA = dict(attention="gka", gka_values="normalised")
MIXED = [
    dict(GKA, mixing="kv-shift"),
    dict(attention="softmax", mixing="kv-shift", offset_layers="all"),
    dict(attention="gka", mixing="partial", rotary="half"),
    dict(attention="VGA", mixing="partial", rotary="half", offset_layers="all", value_embeds="all"),
    dict(GKA, mixing="value-share", head_offsets="P2S", value_embeds="all", channel_bandwidths=True, head_gates=True),
    dict(attention="GAV", mixing="value-share", offset_layers="all"),
    dict(GKA, mixing="token-shift", head_gates=True),
    dict(attention="GAV", mixing="canon", offset_layers="all"),
]
KERNELS = [
    dict(GKA, kernel="previous"),
    dict(attention="gka", kernel="tied-softmax", head_offsets="PS"),
    dict(attention="gka", kernel="none"),
    dict(GKA, kernel="others", head_offsets="PS", channel_bandwidths=True, value_embeds="all"),
    dict(GKA, kernel="others", mixing="canon", gka_window=3),
    dict(attention="GA", kernel="previous", mixing="canon", value_embeds="every-layer"),
]
OTHERS = [
    dict(attention="gka", gka_values="raw", value_embeds="all", channel_bandwidths=True),
    dict(attention="GA", head_offsets="P3NS2P,S5", offset_layers="all", gka_values="raw"),
    dict(attention="gka", head_offsets="P2S3", gka_window=2, value_embeds="all"),
    dict(GKA, kernel="mean", head_offsets="P3S", gka_window=3),
]
FORMS = MIXED + KERNELS + OTHERS


def awake(**form) -> GPT:
    """As `tiny_gpt.awake`, of SHAPE with some other settings; what they learn to meet the token before is not 0."""
    model = tiny_gpt.awake(dataclasses.replace(SHAPE, **form))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".blend." in name or name.endswith("pairing.values"):
                parameter.uniform_(0.2, 0.8)
    return model
