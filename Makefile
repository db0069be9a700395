# Gaussian Kernel Attention. `make help` lists targets and settings, `make -n TARGET` shows the commands of a target.
# It needs GNU make 4.0 or newer. Paths may have spaces; quotes and $ may be in PROMPT, TEXT and ARGS alone.

## Settings, as NAME=value
##   BASE=out                   folder of all outputs
##   CORPUS=fineweb             or builtin, or a file or folder of .txt, .md, .jsonl, .json, .parquet
##                              (default of pretrain-small and study: builtin)
##   COLUMN=text                the column or field of your own files that is the text
##   SHARDS=170                 number of FineWeb-Edu shards to download (100 MB each)
##   VOCAB=32768                tokens in the vocabulary (default of pretrain-small and study: 4096)
##   SEQ=2048                   tokens in a row (default of pretrain-small and study: 512)
##   DEPTH=20                   layers of a language model (default of demo and pretrain-small: 4)
##   NGPU=number                processes; default: one for each visible GPU
##   NNODES=1 RDZV=host:port    number of machines with NGPU processes each, and the address where they meet
##   RESTARTS=0                 how many times a crashed training is restarted
##   RUN=folder                 the run to evaluate, sample, export or draw; default: BASE/runs/dDEPTH-gka, for -base
##                              targets BASE/runs/dDEPTH-softmax, for figures the demo's runs, for report all
##   DATA=folder                images in train/ and val/; or hf:NAME, hf-stream:NAME, wds:FOLDER, digits, cifar10
##   MODEL=name                 any model of timm, in place of the target's default
##   IMAGE=file TEXT='...'      the image and the text that figures and report draw
##   PROMPT='The'               the text that sample continues
##   BUNDLE=folder              CORE's data, as a folder or a zip file, in place of a download
##   WANDB_MODE=disabled        Weights & Biases: disabled, offline or online
##   ARGS='flags'               extra flags for the commands of the targets you name; --dry-run prints the steps, disk
##                              space and hours of a training
##   PYTHON=python3             the interpreter that creates .venv
##   ENV_PYTHON=python          the interpreter of your own environment: no .venv is created, nothing is installed
##   NANOCHAT_SRC, DEIT_SRC     local sources that vendor uses in place of a download

SETTINGS := BASE CORPUS COLUMN SHARDS VOCAB SEQ DEPTH NGPU NNODES RDZV RESTARTS RUN MODEL DATA IMAGE TEXT ARGS \
            PROMPT BUNDLE WANDB_MODE PYTHON ENV_PYTHON NANOCHAT_SRC DEIT_SRC
CHOSEN   := $(foreach name,$(SETTINGS),$(if $(value $(name)),$(name)))
# An empty setting counts as none. In these texts nothing is expanded, neither by make nor by a shell.
$(foreach name,$(filter-out $(CHOSEN),$(SETTINGS)),$(eval override undefine $(name)))
$(foreach name,$(filter ARGS PROMPT TEXT,$(CHOSEN)),$(eval override $(name) := $$(value $(name))))
PATHS    := $(filter BASE CORPUS RUN DATA IMAGE BUNDLE ENV_PYTHON,$(CHOSEN))
$(foreach name,$(PATHS),$(eval override $(name) := $$(subst ~/,$(HOME)/,$$($(name)))))
SPACE    := $(subst ,, )
GOALS    := $(MAKECMDGOALS)

# The small language models: text that needs no network, short rows. pretrain-small has four rows a step.
ifneq (,$(filter study pretrain-small,$(GOALS)))
CORPUS     ?= builtin
VOCAB      ?= 4096
SEQ        ?= 512
endif
ifneq (,$(filter pretrain-small,$(GOALS)))
DEPTH      ?= 4
endif
ifneq (,$(filter pretrain-small train-small,$(GOALS)))
NGPU       ?= 1
endif
BASE       ?= out
CORPUS     ?= fineweb
SHARDS     ?= 170
VOCAB      ?= 32768
SEQ        ?= 2048
DEPTH      ?= 20
NGPU       ?= $(eval NGPU := $(shell PYTHONSAFEPATH= $(PYTHON) -m trainkit_gka.gpus))$(NGPU)
NNODES     ?= 1
RESTARTS   ?= 0
PROMPT     ?= The
WANDB_MODE ?= disabled
PYTHON     ?= python3
export PROMPT $(CHOSEN)
export PYTHONSAFEPATH :=

