# Gaussian Kernel Attention: every command of the READMEs. `make help` lists them, `make -n TARGET` shows what one runs.
# Settings are NAME=value; the names, paths and launchers made from them come from runs/names.py.

PYTHON     ?= python3
PY         := .venv/bin/python
READY      := .venv/.installed
BASE       ?= out
WANDB_MODE ?= disabled
SETTINGS   := BASE CORPUS COLUMN SHARDS VOCAB SEQ DEPTH NGPU NNODES RDZV RESTARTS RUN MODEL DATA IMAGE TEXT ARGS \
              PROMPT BUNDLE WANDB_MODE PYTHON NANOCHAT_SRC DEIT_SRC
# A setting is text, which nothing here expands: a $ in it is a $. Recipes take settings only as runs/names.py words
# them, quoted for the shell; $(space), $(tab) and $(hash) stand in its answer for what would end a word or a value.
$(foreach name,$(SETTINGS),$(eval override $(name) := $$(value $(name))))
export NANOCHAT_SRC DEIT_SRC
quoted     = '$(subst ','\'',$(1))'
ASKED      := $(foreach name,$(SETTINGS) MAKECMDGOALS,$(if $($(name)),$(name)=$(call quoted,$($(name)))))
space      := $(subst ,, )
tab        := $(subst ,,	)
hash       := \#
$(foreach word,$(shell $(call quoted,$(PYTHON)) -m runs.names make $(ASKED)),$(eval $(word)))
NAMES      = $(SYSTEM_PY) -m runs.names
$(if $(PROBLEM),$(error $(PROBLEM)))
$(if $(LAUNCH),,$(error no settings: see the line above, or set PYTHON=python3.x))
PIP        = $(PY) -m pip install --quiet --disable-pip-version-check
# ARGS, here FLAGS, goes to the target that was named, not to what it needs first.
args_of    = $(if $(filter $(1),$(MAKECMDGOALS)),$(FLAGS))
THE_RUN    = $(if $(findstring -base,$@),$(BASE_RUN),$(GKA_RUN))
PAPER      = --base $(OUTPUTS) $(PROCESSES)
.PHONY: help setup demo test test-gpu lint bench data tokenizer tokenize pretrain-d20 pretrain-d20-base \
        pretrain-d20-best eval-bpb eval-bpb-base eval-core eval-core-base sample export train-deit-ti train-deit-s \
        train-deit-b eval-deit ablate-projections figures tables claims report explore study vendor diff unpatch \
        test-patches clean
help:  ## list the targets
	@$(NAMES) help $(GIVEN)
setup: $(READY)  ## create .venv and install everything (the other targets do it once by themselves)
$(READY): requirements.txt pyproject.toml
	@$(NAMES) check-python
	$(SYSTEM_PY) -m venv .venv
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	@touch $@
demo: $(READY)  ## train small language and vision models, GKA beside softmax, in minutes on a CPU
	$(PY) -m runs.demo --out $(OUTPUTS)/demo $(DEMO_FLAGS) $(WANDB_FLAG) $(FLAGS)
test: $(READY)  ## run the tests (no GPU, no network)
	$(PY) -m pytest -n auto --dist loadfile $(FLAGS)
test-gpu: $(READY)  ## run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(FLAGS)
lint: $(READY)  ## ruff: errors and formatting; mypy: types
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
bench: $(READY)  ## time attention, DeiT and GPT, GKA beside softmax, on the GPU or else the CPU (ARGS goes to all five)
	$(PY) -m runs.bench.attention $(FLAGS) && $(PY) -m runs.bench.deit $(FLAGS)
	$(PY) -m runs.bench.gpt $(FLAGS) && $(PY) -m runs.bench.onnx $(FLAGS)
	$(PY) -m runs.bench.report $(FLAGS)

# The steps before training. $(PREPARED), $(TOKENIZER_STEP) and $(ROWS_STEP) name those that are still to be done; with
# ARGS a step looks at what is there. Files are no targets: their names may have spaces, colons and whatever else.
.PHONY: prepare-corpus own-corpus train-tokenizer pack-rows
data: $(PREPARED) $(OWN_CORPUS)  ## fetch or write the corpus: FineWeb-Edu shards, CORPUS=builtin, or your files
prepare-corpus: | $(READY)
	$(PY) -m nanochat_gka.corpus $(FETCH) $(call args_of,data)
	@$(NAMES) finish-corpus $(GIVEN)
# Your own files may change: each step looks at them every time, and starts anew or says what to do.
own-corpus: check-corpus | $(READY)
	$(if $(FETCH),$(PY) -m nanochat_gka.corpus $(FETCH) $(call args_of,data))
tokenizer: $(if $(FLAGS),train-tokenizer,$(TOKENIZER_STEP))  ## train the BPE tokenizer (VOCAB tokens)
train-tokenizer: | $(OWN_CORPUS) $(READY) $(PREPARED)
	$(PY) -m nanochat_gka.tokenizer $(READ_CORPUS) $(VOCAB_FLAG) --out $(TOKENIZER) $(call args_of,tokenizer)
tokenize: $(if $(FLAGS),pack-rows,$(ROWS_STEP))  ## tokenise and pack the corpus into rows of SEQ tokens, in parallel
pack-rows: | $(OWN_CORPUS) $(READY) $(PREPARED) $(TOKENIZER_STEP)
	$(PY) -m nanochat_gka.pack $(READ_CORPUS) --tokenizer $(TOKENIZER) $(SEQ_FLAG) --out $(PACKED) $(call args_of,tokenize)

