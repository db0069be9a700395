"""The best form that the study has at the paper's parameters, at depth 20: head offsets, values that are not rotated.

Command:   make pretrain-d20-best NGPU=7, then make eval-bpb and make eval-core with RUN=out/runs/d20-gka-PS-normalised
Trains:    as make pretrain-d20: 378,798,320 parameters, 2,778,726,400 tokens of FineWeb-Edu, 6.709e18 FLOPs
Hours:     as make pretrain-d20: 3.2 on 7 RTX 5090, an estimate from FLOPs alone; not measured
Expected:  less than the paper's form, by runs/study/README.md; not run here yet

This form is ours, not the paper's. It has the parameters, FLOPs and half cache of the paper's form. Value embeddings
are left out, though they help: in half of the layers, as softmax has them (`--value-embeds all`), the model would have
798,231,920 parameters, twice as many, and the whole cache; in every layer (`--value-embeds every-layer`) 1,217,665,520,
more than the softmax baseline's 896,535,720.
"""

from runs.paper.gpt_d20_gka import RECIPE as PAPER

RECIPE = {**PAPER, "head-offsets": "PS", "gka-values": "normalised"}

if __name__ == "__main__":
    from runs.paper import gpt_d20  # not for make, which reads the recipe before there is an environment

    gpt_d20.run(RECIPE)