# ARGS are for the targets that are named, not for the steps that these need.
FLAGS     = $(if $(filter $@,$(GOALS)),$(ARGS))
DRY_RUN  := $(filter --dry-run --dry_run,$(ARGS))
# A command in the environment, and one in as many processes as there are GPUs.
ENV      := $(if $(ENV_PYTHON),,.venv/.installed)
PY       := $(if $(ENV_PYTHON),'$(ENV_PYTHON)',.venv/bin/python)
RANKS     = $(or $(filter-out 0,$(NGPU)),1)
NODES     = --nnodes $(NNODES) --rdzv-backend c10d --rdzv-id gka --rdzv-endpoint $(RDZV)
TORCHRUN  = trainkit_gka.torchrun $(if $(filter-out 1,$(NNODES)),$(NODES),--standalone) \
            $(if $(filter-out 0,$(RESTARTS)),--max-restarts $(RESTARTS)) --nproc-per-node $(RANKS) -m --
LAUNCH    = $(PY) -m $(if $(filter-out 1,$(NNODES) $(RANKS))$(filter-out 0,$(RESTARTS)),$(TORCHRUN))

# Folders of the corpus that is chosen: documents, their tokenizer, and rows of tokens.
FIXED    := fixed
ifeq "$(CORPUS)" "fineweb"
NAME     := fineweb-$(SHARDS)
FETCH    := --num-shards $(SHARDS) --downloads '$(BASE)/corpus/fineweb'
else ifeq "$(CORPUS)" "builtin"
NAME     := builtin
FETCH    :=
else
FIXED    :=
NAME     := $(subst |,$(SPACE),$(notdir $(abspath $(subst $(SPACE),|,$(CORPUS)))))
FETCH    := $(if $(COLUMN),--text-column '$(COLUMN)')
endif
DOCUMENTS = $(BASE)/corpus/$(NAME)
TOKENIZER = $(BASE)/tokenizer/$(NAME)-$(VOCAB)
PACKED    = $(BASE)/packed/$(NAME)-$(VOCAB)-$(SEQ)$(UNSPLIT)
# In the rows of the study's results no document goes on in another row. Those of FineWeb-Edu never do.
UNSPLIT  := $(if $(filter study,$(GOALS)),$(if $(filter-out fineweb,$(CORPUS)),-whole))
# Trainings on a fixed corpus whose rows are packed need neither its tokenizer nor its documents: both may be deleted.
FINISHED := $(if $(FIXED),$(wildcard $(subst $(SPACE),\ ,$(PACKED))/manifest.json))
ROWS     := $(if $(DRY_RUN)$(FINISHED),,tokenize)

PLACES    = --out '$(BASE)/runs' --results '$(BASE)/results.jsonl' --wandb $(WANDB_MODE)
TRAIN_GPT = $(LAUNCH) nanochat_gka.train --data '$(PACKED)' $(PLACES) --depth $(DEPTH)
TRAIN_VIT = $(LAUNCH) deit_gka.train --data '$(DATA)' $(PLACES)
GKA_RUN   = $(or $(RUN),$(BASE)/runs/d$(DEPTH)-gka)
BASE_RUN  = $(or $(RUN),$(BASE)/runs/d$(DEPTH)-softmax)
# The form of GKA that runs/study recommends.
PRESET    = --attention gka --head-offsets PS --gka-values unrotated --value-embeds every-second --channel-bandwidths \
            --channel-lr 0.08 --head-gates --gate-lr 0.005

# A signal to make reaches its child: bash lets the command take its place, other shells wait beside it.
SHELL     := bash
MAKEFLAGS += --no-builtin-rules
.NOTPARALLEL:
.PHONY: $(shell sed -n 's/^\([a-z][a-z0-9 -]*\):.*/\1/p' Makefile)

