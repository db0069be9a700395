# Gaussian Kernel Attention: every command of the README. `make help` lists them, `make -n TARGET` shows what one would run.

PYTHON     ?= python3
VENV       := .venv
PY         := $(VENV)/bin/python
READY      := $(VENV)/.installed

BASE       ?= out
CORPUS     ?= fineweb
SHARDS     ?= 170
VOCAB      ?= 32768
SEQ        ?= 2048
DEPTH      ?= 20
GPUS       := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NGPU       ?= $(GPUS)
ARGS       ?=
WANDB_MODE ?= disabled
RUN        ?= $(BASE)/runs/d$(DEPTH)-gka
BUNDLE     ?=
PROMPT     ?= The
DATA       ?=
MODEL      ?=

# CORPUS is fineweb, builtin, or a folder of parquet files with a text column.
PREPARED   := $(filter fineweb builtin,$(CORPUS))
# A name of its own for every corpus: fineweb-170, builtin, text-1234567890 (checksum of the folder's path).
DATASET    := $(if $(PREPARED),$(CORPUS)$(if $(filter fineweb,$(CORPUS)),-$(SHARDS)),$(notdir $(patsubst %/,%,$(CORPUS)))-$(firstword $(shell echo $(abspath $(CORPUS)) | cksum)))
CORPUS_DIR := $(if $(PREPARED),$(BASE)/corpus/$(DATASET),$(CORPUS))
DOCUMENTS  := $(if $(PREPARED),$(CORPUS_DIR)/.complete,$(CORPUS_DIR))
TOKENIZER  := $(BASE)/tokenizer/$(DATASET)-$(VOCAB)
PACKED     := $(BASE)/packed/$(DATASET)-$(VOCAB)-$(SEQ)

ON_CPU     := $(filter %cpu,$(ARGS))
RANKS      := $(if $(filter-out 0 1,$(NGPU)),$(NGPU))
# The dashes keep torchrun from taking our --run for its --run-path.
LAUNCH     := $(if $(RANKS),$(VENV)/bin/torchrun --standalone --nproc-per-node $(RANKS) -m --,$(PY) -m)
# ARGS goes to the target that was named, not to what it needs first.
args_of     = $(if $(filter $(1),$(MAKECMDGOALS)),$(ARGS))
TRAIN       = $(LAUNCH) nanochat_gka.train --data $(PACKED) --out $(BASE)/runs --results $(BASE)/results.jsonl --depth $(DEPTH) --wandb $(WANDB_MODE)

# The rows are those the run was trained on, unless CORPUS, SHARDS, VOCAB or SEQ is given.
CHOSEN      = $(filter-out file,$(foreach name,CORPUS SHARDS VOCAB SEQ,$(origin $(name))))
EVAL_BPB    = $(LAUNCH) nanochat_gka.evaluate --results $(BASE)/results.jsonl $(if $(CHOSEN),--data $(PACKED))
EVAL_CORE   = $(LAUNCH) nanochat_gka.eval_core --out $(BASE)/core $(if $(BUNDLE),--bundle '$(BUNDLE)')
BASE_RUN    = $(if $(filter file default undefined,$(origin RUN)),$(BASE)/runs/d$(DEPTH)-softmax,$(RUN))

# train-deit-SIZE-KIND: ti, s or b; gka, vlt or base (softmax). MODEL= takes the place of the name they make.
SIZE_ti    := tiny
SIZE_s     := small
SIZE_b     := base
SIZE_OF     = $(SIZE_$(word 1,$(subst -, ,$*)))
KIND        = $(word 2,$(subst -, ,$*))
DEIT        = deit_$(SIZE_OF)$(if $(filter base,$(KIND)),,_$(KIND))_patch16_224
DEIT_RUN    = $(if $(filter file default undefined,$(origin RUN)),$(BASE)/runs/$(or $(MODEL),deit_tiny_gka_patch16_224),$(RUN))
TRAIN_DEIT  = $(LAUNCH) deit_gka.train --data '$(DATA)' --out $(BASE)/runs --results $(BASE)/results.jsonl --wandb $(WANDB_MODE)

.PHONY: help setup demo test test-gpu lint bench data tokenizer tokenize pretrain-d20 pretrain-d20-base eval-bpb eval-bpb-base eval-core eval-core-base sample \
        export train-deit-ti train-deit-s train-deit-b ablate-projections eval-deit vendor diff unpatch test-patches check-gpu check-images \
        clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  NGPU=$(NGPU) processes, DEPTH=$(DEPTH) layers (the demo has 4), CORPUS=$(CORPUS) (fineweb, builtin or a folder of parquet files),"
	@echo "  SHARDS=$(SHARDS), VOCAB=$(VOCAB), SEQ=$(SEQ), BASE=$(BASE) (outputs), WANDB_MODE=$(WANDB_MODE) (offline, online),"
	@echo "  ARGS='flags for the command of the target', RUN=$(RUN) (what eval-bpb, eval-core, sample and export take; eval-deit takes MODEL's),"
	@echo "  DATA=folder of images with train/ and val/ (or hf:NAME, hf-stream:NAME, wds:FOLDER, digits), MODEL=any timm name"