pretrain-d20: check-gpu $(ROWS_STEP) | $(READY)  ## the paper's GKA run: depth 20, 2.8e9 tokens (DEPTH=...)
	$(PY) -m runs.paper.gpt_d20_gka --data $(PACKED) $(DEPTH_FLAG) $(PAPER) $(WANDB_FLAG) -- $(FLAGS)
pretrain-d20-base: check-gpu $(ROWS_STEP) | $(READY)  ## the paper's softmax baseline: depth 20, 4.6e9 tokens
	$(PY) -m runs.paper.gpt_d20_softmax --data $(PACKED) $(DEPTH_FLAG) $(PAPER) $(WANDB_FLAG) -- $(FLAGS)
pretrain-d20-best: check-gpu $(ROWS_STEP) | $(READY)  ## GKA with head offsets, at the same cost: the best of runs/study
	$(PY) -m runs.study.gpt_d20_best --data $(PACKED) $(DEPTH_FLAG) $(PAPER) $(WANDB_FLAG) -- $(FLAGS)
eval-bpb eval-bpb-base: | $(READY)  ## bits per byte and samples of a run (RUN=folder), on its own data
	$(LAUNCH) nanochat_gka.evaluate --results $(OUTPUTS)/results.jsonl $(ROWS) --run $(THE_RUN) $(FLAGS)
eval-core eval-core-base: | $(READY)  ## DCLM's CORE of a run (RUN=folder, BUNDLE=folder or zip, else it is fetched)
	$(PY) -m runs.paper.core --run $(THE_RUN) $(BUNDLE_FLAG) $(PAPER) -- $(FLAGS)
sample: | $(READY)  ## text from a run (RUN=folder, PROMPT='...')
	$(PY) -m nanochat_gka.generate --run $(GKA_RUN) $(PROMPT_FLAG) --stream $(FLAGS)
export: | $(READY)  ## a run as a folder of its own, RUN-export: safetensors, configuration, tokenizer, README
	$(PY) -m nanochat_gka.export --run $(GKA_RUN) --out $(EXPORTED) $(FLAGS)

train-deit-ti train-deit-s train-deit-b: %: %-gka  ## the paper's GKA on DATA (-ti-base is softmax, -ti-vlt VLT)
train-deit-%: check-images | $(READY)
	$(PY) -m runs.paper.deit $* $(DATA_FLAG) $(MODEL_FLAG) $(PAPER) $(WANDB_FLAG) -- $(FLAGS)
ablate-projections: check-images | $(READY)  ## the paper's ablation: every kind and a hybrid at size Ti on DATA
	$(PY) -m runs.paper.ablation --runs $(OUTPUTS)/runs $(DATA_FLAG) $(PAPER) $(WANDB_FLAG) -- $(FLAGS)
eval-deit: | $(READY)  ## top-1 and top-5 of a vision run (MODEL=name or RUN=folder) on its own images, or DATA
	$(LAUNCH) deit_gka.evaluate --run $(DEIT_RUN) $(DATA_FLAG) --results $(OUTPUTS)/results.jsonl $(FLAGS)
figures: check-figures | $(READY)  ## the paper's figures of RUN=folder or MODEL=name (IMAGE=file, TEXT=...) or the demo
	$(foreach draw,$(DRAW),$(PY) -m $(draw) $(DRAWN) $(MODEL_FLAG) $(SHOWN) $(FLAGS) &&) true
report: | $(READY)  ## all of it in one HTML page: runs, figures, tables, claims (RUN=folder, else all of BASE)
	$(PY) -m runs.report $(REPORTED) $(SHOWN) $(FLAGS)
explore: | $(READY)  ## a page in the browser: your image or text, scaled bandwidths (RUN=folder, else the demo's)
	$(PY) -m runs.explore $(EXPLORED) $(MODEL_FLAG) $(FLAGS)
tables claims: | $(READY)  ## the paper's tables beside ours (BASE=folder); its claims beside what was measured
	$(PY) -m runs.paper.$@ $(if $(filter tables,$@),--base $(OUTPUTS)) $(FLAGS)
study: $(ROWS_STEP) | $(READY)  ## train what is left of the controlled study (ARGS=--list shows it), builtin by default
	$(PY) -m runs.study --data $(PACKED) --runs $(OUTPUTS)/study $(FLAGS)
vendor:  ## clone upstream nanochat and DeiT into vendor/ at the commits of patches/ (or take NANOCHAT_SRC, DEIT_SRC)
	@$(SYSTEM_PY) patches/apply.py vendor
diff: vendor  ## patch them there, and show what GKA changes in each
	@$(SYSTEM_PY) patches/apply.py apply && $(SYSTEM_PY) patches/apply.py diff
unpatch:  ## take the patches out of vendor/ again
	@$(SYSTEM_PY) patches/apply.py reverse
test-patches: $(READY) $(if $(NANOCHAT_SRC)$(wildcard vendor/nanochat),.venv/.patches)  ## test the patches on vendor/
	$(PY) -m pytest -rs -m 'upstream or not upstream' tests/patches $(FLAGS)
.venv/.patches: patches/requirements.txt | $(READY)
	-$(PIP) -r $< && touch $@
check-gpu check-images check-figures check-corpus: ; @$(NAMES) $@ $(GIVEN)
clean:  ## delete the environment, keep the outputs
	rm -rf .venv *.egg-info .pytest_cache .ruff_cache .hypothesis
