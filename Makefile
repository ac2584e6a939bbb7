# Each target creates .venv with its dependencies if needed; a stamp file marks what is installed.
#
#   make demo [QUICK=1]   fine-tune a small pretrained model in eager PyTorch and in onnxtrain, side by side
#   make test             run checks and tests      make test-all   also run the slow tests
#   make lint             run the checks only       make format     format the code, and fix what ruff can fix
#   make docs             build the documentation into build/docs; warnings and broken links are errors
#   make fuzz MINUTES=5   compare random programs in onnxtrain and in eager PyTorch
#   make faults           reintroduce known faults one at a time, and list the tests that fail
#   make test-gpu-plans   check the kernel launches of a step on a GPU, with fake tensors (installs CUDA PyTorch, 5 GB)
#   make model-sweep      compare each class of transformers' auto mappings, PyTorch's recurrent and transformer modules
#                         and, where it is installed, models of diffusers, small, in onnxtrain and in eager PyTorch
#                         (ARGS=--write also writes docs/reference/models.md, and needs diffusers)
#   make matrix           run tests in other environments: folders, instruction sets, threads, no compiler, no network
#   make bench            run the benchmarks
#
# PYTHON is the interpreter, JOBS the number of test processes, ARGS further arguments of the program.
# Test another version in its own environment: make test PYTHON=python3.13 TORCH=2.11.0 VENV=.venv-3.13-2.11

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
# Neighbouring tests share captures and fixtures: `worksteal` gives each process a contiguous range of tests.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal --durations=15
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: demo test run-tests test-all test-gpu-plans model-sweep matrix faults docs fuzz bench lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python -m examples.minilm $(if $(QUICK),--quick) $(ARGS)

# Lint in parallel with the tests: without its cache, mypy takes 16 s on one core.
test: $(VENV)/.dev $(VENV)/.browser $(VENV)/.triton
	$(MAKE) --no-print-directory --jobs=2 lint run-tests

run-tests:
	$(PYTEST) $(ARGS)

test-all: lint docs $(VENV)/.browser $(VENV)/.triton $(VENV)/.cpp
	$(PYTEST) --slow $(ARGS)

# `===` matches the version string exactly; `==` also accepts a CPU build such as 2.13.0+cpu.
test-gpu-plans:
	$(MAKE) --no-print-directory VENV=.venv-cuda TORCH='=$(TORCH)' .venv-cuda/.dev
	.venv-cuda/bin/pytest --slow -n0 tests/gpu_without_one $(ARGS)

model-sweep: $(VENV)/.dev
	$(BIN)/python -m tests.model_sweep --jobs $(JOBS) $(ARGS)

docs: $(VENV)/.docs
	rm -rf build/docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "open build/docs/index.html, or: python3 -m http.server -d build/docs"

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) --jobs $(JOBS) $(ARGS)

matrix: $(VENV)/.dev
	$(BIN)/python -m tools.matrix $(ARGS)

faults: $(VENV)/.dev
	$(BIN)/python -m tools.faults --jobs $(JOBS) $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/sizes.py

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)

# Install torch first, pinned: later requirements could replace it with another build of several gigabytes. On
# a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu selects the small CPU build.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	touch $@

# examples/web is tested in Node and Chromium. Its tests are skipped, with this reason, if one of them is missing and
# cannot be installed.
$(VENV)/.browser: examples/web/package.json $(VENV)/.torch
	-command -v npm >/dev/null && npm install --prefix examples/web --no-audit --no-fund --loglevel=error
	-command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }
	touch $@

# Tests of onnxtrain's Triton kernels run in its interpreter, and are skipped likewise. The folder is not on Python's path:
# PyTorch for a CPU comes without Triton, and imports it where it finds it.
TRITON := 3.7.1
$(VENV)/.triton: $(VENV)/.torch
	-$(PIP) --no-deps --target $(VENV)/triton triton==$(TRITON)
	touch $@

# The test of examples/cpp builds it, and is skipped likewise.
$(VENV)/.cpp: $(VENV)/.torch
	-{ command -v cmake && command -v g++ && [ -e /usr/include/nlohmann/json.hpp ]; } >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq cmake g++ nlohmann-json3-dev >/dev/null; }
	touch $@

$(VENV)/.demo $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[$*]'
	touch $@