setup: $(READY)  ## create .venv and install everything (the other targets do it once by themselves)

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "error: Python 3.10 or newer is needed; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(READY)  ## train language models on real text and vision transformers on digits, GKA beside softmax, minutes on a CPU
	$(PY) -m runs.demo --out $(BASE)/demo $(if $(filter file,$(origin NGPU)),,$(if $(RANKS),--ranks $(RANKS))) $(if $(filter file,$(origin DEPTH)),,--depth $(DEPTH)) --wandb $(WANDB_MODE) $(ARGS)

test: $(READY)  ## run the tests (no GPU, no network)
	$(PY) -m pytest -n auto --dist loadfile $(ARGS)

test-gpu: $(READY)  ## run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)

lint: $(READY)  ## ruff: errors and formatting; mypy: the types of gka
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# ARGS goes to all four: --quick, --device-type cpu, --results FOLDER. Each also runs alone, with more flags (--help).
bench: $(READY)  ## time attention, DeiT and GPT, GKA beside softmax, on the GPU or else the CPU (2 1/2 minutes on 2 cores): tables, targets, pictures
	$(PY) -m runs.bench.attention $(ARGS)
	$(PY) -m runs.bench.deit $(ARGS)
	$(PY) -m runs.bench.gpt $(ARGS)
	$(PY) -m runs.bench.report $(ARGS)

data: $(DOCUMENTS)  ## fetch or write the corpus: FineWeb-Edu shards, or CORPUS=builtin

# Shards are fetched once, to corpus/fineweb; the first SHARDS of them are linked where just these are read.
$(BASE)/corpus/fineweb-$(SHARDS)/.complete: | $(READY)
	$(PY) -m nanochat_gka.corpus --source fineweb --out $(BASE)/corpus/fineweb --num-shards $(SHARDS) $(call args_of,data)
	@mkdir -p $(@D)
	@for shard in $$(ls $(BASE)/corpus/fineweb/shard_*.parquet | head -n $(SHARDS)); do ln -f $$shard $(@D)/; done
	@touch $@

ifeq ($(PREPARED),)
$(CORPUS_DIR):
	@echo 'error: CORPUS=$(CORPUS) is neither fineweb nor builtin nor a folder' >&2; exit 2
endif

$(BASE)/corpus/builtin/.complete: | $(READY)
	$(PY) -m nanochat_gka.corpus --source builtin --out $(BASE)/corpus/builtin $(call args_of,data)
	@touch $@

tokenizer: $(TOKENIZER)/tokenizer.json  ## train the BPE tokenizer (VOCAB tokens)

$(TOKENIZER)/tokenizer.json: | $(READY) $(DOCUMENTS)
	$(PY) -m nanochat_gka.tokenizer --corpus $(CORPUS_DIR) --vocab-size $(VOCAB) --out $(TOKENIZER) $(call args_of,tokenizer)

tokenize: $(PACKED)/manifest.json  ## tokenise and pack the corpus into rows of SEQ tokens, in parallel

$(PACKED)/manifest.json: | $(TOKENIZER)/tokenizer.json
	$(PY) -m nanochat_gka.pack --corpus $(CORPUS_DIR) --tokenizer $(TOKENIZER) --sequence-len $(SEQ) --out $(PACKED) $(call args_of,tokenize)

pretrain-d20: check-gpu $(PACKED)/manifest.json  ## the paper's GKA run: depth 20, 2.8e9 tokens (DEPTH=... for other sizes)
	$(TRAIN) --attention gka --target-param-data-ratio 8.25 $(ARGS)

pretrain-d20-base: check-gpu $(PACKED)/manifest.json  ## the paper's softmax baseline: depth 20, 4.6e9 tokens
	$(TRAIN) --attention softmax --target-param-data-ratio 10.5 $(ARGS)

eval-bpb: | $(READY)  ## bits per byte and samples of a run (RUN=folder), on its own data
	$(EVAL_BPB) --run $(RUN) $(ARGS)

eval-bpb-base: | $(READY)  ## the same of the softmax baseline
	$(EVAL_BPB) --run $(BASE_RUN) $(ARGS)

eval-core: | $(READY)  ## DCLM's CORE of a run (RUN=folder, BUNDLE=folder or zip; else it is fetched), beside the paper's and GPT-2's
	$(EVAL_CORE) --run $(RUN) $(ARGS)

eval-core-base: | $(READY)  ## the same of the softmax baseline
	$(EVAL_CORE) --run $(BASE_RUN) $(ARGS)

