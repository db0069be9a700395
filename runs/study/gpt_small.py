"""The study's preset with four layers, as the study trains it: on a CPU, in minutes, on any text.

Command:   make pretrain-small CORPUS=folder, then
           make sample RUN=out/runs/d4-gka-PS-normalised-channels-gates-VE
Trains:    6,559,000 parameters on 1,048,576 tokens, in rows of 512 tokens of a vocabulary of 4,096
Minutes:   3 on two cores of a server, in float32
Expected:  on the study's text 1.73 bits per byte; --num-iterations 2048 gives 1.55

The rates are nanochat's own at 2,048 tokens a step, where its rule for other batches would make them a sixteenth.
"""

from runs.study.gpt_d20_best import FORM

RECIPE = {
    "attention": "gka",
    **FORM,
    "head-dim": 64,
    "window-pattern": "L",
    "num-iterations": 512,
    "total-batch-size": 2048,
    "lr-batch-size": 2048,
    "eval-every": 128,
    "eval-tokens": 131072,
    "save-every": 128,
}