## Start
help:  ## list targets and settings
	@sed -n -e 's/^## //p' -e 's/^\([a-z][a-z0-9 -]*\):.*  ## \(.*\)/  \1\t\2/p' Makefile | expand -t 27

setup: $(ENV)  ## create .venv; other targets do it when it is missing
	@$(if $(ENV_PYTHON),echo 'error: install in your own environment: $(PY) -m pip install -e ".[dev]"' >&2; exit 2)

.venv/.installed: requirements.txt pyproject.toml
	$(PYTHON) -m runs.check setup
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch .venv/.installed

clean:  ## delete .venv and caches
	rm -rf .venv *.egg-info .pytest_cache .ruff_cache .hypothesis

demo: $(ENV)  ## train small models, GKA beside softmax, in about 5 minutes on a CPU
	$(PY) -m runs.demo --out '$(BASE)/demo' $(if $(filter NGPU,$(CHOSEN)),--ranks $(RANKS)) \
	  $(if $(filter DEPTH,$(CHOSEN)),--depth $(DEPTH)) --wandb $(WANDB_MODE) $(FLAGS)

test: $(ENV)  ## run the tests that need no GPU and no network
	$(PY) -m pytest -n auto --dist loadfile $(FLAGS)

test-gpu: $(ENV)  ## run the tests that need a GPU
	$(PY) -m pytest -m gpu $(FLAGS)

lint: $(ENV)  ## run ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Settings and hardware with which a target cannot run are refused before anything is fetched or computed.
check:
	@$(PYTHON) -m runs.check $(GOALS)

## Language models
data: check $(ENV)  ## prepare the documents of CORPUS
	$(PY) -m nanochat_gka.corpus --source '$(CORPUS)' --out '$(DOCUMENTS)' $(FETCH) $(FLAGS)

tokenizer: check $(ENV) $(if $(DRY_RUN),,data)  ## train a tokenizer on these documents
	$(PY) -m nanochat_gka.tokenizer --corpus '$(DOCUMENTS)' --vocab-size $(VOCAB) --out '$(TOKENIZER)' $(FLAGS)

tokenize: check $(ENV) $(if $(DRY_RUN),,tokenizer)  ## pack these documents into rows of SEQ tokens
	$(PY) -m nanochat_gka.pack --corpus '$(DOCUMENTS)' --tokenizer '$(TOKENIZER)' --sequence-len $(SEQ) \
	  $(if $(UNSPLIT),--split-documents no) --out '$(PACKED)' $(FLAGS)

# The paper's GKA language model: tables 6 (bits per byte), 7 (CORE) and 8 (size and compute), section 5.
# Trains:    378,798,320 parameters on 2,778,726,400 tokens of FineWeb-Edu, 2,650 steps, 6.709e18 FLOPs
# Hours:     3.2 on 7 RTX 5090, an estimate from FLOPs alone, at 40 % of 209.5 TFLOP/s each; not measured
# Expected:  validation 0.819080 bits per byte, training 0.818256; mean of six CORE tasks 0.2286; not run here yet
pretrain-d20: check $(ENV) $(ROWS)  ## train the paper's GKA: depth 20, 2.8e9 tokens
	$(TRAIN_GPT) --attention gka --target-param-data-ratio 8.25 $(FLAGS)

# The paper's softmax baseline. Its budget is not GKA's: 10.5 tokens for each scaling parameter, GKA has 8.25.
# Trains:    896,535,720 parameters on 4,568,645,632 tokens of FineWeb-Edu, 4,357 steps, 1.373e19 FLOPs
# Hours:     6.5 on 7 RTX 5090, an estimate as above
# Expected:  validation 0.7884 bits per byte, training 0.7800; mean of six CORE tasks 0.2418; not run here yet
pretrain-d20-base: check $(ENV) $(ROWS)  ## train the paper's softmax baseline: depth 20, 4.6e9 tokens
	$(TRAIN_GPT) --attention softmax --target-param-data-ratio 10.5 $(FLAGS)

