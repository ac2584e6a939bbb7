# Each target sets up what it needs in .venv, from nothing; a stamp file says that it is there.
#
#   make demo [QUICK=1]   fine-tunes a small pretrained model in eager PyTorch and in onnxtrain, side by side
#   make test             checks and tests          make test-all   the slow tests as well
#   make lint             checks only               make format     formats and fixes what can be fixed
#   make docs             builds the documentation into build/docs; a warning or a broken link is an error
#   make fuzz MINUTES=5   random programs, in onnxtrain and in eager PyTorch
#   make faults           known faults, put back one at a time: which tests notice them
#   make test-gpu-plans   what a step would launch on a GPU, on fake tensors: installs PyTorch's CUDA build, 5 GB
#   make model-sweep      every class of transformers' auto mappings, small, in onnxtrain and in eager PyTorch
#                         (ARGS=--write also writes docs/reference/models.md)
#   make matrix           tests in other environments: folders, instruction sets, threads, no compiler, no network, ...
#   make bench            measures
#
# PYTHON names the interpreter, JOBS the number of test processes, ARGS further arguments of the program that is run.
# Each version is tested in an environment of its own: make test PYTHON=python3.13 TORCH=2.11.0 VENV=.venv-3.13-2.11

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
# Neighbouring tests share captures and fixtures: a process takes a stretch of them, and at the end from another's.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal --durations=15
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: demo test run-tests test-all test-gpu-plans model-sweep matrix faults docs fuzz bench lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python -m examples.minilm $(if $(QUICK),--quick) $(ARGS)

# mypy takes 16 s of one core without its cache: beside the tests no core waits meanwhile.
test: $(VENV)/.dev $(VENV)/.browser
	$(MAKE) --no-print-directory --jobs=2 lint run-tests

run-tests:
	$(PYTEST) $(ARGS)

test-all: lint docs $(VENV)/.browser $(VENV)/.cpp
	$(PYTEST) --slow $(ARGS)

# `===` is the same version of any build: `==` may find a CPU build first.
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

# torch first and by its exact version: any other request may bring gigabytes of another build. On a machine without a
# GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves those gigabytes.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	touch $@

# The page of examples/web is tested in Node and Chromium. Its tests say so and are skipped where one is missing and
# cannot be installed.
$(VENV)/.browser: examples/web/package.json $(VENV)/.torch
	-command -v npm >/dev/null && npm install --prefix examples/web --no-audit --no-fund --loglevel=error
	-command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }
	touch $@

# So is the test of examples/cpp, which builds it.
$(VENV)/.cpp: $(VENV)/.torch
	-{ command -v cmake && command -v g++ && [ -e /usr/include/nlohmann/json.hpp ]; } >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq cmake g++ nlohmann-json3-dev >/dev/null; }
	touch $@

$(VENV)/.demo $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml $(VENV)/.torch
	$(PIP) -e '.[$*]'
	touch $@
