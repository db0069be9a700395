"""The paper's softmax baseline (nanochat_base) at depth 20: tables 6 (bits per byte), 7 (CORE), 8 (size).

Command:   make pretrain-d20-base NGPU=7, then make eval-bpb-base and make eval-core-base NGPU=7
Trains:    896,535,720 parameters on 4,568,645,632 tokens of FineWeb-Edu, 4,357 steps, 1.373e19 FLOPs
Hardware:  the paper names none for language; 7 RTX 5090 for vision
Hours:     6.5 on those 7, an estimate: from FLOPs alone, at 40 % of 209.5 TFLOP/s each; not measured
Expected:  validation 0.7884 bits per byte, training 0.7800; mean of six CORE tasks 0.2418; not run here yet

Its budget is not GKA's: 10.5 tokens for each scaling parameter, GKA has 8.25.
"""

RECIPE = {"attention": "softmax", "target-param-data-ratio": 10.5}
