"""The paper's GKA language model at depth 20: tables 6 (bits per byte), 7 (CORE) and 8 (size and compute), section 5.

Command:   make pretrain-d20 NGPU=7, then make eval-bpb and make eval-core NGPU=7
Trains:    378,798,320 parameters on 2,778,726,400 tokens of FineWeb-Edu, 2,650 steps, 6.709e18 FLOPs
Hardware:  the paper names none for language; 7 RTX 5090 for vision
Hours:     3.2 on those 7, an estimate: from FLOPs alone, at 40 % of 209.5 TFLOP/s each; not measured
Expected:  validation 0.819080 bits per byte, training 0.818256; mean of six CORE tasks 0.2286; not run here yet
"""

RECIPE = {"attention": "gka", "target-param-data-ratio": 8.25}
