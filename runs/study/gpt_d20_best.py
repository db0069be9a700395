"""The best form of GKA that the study has, at depth 20 and the paper's FLOPs.

Command:   make pretrain-d20-best NGPU=7, then make eval-bpb and make eval-core with
           RUN=out/runs/d20-gka-PS-normalised-channels-gates-VE
Trains:    798,513,520 parameters on 2,780,823,552 tokens of FineWeb-Edu, 6.719e18 FLOPs
Hours:     as make pretrain-d20: 3.2 on 7 RTX 5090, an estimate from FLOPs alone; not measured
Expected:  less than the paper's form, by runs/study/README.md; not run here yet

This form is not the paper's: head offsets, values that are not rotated, a bandwidth for every channel, a gate for
every head, and value embeddings in half of the layers, as softmax has them. They are half of its parameters and read
no FLOPs; without them (`--value-embeds none`) it has 379,079,920 and half the cache, and stays further behind softmax.
In every layer (`--value-embeds every-layer`) they help no more, and make it larger than the softmax baseline's
896,535,720. The rates of bandwidths and gates are those that the study found at two layers.
"""

from runs.paper.gpt_d20_gka import RECIPE as PAPER

FORM = {
    "head-offsets": "PS",
    "gka-values": "normalised",
    "value-embeds": "all",
    "channel-bandwidths": True,
    "channel-lr": 0.08,
    "head-gates": True,
    "gate-lr": 0.005,
}
RECIPE = {**PAPER, **FORM}