# The preset at the paper's FLOPs. It is not the paper's form: it has head offsets, values that are not rotated, a
# bandwidth for every channel, a gate for every head, and value embeddings in half of the layers, as softmax has them.
# These are half of its parameters and cost no FLOPs; --value-embeds none leaves 379,079,920 and loses some quality.
# Trains:    798,513,520 parameters on 2,780,823,552 tokens of FineWeb-Edu, 6.719e18 FLOPs
# Hours:     3.2 on 7 RTX 5090, an estimate as above
# Expected:  fewer bits per byte than the paper's form, by runs/study/README.md; not run here yet
# Then:      make eval-bpb eval-core RUN=out/runs/d20-preset
pretrain-d20-best: check $(ENV) $(ROWS)  ## train the preset: depth 20, as many FLOPs as the paper's GKA
	$(TRAIN_GPT) --target-param-data-ratio 8.25 $(PRESET) $(FLAGS)

# The preset with four layers, as the study trains it. The rates are nanochat's own at 2,048 tokens a step,
# where its rule for other batches would divide them by 16.
# Trains:    6,559,000 parameters on 1,048,576 tokens, in rows of 512 tokens of a vocabulary of 4,096
# Minutes:   3 on two cores of a server, in float32
# Expected:  1.73 bits per byte on the study's text; 1.55 with ARGS="--num-iterations 2048"
# Then:      make sample RUN=out/runs/d4-preset
pretrain-small: check $(ENV) $(ROWS)  ## train the preset with 4 layers, in minutes on a CPU (CORPUS=folder)
	$(TRAIN_GPT) $(PRESET) --head-dim 64 --window-pattern L --num-iterations 512 --total-batch-size 2048 \
	  --lr-batch-size 2048 --eval-every 128 --eval-tokens 131072 --save-every 128 $(FLAGS)

# A run is evaluated on the rows that it was trained on, unless others are named.
NAMED_ROWS = $(if $(filter CORPUS SHARDS VOCAB SEQ,$(CHOSEN)),--data '$(PACKED)')
EVALUATED  = $(if $(filter %-base,$@),$(BASE_RUN),$(GKA_RUN))
eval-bpb:  ## compute bits per byte of a GKA run and generate samples (-base: of a softmax run)
eval-bpb eval-bpb-base: check $(ENV)
	$(LAUNCH) nanochat_gka.evaluate --results '$(BASE)/results.jsonl' $(NAMED_ROWS) --run '$(EVALUATED)' $(FLAGS)

# Table 7 (six tasks of DCLM's 22, centred): ARGS="--tasks paper" scores these alone. The data, 162 MB, is fetched once.
# Expected:  mean of the six 0.2418 for the baseline, all examples; 0.2286 for GKA, 200 of each task; not run here yet
eval-core:  ## score a GKA run on DCLM's CORE tasks (-base: a softmax run)
eval-core eval-core-base: check $(ENV)
	$(LAUNCH) nanochat_gka.eval_core --out '$(BASE)/core' $(if $(BUNDLE),--bundle '$(BUNDLE)') \
	  --run '$(EVALUATED)' $(FLAGS)

sample: $(ENV)  ## generate text with a run
	$(PY) -m nanochat_gka.generate --run '$(GKA_RUN)' --prompt="$$PROMPT" --stream $(FLAGS)

export: $(ENV)  ## write a run as a folder that transformers loads, RUN-export
	$(PY) -m nanochat_gka.export --run '$(GKA_RUN)' --out '$(GKA_RUN:/=)-export' $(FLAGS)

