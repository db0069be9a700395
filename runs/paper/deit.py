"""The paper's vision models: tables 2 (accuracy), 3 (size) and 5 (ablation), sections 4.2 to 4.4; ImageNet, 300 epochs.

Command:   make train-deit-ti DATA=/imagenet NGPU=7 (GKA; -base is softmax, -vlt is VLT; sizes ti, s, b)
Hardware:  7 RTX 5090 of 32 GB, bfloat16, 256 images each
Hours:     on those 7, an estimate from table 4's throughput at 128 images each: 300 x 1,281,167 images at
           softmax  ti 4.6,  s 5.3,  b 13.4
           GKA      ti 7.8,  s 14.4, b 31.5 (the paper's implementation; ours has not been timed on a GPU)
Expected:  EMA top-1, as printed; none has been run here yet
           softmax  ti 72.2,  s 79.8,  b 81.8  (DeiT's own published figures, which are without EMA)
           VLT      ti 73.5
           GKA      ti 71.54, s 78.23, b 80.3
"""

from gka.kinds import KINDS
from runs import commands

SIZE_NAMES = commands.VISION_SIZES
PAPER_NAMES = {"softmax": "DeiT"} | {name: kind.label for name, kind in KINDS.items() if name != "softmax"}
DEFAULT_KIND = "gka"
SOFTMAX_TARGET = "base"  # what make's targets call softmax attention
