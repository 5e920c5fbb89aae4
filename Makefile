# fullshard's commands. `make help` lists them; each makes the virtual environment it needs, once.
#
#   make train RANKS=2 STEPS=600 MODEL=small API=wrapper ARGS="--lr 3e-4"
#   make test PYTHON=python3.12
#   make test-torch TORCH=2.15.0 ARGS=tests/parity
#   make train VENV="$VIRTUAL_ENV"      use an environment that is there already, and the torch that is in it

PYTHON ?= python3
VENV ?= .venv
MODEL ?= base
API ?= fully_shard
RANKS ?=
STEPS ?=
PROGRAMS ?= 500
FIRST ?= 0
FILE ?=
ARGS ?=
TORCH ?=
RATE ?=
DELAY ?=

BIN := $(VENV)/bin
# In our own environment every tool has a pinned version. In someone else's nothing that is there already is replaced.
PINS := $(if $(filter .venv,$(VENV)),-c constraints.txt)
# Where the tests run with another torch.
OTHER := .venv-torch-$(TORCH)
# Ranks that share one machine share its cores, and more threads than cores only slow each other down.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

.PHONY: help train finetune hosts test quick test-all test-torch frameworks lint types types-elsewhere docs docs-test fuzz mutate bench \
	gpu clean
.DEFAULT_GOAL := help

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@sed -n '3,6s/^# *//p' Makefile | sed 's/^/  /'

# Starts a program of examples/ on RANKS ranks.
define start
	@ranks="$(RANKS)"; \
	[ -n "$$ranks" ] || ranks=$$($(BIN)/python -c 'import torch; print(torch.accelerator.device_count() or 2)'); \
	echo "Starting $$ranks ranks ..."; \
	threads=$$(($(CORES) / ranks)); [ $$threads -ge 1 ] || threads=1; \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$threads} $(BIN)/python -m torch.distributed.run --standalone \
		--nproc-per-node=$$ranks examples/$(1) $(if $(STEPS),--steps $(STEPS)) $(ARGS)
endef

train: $(VENV)/.installed-train ## train a small language model on RANKS ranks (default 2, or one for each GPU)
	$(call start,train.py --model $(MODEL) --api $(API))

finetune: $(VENV)/.installed-finetune ## train a model of transformers with LoRA on RANKS ranks
	$(call start,finetune.py)

hosts: $(VENV)/.installed-train ## train the example on HOSTS=2 hosts that are one machine, as root: RANKS=1 on each, RATE=1gbit, DELAY=1ms
	@rm -rf runs/hosts
	$(BIN)/python -m tests.hosts --hosts $(or $(HOSTS),2) --ranks $(or $(RANKS),1) $(if $(RATE),--rate $(RATE)) $(if $(DELAY),--delay $(DELAY)) \
		-- examples/train.py --directory runs/hosts --steps $(or $(STEPS),20) $(ARGS)

# Two processes share the files of the tests: while the ranks of one wait for each other, those of the other compute.
# Files are compiled once, and not again in each of the ranks, whatever the environment says.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: lint ## lint, check types, run the quick lane of the tests
	$(MAKE) --no-print-directory -j 2 types quick

# What mypy needs is one core of two, while the tests begin.
quick: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: lint types types-elsewhere $(VENV)/.installed-servers ## the same with every test, and with servers of stores (needs npm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --all $(ARGS)

test-torch: ## run every test with another torch, TORCH=2.15.0 (2.11 or newer), in an environment of its own
	$(if $(TORCH),,$(error say which torch: make test-torch TORCH=2.15.0))
	$(MAKE) $(OTHER)/.installed-torch-$(TORCH) VENV=$(OTHER)
	$(MAKE) $(OTHER)/.installed-test $(OTHER)/.installed-servers VENV=$(OTHER)
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest --all $(ARGS)

frameworks: ## run programs of accelerate, transformers, PEFT, TRL, Lightning, torchtitan and torchao on fullshard, and Triton's kernels
	$(MAKE) .venv-frameworks/.installed-frameworks VENV=.venv-frameworks PINS='-c constraints-frameworks.txt'
	OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m pytest --all $(ARGS) tests/frameworks tests/optim/test_blocks.py
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-frameworks/bin/python -m pytest --all $(ARGS) tests/test_fused.py

lint: $(VENV)/.installed-test ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test ## mypy, strict
	$(BIN)/mypy

types-elsewhere: $(VENV)/.installed-test ## the same for the library and the examples on macOS and Windows
	for system in darwin win32; do \
		$(BIN)/mypy --platform $$system --cache-dir .mypy_cache/$$system src/fullshard examples || exit 1; done

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed-docs ## build the documentation site into site/
	$(BIN)/mkdocs build --strict

docs-test: $(VENV)/.installed-test ## run the code of the README and of the docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_docs.py $(ARGS)

fuzz: $(VENV)/.installed-test ## run random programs against unsharded training: PROGRAMS=500, FIRST=0 is the first seed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --programs $(PROGRAMS) --first-seed $(FIRST) $(ARGS)

mutate: $(VENV)/.installed-mutate ## make small changes in FILE=report/text.py, and say which of them its tests do not find
	$(if $(FILE),,$(error say which file below src/fullshard: make mutate FILE=report/text.py))
	$(BIN)/python -m tests.mutants $(FILE) $(ARGS)

bench: $(VENV)/.installed-bench ## compare with DDP and torch's own FSDP, side by side, some minutes; FULL=1: longer
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py $(ARGS)

gpu: ## the same with torch's FSDP2 on one GPU, at most nine minutes; installs nothing, results go to runs/gpu
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(ARGS)

clean: ## remove the environments, the caches and what training wrote
	rm -rf .venv .venv-torch-* .venv-frameworks runs build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each set of extras: it is newer than the files that say what to install.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check $(PINS) -e '.[$*]'
	@touch $@

# Servers of stores, for slow tests.
$(VENV)/.installed-servers: $(VENV)/.installed-stores
	npm install --silent --no-save --prefix $(VENV)/stores azurite@3.35.0 s3rver@3.7.1
	@touch $@

# Before what needs a torch: that is then there already, and stays.
$(VENV)/.installed-torch-%: | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check torch==$*
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
		f"fullshard needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: name another, make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
