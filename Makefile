# Gaussian Kernel Attention: the targets of make. `make help` lists them, `make -n TARGET` shows what one runs.
# A target is a line here, for the list, and one in runs/make.py, which words its commands and runs them.

PYTHON   ?= python3
SETTINGS := BASE CORPUS COLUMN SHARDS VOCAB SEQ DEPTH NGPU NNODES RDZV RESTARTS RUN MODEL DATA IMAGE TEXT ARGS \
            PROMPT BUNDLE WANDB_MODE PYTHON ENV_PYTHON NANOCHAT_SRC DEIT_SRC
# A setting is text, which neither make nor the shell expands: runs/make.py reads it from the environment.
$(foreach name,$(SETTINGS),$(eval override $(name) := $$(value $(name))))
GOALS    := $(or $(value MAKECMDGOALS),help)
export SETTINGS GOALS $(foreach name,$(SETTINGS),$(if $($(name)),$(name)))
$(if $(shell command -v '$(subst ','\'',$(PYTHON))'),,$(error there is no $(PYTHON); set PYTHON=python3.x))

# One process runs all targets that are named. The + has `make -n` start it too; it only shows the commands then.
MAKEFLAGS += --no-builtin-rules --silent
.PHONY: launch
launch:
	+@test -z "$$GOALS" || exec "$$PYTHON" -m runs.make
# Any other name is one like train-deit-s-vlt, or it is refused there.
%:: launch ;
Makefile: ;

# The list that `make help` prints.
## Start
help: launch  ## list the targets
setup clean: launch  ## create .venv (the others do it by themselves); delete it
demo: launch  ## train small models, GKA beside softmax, in minutes on a CPU
test test-gpu lint: launch  ## the tests (no GPU, no network); those for CUDA; ruff and mypy
## Language models
data tokenizer tokenize: launch  ## the corpus; its tokenizer; rows of SEQ tokens
pretrain-d20: launch  ## the paper's GKA run: depth 20, 2.8e9 tokens (DEPTH=...)
pretrain-d20-base: launch  ## the paper's softmax baseline: depth 20, 4.6e9 tokens
pretrain-d20-best: launch  ## the form that runs/study recommends, at the same FLOPs
pretrain-small: launch  ## the same with 4 layers, in minutes on a CPU (CORPUS=folder)
eval-bpb eval-bpb-base: launch  ## bits per byte and samples of a run, on its own data
eval-core eval-core-base: launch  ## DCLM's CORE of a run (BUNDLE=folder or zip, else it is fetched)
sample: launch  ## text from a run (PROMPT='...')
export: launch  ## a run as a folder of its own, RUN-export, which installs nothing of ours
## Vision models
train-deit-ti: launch  ## the paper's GKA on DATA (-s, -b; -ti-base is softmax, -ti-vlt VLT)
eval-deit: launch  ## top-1 and top-5 of a run on its own images, or DATA
ablate-projections: launch  ## the paper's ablation: every kind and a hybrid at size Ti
## Results
bench: launch  ## time attention, DeiT and GPT, on the GPU or else the CPU
figures: launch  ## the paper's figures of RUN, MODEL or the demo (IMAGE=file, TEXT=...)
tables claims: launch  ## the paper's tables beside ours; its claims beside what was measured
report: launch  ## all of it in one HTML page (RUN=folder, else all of BASE)
study: launch  ## train what is left of the study (ARGS=--list shows it)
site: launch  ## these pages as a site with search, in out/site
## Patches for upstream nanochat and DeiT
vendor diff unpatch: launch  ## clone both (or *_SRC); patch and show; take the patches out
test-patches: launch  ## test the patches on vendor/
