"""The GKA language model that the study favours, at depth 20: head offsets, and values that are not rotated.

Command:   make pretrain-d20-best NGPU=7, then make eval-bpb and make eval-core with RUN=out/runs/d20-gka-PS-normalised
Trains:    as make pretrain-d20: 378,798,320 parameters, 2,778,726,400 tokens of FineWeb-Edu, 6.709e18 FLOPs
Hours:     as make pretrain-d20: 3.2 on 7 RTX 5090, an estimate from FLOPs alone; not measured
Expected:  less than the paper's form, by gka/README.md's "Which form to train"; not run here yet

This form is ours, not the paper's. It has the parameters and FLOPs of the paper's form. Value embeddings in every layer
(`--value-embeds every-layer`) are left out: they helped a little in the study, but would make it 1,217,665,520
parameters, 3.2 times as many and more than the softmax baseline's 896,535,720.
"""

from runs.paper import common
from runs.paper.gpt_d20 import LanguageConfig, experiment
from runs.paper.gpt_d20_gka import RECIPE as PAPER

RECIPE = {**PAPER, "head-offsets": "PS", "gka-values": "normalised"}

if __name__ == "__main__":
    common.run(experiment(RECIPE), LanguageConfig)
