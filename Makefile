# Gaussian Kernel Attention: every command of the READMEs. `make help` lists them, `make -n TARGET` shows what one runs.
# Settings are NAME=value; the names, paths and launchers made from them come from runs/names.py.

PYTHON     ?= python3
PY         := .venv/bin/python
READY      := .venv/.installed
BASE       ?= out
WANDB_MODE ?= disabled
quoted     = '$(subst ','\'',$(1))'
SETTINGS   := BASE CORPUS SHARDS VOCAB SEQ DEPTH NGPU NNODES RDZV RESTARTS RUN MODEL DATA IMAGE TEXT ARGS
STUDY      = $(if $(filter study,$(MAKECMDGOALS)),FOR=study)
GIVEN      = $(strip $(STUDY) $(foreach name,$(SETTINGS),$(if $($(name)),$(name)=$(call quoted,$($(name))))))
NAMES      = $(PYTHON) -m runs.names
$(foreach word,$(shell $(NAMES) make $(GIVEN)),$(eval $(subst |, ,$(word))))
$(if $(PROBLEM),$(error $(PROBLEM)))
$(if $(LAUNCH),,$(error no settings: see the line above, or set PYTHON=python3.x))
PIP        = $(PY) -m pip install --quiet --disable-pip-version-check
# ARGS goes to the target that was named, not to what it needs first.
args_of    = $(if $(filter $(1),$(MAKECMDGOALS)),$(ARGS))
THE_RUN    = $(if $(findstring -base,$@),$(BASE_RUN),$(GKA_RUN))
PAPER      = --base $(BASE) $(PROCESSES)
as_given   = $(if $(value $(1)),$(2) $(call quoted,$(value $(1))))# by value: a $ in a text is a $
SHOWN      = $(call as_given,IMAGE,--image) $(call as_given,TEXT,--text)
.PHONY: help setup demo test test-gpu lint bench data tokenizer tokenize pretrain-d20 pretrain-d20-base \
        pretrain-d20-best eval-bpb eval-bpb-base eval-core eval-core-base sample export train-deit-ti train-deit-s \
        train-deit-b eval-deit ablate-projections figures tables claims report explore study vendor diff unpatch \
        test-patches clean
help:  ## list the targets
	@$(NAMES) help $(GIVEN)
