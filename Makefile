# make help    these lines
# make setup   install everything into .venv, tests and their packages included
# make train   train the tiny model in NVFP4 on this machine   (make train ARGS="model=hybrid_60m train.steps=1000")
# make test    lint, types, tests
# make test-fast   the tests without those marked slow, on all cores: less than two minutes on two
# make lint    lint and types alone
# make test-kernels   the Triton kernels on this machine, by Triton's interpreter (make test-kernels ARGS="-k ms_eden")
# make test-engines   other programs on exported models, in environments of their own: 4 GB (make test-engines ARGS=mlx-lm)
# make test-gpu   what needs a GPU, with the Python of .venv or else python3 (make test-gpu ARGS="--output results")

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NPROC ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
# The default global batch of 8 sequences is two micro-batches of 4; on more ranks each gets single sequences.
BATCH := $(if $(filter 1 2,$(NPROC)),,train.micro_batch_size=1)
export OMP_NUM_THREADS ?= $(shell n=$$(( $$(nproc) / $(NPROC) )); echo $$(( n > 0 ? n : 1 )))

# A checkout gets the torch with which all tests ran; the package takes others, with which parts of them did.
# Measured: pip on x86_64 Linux, Python 3.11, torch 2.13, 2026-11.
SAYS_TORCH := make: downloads torch and CUDA (2.7 GB; torch for CPUs: 0.2 GB) and 50 packages (0.1 GB) into $(VENV)
SAYS_CPU := $(if $(filter-out 0,$(GPUS)),,make: no GPU here: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make ... takes torch for CPUs)
SAYS_TESTS := make: downloads what tests need, 107 packages (0.3 GB), into $(VENV)

.PHONY: help setup train test all-tests test-fast test-kernels test-engines test-gpu lint format

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(VENV)/.installed

# Of the packages' 20,000 modules Python compiles those that are imported, and keeps them whatever the environment says.
# Otherwise each process of each run and test would compile them again.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile

# What training needs. Builds take the setuptools that torch brings, instead of an environment of their own each.
$(VENV)/.base: pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}; name another with make PYTHON=...")'
	@echo '$(SAYS_TORCH)'
	@$(if $(SAYS_CPU),echo '$(SAYS_CPU)')
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) "torch>=2.13,<2.14"
	$(INSTALL) --no-build-isolation --editable .
	@$(BIN)/python -c 'import pretrain, torch._dynamo, matplotlib.pyplot'
	@touch $@

# What tests need too.
$(VENV)/.installed: $(VENV)/.base
	@echo '$(SAYS_TESTS)'
	$(INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

# Ctrl-C reaches make and the shell too: the trap lets the shell wait for the run. Exit code 75 says that it is stopped
# and saved, which is no error.
train: TRAIN = $(BIN)/python -m megatron_fp4.launch --standalone --nproc-per-node $(NPROC) pretrain.py $(BATCH) $(ARGS)
train: $(VENV)/.base
	@WORLD_SIZE=$(NPROC) $(BIN)/python pretrain.py --check $(BATCH) $(ARGS)
	$(info $(TRAIN))
	@trap : INT; $(TRAIN); code=$$?; [ $$code -eq 75 ] || exit $$code

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With make --jobs=2 lint runs beside the tests, which leave a core idle now and then.
test: lint all-tests

# Files whole, because their tests share what is slow to make; in the order of tests/conftest.py: slow ones first.
PYTEST := env -u MAKEFLAGS $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

all-tests: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow" $(ARGS)

# Triton is in a folder of its own: torch for CUDA demands one version, and all training processes would import it.
$(VENV)/.triton: $(VENV)/.installed
	@echo 'make: downloads Triton (0.2 GB; 0.7 GB unpacked) into $(VENV)/triton'
	$(INSTALL) --no-deps --upgrade --target $(VENV)/triton triton==3.7.0
	@touch $@

# The files of tests/gpu that launch kernels; their tests that need more are in tests/interpreted/plugin.py.
KERNEL_TESTS := $(patsubst %,tests/gpu/test_%.py,quantizers gathered_codes linear_cuda grouped tiled_attention cross_entropy exact_norm)
INTERPRETED := TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/$(VENV)/triton $(BIN)/python -m pytest -p tests.interpreted.plugin

test-kernels: $(VENV)/.triton
	$(INTERPRETED) tests/interpreted/check_interpreter.py --durations 0
	$(INTERPRETED) --numprocesses auto --maxprocesses 8 --dist worksteal $(KERNEL_TESTS) $(or $(ARGS),--every-kernel)

test-engines: setup
	$(BIN)/python -m tests.engines $(ARGS)

# Without setup: on a GPU machine torch and the packages for CUDA are the image's.
test-gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/test_gpu.py $(ARGS)