## Vision models
# The paper's vision models: tables 2 (accuracy) and 3 (size), sections 4.2 and 4.3; ImageNet, 300 epochs.
# Hours:     on 7 RTX 5090 of 32 GB, an estimate from table 4's throughput at 128 images each:
#            softmax  ti 4.6,  s 5.3,  b 13.4
#            GKA      ti 7.8,  s 14.4, b 31.5 (the paper's implementation)
# Expected:  EMA top-1, as printed; none has been run here yet
#            softmax  ti 72.2,  s 79.8,  b 81.8 (DeiT's own figures, without EMA)
#            VLT      ti 73.5
#            GKA      ti 71.54, s 78.23, b 80.3
train-deit-ti train-deit-ti-base train-deit-ti-vlt:   VIT_SIZE = tiny
train-deit-s train-deit-s-base train-deit-s-vlt:      VIT_SIZE = small
train-deit-b train-deit-b-base train-deit-b-vlt:      VIT_SIZE = base
train-deit-ti train-deit-s train-deit-b:              VIT_KIND = _gka
train-deit-ti-vlt train-deit-s-vlt train-deit-b-vlt:  VIT_KIND = _vlt
train-deit-ti:  ## train GKA-Ti on DATA; also -s and -b, and with -base (softmax) or -vlt (no W_V) after each
$(addprefix train-deit-,ti s b ti-base s-base b-base ti-vlt s-vlt b-vlt): check $(ENV)
	$(TRAIN_VIT) --model $(or $(MODEL),deit_$(VIT_SIZE)$(VIT_KIND)_patch16_224) $(FLAGS)

# The study's recipe for CIFAR-10, with spatial offsets: the preset for images, with the four heads that it
# needs. The input size is that of the images, and a patch an eighth of it.
# Trains:    515,650 parameters on CIFAR-10: 8 epochs, 3,120 updates
# Minutes:   2 an epoch on one core of a server, with ARGS="--amp bfloat16" (the study's 360 to 580 images/s)
# Expected:  67.1 % top-1 of the averaged weights, the study's mean of five seeds
# Then:      make eval-deit RUN=out/runs/small-cifar10
SMALL_RUN = small-$(subst |,$(SPACE),$(notdir $(abspath $(subst :,/,$(subst $(SPACE),|,$(DATA))))))
train-small: check $(ENV)  ## train a small GKA on DATA, in minutes an epoch on a CPU (DATA=folder, hf:NAME, cifar10)
	$(TRAIN_VIT) --model $(or $(MODEL),deit_tiny_gka_patch16_224) --model-tag '$(SMALL_RUN)' --input-size -1 \
	  --patch-size -1 --model-kwargs embed_dim=96 depth=6 num_heads=4 spatial_offsets=LRUB --epochs 8 \
	  --batch-size 128 --lr 0.016 --warmup-epochs 1 --model-ema-decay 0.998 --drop-path 0 --repeated-aug 1 \
	  --mixup 0 --cutmix 0 --aa= --reprob 0 --scale 0.6 1 --crop-pct 1 $(FLAGS)

eval-deit: check $(ENV)  ## compute top-1 and top-5 of a run on its validation images, or on DATA
	$(LAUNCH) deit_gka.evaluate --run '$(or $(RUN),$(BASE)/runs/$(or $(MODEL),deit_tiny_gka_patch16_224))' \
	  $(if $(DATA),--data '$(DATA)') --results '$(BASE)/results.jsonl' $(FLAGS)

# The paper's ablation of projection matrices: table 5, section 4.4; size Ti on ImageNet, 300 epochs for every model.
# Hours:     about 24 on 7 RTX 5090 of 32 GB, an estimate: 4.6 softmax and as much VLT, 7.8 GKA, 7 the hybrid
# Expected:  top-1 72.2 softmax (Q K V O), 73.5 VLT (Q K O), 71.54 GKA (O); not run here yet
# The last model is ours: GKA in three layers of four and softmax in the fourth, which the paper leaves to later work.
ablate-projections: check $(ENV)  ## train softmax, VLT and GKA at size Ti, the paper's ablation, and a hybrid of ours
	$(TRAIN_VIT) --model deit_tiny_patch16_224 $(FLAGS)
	$(TRAIN_VIT) --model deit_tiny_vlt_patch16_224 $(FLAGS)
	$(TRAIN_VIT) --model deit_tiny_gka_patch16_224 $(FLAGS)
	$(TRAIN_VIT) --model deit_tiny_gka_patch16_224 --attention GGGA $(FLAGS)
	$(if $(DRY_RUN),,$(PY) -m runs.tables --base '$(BASE)' --only 5)