setup: $(READY)  ## create .venv and install everything (the other targets do it once by themselves)
$(READY): requirements.txt pyproject.toml
	@$(NAMES) check-python
	$(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	@touch $@
demo: $(READY)  ## train small language and vision models, GKA beside softmax, in minutes on a CPU
	$(PY) -m runs.demo --out $(BASE)/demo $(DEMO_FLAGS) --wandb $(WANDB_MODE) $(ARGS)
test: $(READY)  ## run the tests (no GPU, no network)
	$(PY) -m pytest -n auto --dist loadfile $(ARGS)
test-gpu: $(READY)  ## run the tests that need a CUDA device
	$(PY) -m pytest -m gpu $(ARGS)
lint: $(READY)  ## ruff: errors and formatting; mypy: types
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
bench: $(READY)  ## time attention, DeiT and GPT, GKA beside softmax, on the GPU or else the CPU (ARGS goes to all five)
	$(PY) -m runs.bench.attention $(ARGS) && $(PY) -m runs.bench.deit $(ARGS)
	$(PY) -m runs.bench.gpt $(ARGS) && $(PY) -m runs.bench.onnx $(ARGS)
	$(PY) -m runs.bench.report $(ARGS)

data: $(PREPARED) $(OWN_CORPUS)  ## fetch or write the corpus: FineWeb-Edu shards, or CORPUS=builtin
$(PREPARED): | $(READY)
	$(PY) -m nanochat_gka.corpus $(FETCH) $(call args_of,data)
	@$(NAMES) finish-corpus $(GIVEN)
$(OWN_CORPUS): ; @$(NAMES) check-corpus $(GIVEN)
tokenizer: $(TOKENIZER)/tokenizer.json  ## train the BPE tokenizer (VOCAB tokens)
$(TOKENIZER)/tokenizer.json: | $(OWN_CORPUS) $(READY) $(PREPARED)
	$(PY) -m nanochat_gka.tokenizer $(READ_CORPUS) $(VOCAB_FLAG) --out $(TOKENIZER) $(call args_of,tokenizer)
tokenize: $(PACKED)/manifest.json  ## tokenise and pack the corpus into rows of SEQ tokens, in parallel
$(PACKED)/manifest.json: | $(TOKENIZER)/tokenizer.json
	$(PY) -m nanochat_gka.pack $(READ_CORPUS) --tokenizer $(TOKENIZER) $(SEQ_FLAG) --out $(PACKED) $(call args_of,tokenize)

pretrain-d20: check-gpu $(PACKED)/manifest.json  ## the paper's GKA run: depth 20, 2.8e9 tokens (DEPTH=...)
	$(PY) -m runs.paper.gpt_d20_gka --data $(PACKED) $(DEPTH_FLAG) $(PAPER) --wandb $(WANDB_MODE) -- $(ARGS)
pretrain-d20-base: check-gpu $(PACKED)/manifest.json  ## the paper's softmax baseline: depth 20, 4.6e9 tokens
	$(PY) -m runs.paper.gpt_d20_softmax --data $(PACKED) $(DEPTH_FLAG) $(PAPER) --wandb $(WANDB_MODE) -- $(ARGS)
pretrain-d20-best: check-gpu $(PACKED)/manifest.json  ## GKA with head offsets, at the same cost: the best of runs/study
	$(PY) -m runs.study.gpt_d20_best --data $(PACKED) $(DEPTH_FLAG) $(PAPER) --wandb $(WANDB_MODE) -- $(ARGS)
eval-bpb eval-bpb-base: | $(READY)  ## bits per byte and samples of a run (RUN=folder), on its own data
	$(LAUNCH) nanochat_gka.evaluate --results $(BASE)/results.jsonl $(ROWS) --run $(THE_RUN) $(ARGS)
eval-core eval-core-base: | $(READY)  ## DCLM's CORE of a run (RUN=folder, BUNDLE=folder or zip, else it is fetched)
	$(PY) -m runs.paper.core --run $(THE_RUN) $(if $(BUNDLE),--bundle $(call quoted,$(BUNDLE))) $(PAPER) -- $(ARGS)
sample: | $(READY)  ## text from a run (RUN=folder, PROMPT='...')
	$(PY) -m nanochat_gka.generate --run $(GKA_RUN) --prompt $(call quoted,$(or $(value PROMPT),The)) --stream $(ARGS)
export: | $(READY)  ## a run as a folder of its own, RUN-export: safetensors, configuration, tokenizer, README
	$(PY) -m nanochat_gka.export --run $(GKA_RUN) --out $(GKA_RUN)-export $(ARGS)

train-deit-ti train-deit-s train-deit-b: %: %-gka  ## the paper's GKA on DATA (-ti-base is softmax, -ti-vlt VLT)
train-deit-%: check-images | $(READY)
	$(PY) -m runs.paper.deit $* --data '$(DATA)' $(MODEL_FLAG) $(PAPER) --wandb $(WANDB_MODE) -- $(ARGS)
ablate-projections: check-images | $(READY)  ## the paper's ablation: every kind and a hybrid at size Ti on DATA
	$(PY) -m runs.paper.ablation --runs $(BASE)/runs --data '$(DATA)' $(PAPER) --wandb $(WANDB_MODE) -- $(ARGS)
eval-deit: | $(READY)  ## top-1 and top-5 of a vision run (MODEL=name or RUN=folder) on its own images, or DATA
	$(LAUNCH) deit_gka.evaluate --run $(DEIT_RUN) $(if $(DATA),--data '$(DATA)') --results $(BASE)/results.jsonl $(ARGS)
figures: check-figures | $(READY)  ## the paper's figures of RUN=folder or MODEL=name (IMAGE=file, TEXT=...) or the demo
	$(foreach draw,$(DRAW),$(PY) -m $(draw) $(DRAWN) $(MODEL_FLAG) $(SHOWN) $(ARGS) &&) true
report: | $(READY)  ## all of it in one HTML page: runs, figures, tables, claims (RUN=folder, else all of BASE)
	$(PY) -m runs.report $(REPORTED) $(SHOWN) $(ARGS)
explore: | $(READY)  ## a page in the browser: your image or text, scaled bandwidths (RUN=folder, else the demo's)
	$(PY) -m runs.explore $(EXPLORED) $(MODEL_FLAG) $(ARGS)
tables claims: | $(READY)  ## the paper's tables beside ours (BASE=folder); its claims beside what was measured
	$(PY) -m runs.paper.$@ $(if $(filter tables,$@),--base $(BASE)) $(ARGS)
study: $(PACKED)/manifest.json  ## train what is left of the controlled study (ARGS=--list shows it), builtin by default
	$(PY) -m runs.study --data $(PACKED) --runs $(BASE)/study $(ARGS)
vendor:  ## clone upstream nanochat and DeiT into vendor/ at the commits of patches/ (or take NANOCHAT_SRC, DEIT_SRC)
	@$(PYTHON) patches/apply.py vendor
diff: vendor  ## patch them there, and show what GKA changes in each
	@$(PYTHON) patches/apply.py apply && $(PYTHON) patches/apply.py diff
unpatch:  ## take the patches out of vendor/ again
	@$(PYTHON) patches/apply.py reverse
test-patches: $(READY) $(if $(NANOCHAT_SRC)$(wildcard vendor/nanochat),.venv/.patches)  ## test the patches on vendor/
	$(PY) -m pytest -rs -m 'upstream or not upstream' tests/patches $(ARGS)
.venv/.patches: patches/requirements.txt | $(READY)
	-$(PIP) -r $< && touch $@
check-gpu check-images check-figures: ; @$(NAMES) $@ $(GIVEN)
clean:  ## delete the environment, keep the outputs
	rm -rf .venv *.egg-info .pytest_cache .ruff_cache .hypothesis
