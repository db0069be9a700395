"""CORE of a trained language model: table 7, section 5 (six tasks of DCLM's 22, centred).

Command:   make eval-core NGPU=7 (RUN=folder for another run; ARGS="--tasks paper" for the paper's six tasks alone)
Data:      nanochat's bundle, fetched once (162 MB), or BUNDLE=folder or zip
Hardware:  any; the work is divided among the processes
Hours:     not measured on a GPU
Expected:  mean of the six tasks 0.2418 for the baseline, all examples; 0.2286 for GKA, 200 examples of each task
           (nanochat_gka/core_metric/published.py has every figure); not run here yet
"""