## Results
bench: $(ENV)  ## time attention, DeiT and GPT, on the GPU or else the CPU
	$(PY) -m runs.bench.attention $(FLAGS)
	$(PY) -m runs.bench.deit $(FLAGS)
	$(PY) -m runs.bench.gpt $(FLAGS)
	$(PY) -m runs.bench.report $(FLAGS)

# Elsewhere: make gpu ENV_PYTHON=python3, or python3 -m runs.gpu, in a copy of this tree (runs/README.md).
gpu: $(ENV)  ## measure a GPU in ten minutes: kernels, training steps, models (ARGS=--dry-run lists the steps)
	$(PY) -m runs.gpu --base '$(BASE)' $(FLAGS)

# Which figures there are to draw: of the model that RUN, MODEL, IMAGE or TEXT names, else of the demo's of both kinds.
IS_TEXT = $(shell grep -lsE '"model_config"|"gka-gpt"' '$(RUN)/config.json' '$(RUN)/state.json' \
            '$(RUN)'/checkpoints/*/state.json)
DEMO    = vision $(if $(wildcard $(subst $(SPACE),\ ,$(BASE))/demo/runs/d*-gka-paper-*),language)
DRAWN   = $(if $(RUN),$(if $(IS_TEXT),language,vision),$(if $(MODEL)$(IMAGE),vision,$(if $(TEXT),language,$(DEMO))))
PICTURE = $(if $(IMAGE),--image '$(IMAGE)') $(if $(TEXT),--text="$$TEXT")
WHOSE   = --demo '$(BASE)/demo' $(if $(RUN),--run '$(RUN)') $(if $(MODEL),--model $(MODEL)) $(PICTURE)
figures: $(ENV)  ## draw the paper's figures for RUN, MODEL or the demo (IMAGE=file, TEXT=...)
	$(if $(filter vision,$(DRAWN)),$(PY) -m deit_gka.draw --out '$(BASE)/figures' $(WHOSE) $(FLAGS))
	$(if $(filter language,$(DRAWN)),$(PY) -m nanochat_gka.draw --out '$(BASE)/figures' $(WHOSE) $(FLAGS))

tables: $(ENV)  ## print the paper's tables beside ours
	$(PY) -m runs.tables --base '$(BASE)' $(FLAGS)

claims:  ## print the paper's claims, each with a verdict and its evidence
	@cat docs/claims.md

report: $(ENV)  ## write runs, tables, curves and pictures as one HTML page (RUN=folder, else all runs of BASE)
	$(PY) -m runs.report --base '$(BASE)' $(if $(RUN),--run '$(RUN)') $(PICTURE) $(FLAGS)

study: check $(ENV) $(ROWS)  ## train the study's remaining runs (ARGS=--list shows them)
	$(PY) -m runs.study.train --data '$(PACKED)' --runs '$(BASE)/study' --results '$(BASE)/study' $(FLAGS)

PAGES = *.md docs gka nanochat_gka deit_gka trainkit_gka runs patches tests CITATION.cff LICENSE Makefile
site: $(ENV)  ## build these pages as a site with search, in out/site
	rm -rf out/site-source && mkdir -p out/site-source
	git ls-files -z -- $(PAGES) | xargs -0 cp --parents --target-directory out/site-source
	$(PY) -m mkdocs build --strict $(FLAGS)

## Patches for upstream nanochat and DeiT
vendor:  ## clone nanochat and DeiT into vendor/
	$(PYTHON) patches/apply.py vendor

diff: vendor  ## apply the patches to the clones and show the difference
	$(PYTHON) patches/apply.py apply
	$(PYTHON) patches/apply.py diff

unpatch:  ## remove the patches from the clones
	$(PYTHON) patches/apply.py reverse

.venv/.patches: patches/requirements.txt .venv/.installed
	-.venv/bin/python -m pip install --quiet -r patches/requirements.txt && touch .venv/.patches

UPSTREAM := $(and $(ENV),$(or $(NANOCHAT_SRC),$(wildcard vendor/nanochat)))
test-patches: $(ENV) $(if $(UPSTREAM),.venv/.patches)  ## test the patches on the clones
	$(PY) -m pytest -rs -m 'upstream or not upstream' tests/patches $(FLAGS)