sample: | $(READY)  ## text from a run (RUN=folder, PROMPT='...')
	$(PY) -m nanochat_gka.generate --run $(RUN) --prompt '$(subst ','\'',$(PROMPT))' --stream $(ARGS)

export: | $(READY)  ## a run as a folder of its own, RUN-export: safetensors, configuration, tokenizer, README
	$(PY) -m nanochat_gka.export --run $(RUN) --out $(RUN)-export $(ARGS)

train-deit-ti: train-deit-ti-gka  ## the paper's GKA-Ti, 300 epochs on DATA (train-deit-ti-base is softmax, train-deit-ti-vlt VLT)

train-deit-s: train-deit-s-gka  ## GKA-S (-base, -vlt)

train-deit-b: train-deit-b-gka  ## GKA-B (-base, -vlt)

# The softmax and VLT twins.
train-deit-ti-base:
train-deit-ti-vlt:
train-deit-s-base:
train-deit-s-vlt:
train-deit-b-base:
train-deit-b-vlt:

train-deit-%: check-images | $(READY)
	$(if $(and $(SIZE_OF),$(filter gka vlt base,$(KIND))),,@echo 'error: there is train-deit-{ti,s,b}-{gka,vlt,base}, not $@' >&2; exit 2)
	$(TRAIN_DEIT) --model $(or $(MODEL),$(DEIT)) $(ARGS)

ablate-projections: check-images | $(READY)  ## the paper's ablation: softmax, VLT and GKA at size Ti on DATA, and its table
	$(TRAIN_DEIT) --model deit_tiny_patch16_224 $(ARGS)
	$(TRAIN_DEIT) --model deit_tiny_vlt_patch16_224 $(ARGS)
	$(TRAIN_DEIT) --model deit_tiny_gka_patch16_224 $(ARGS)
	$(PY) -m runs.paper.ablation --runs $(BASE)/runs

eval-deit: | $(READY)  ## top-1 and top-5 of a vision run (MODEL=name or RUN=folder) on its own images, or DATA
	$(LAUNCH) deit_gka.evaluate --run $(DEIT_RUN) $(if $(DATA),--data '$(DATA)') --results $(BASE)/results.jsonl $(ARGS)

vendor:  ## clone upstream nanochat and DeiT into vendor/ at the commits of patches/ (or take NANOCHAT_SRC, DEIT_SRC)
	@$(PYTHON) patches/apply.py vendor

diff: vendor  ## patch them there, and show what GKA changes in each
	@$(PYTHON) patches/apply.py apply
	@$(PYTHON) patches/apply.py diff

unpatch:  ## take the patches out of vendor/ again
	@$(PYTHON) patches/apply.py reverse

test-patches: $(READY) $(if $(NANOCHAT_SRC)$(wildcard vendor/nanochat),$(VENV)/.patches)  ## test the patches on the upstreams of "make vendor" (2 minutes on 2 cores)
	$(PY) -m pytest -rs -m 'upstream or not upstream' tests/patches $(ARGS)

$(VENV)/.patches: patches/requirements.txt | $(READY)
	-$(PY) -m pip install --quiet --disable-pip-version-check -r $< && touch $@

# Learns digits in a minute or two: a small model, without the augmentation that large ones need.
SMALL_RUN  := --device-type cpu --input-size 32 --model-kwargs embed_dim=64 depth=2 num_heads=2 \
              --epochs 40 --batch-size 16 --lr 0.2 \
              --repeated-aug 1 --mixup 0 --cutmix 0 --aa= --reprob 0 \
              --hflip 0 --scale 0.8 1 --model-ema-decay 0.99 --eval-every 5
GIVE_DATA  := Give DATA=folder with train/ and val/ (ImageNet as class folders, or webdataset tars) or DATA=hf:ILSVRC/imagenet-1k (after "hf auth login")
HAS_DEVICE := $(ON_CPU)$(filter-out 0,$(GPUS))

check-images:
	$(if $(DATA),,@echo 'error: no images$(if $(HAS_DEVICE),, and no GPU). $(GIVE_DATA), or run "make demo", which needs neither' >&2; exit 2)
	$(if $(HAS_DEVICE),,@echo 'error: no GPU is visible, and 300 epochs would take years without one. Run "make demo", or try the command small: DATA=digits BASE=out/small ARGS="$(SMALL_RUN)"' >&2; exit 2)

check-gpu:
	$(if $(HAS_DEVICE),,@echo 'error: no GPU is visible, and a depth-$(DEPTH) run would take years without one.' \
	  'Run "make demo", or try the same chain small:' \
	  'make pretrain-d20 DEPTH=4 CORPUS=builtin VOCAB=4096 SEQ=256 ARGS="--device-type cpu --num-iterations 100 --total-batch-size 8192"' >&2; exit 2)

clean:  ## delete the environment, keep the outputs
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .hypothesis
