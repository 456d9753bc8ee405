# Two commands are enough to start: `make run` and `make test`. Everything else is for developers.
PYTHON ?= python3
VENV := .venv
E2E_VENV := .venv-e2e
BIN := $(VENV)/bin
.DEFAULT_GOAL := help

.PHONY: help setup run test e2e e2e-setup bench soak coverage lint format clean

help:  ## List the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | expand -t 14

$(VENV)/.done: pyproject.toml constraints/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints/dev.txt --editable '.[dev]'
	@touch $@

setup: $(VENV)/.done  ## Make .venv with the pagewarden command in it

run: setup  ## Start the daemon, its dashboard and two simulated engines (SIMULATE=0: none)
	@BIN=$(BIN) scripts/run.sh

test: setup  ## Lint, type-check and run every test that needs no vLLM
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -n 3 --dist loadgroup

lint: setup  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(E2E_VENV)/.done: scripts/setup_e2e.sh constraints/e2e.txt pyproject.toml
	PYTHON=$(PYTHON) scripts/setup_e2e.sh $(E2E_VENV)
	@touch $@

e2e-setup: $(E2E_VENV)/.done  ## Make .venv-e2e with a CPU build of vLLM

e2e: setup e2e-setup  ## Real vLLM processes against a real daemon
	$(BIN)/python -m pytest tests/e2e -m "e2e and not all_cores" -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/e2e -m "e2e and all_cores"

bench: setup  ## Print ratios measured side by side
	$(BIN)/python -m tests.benchmarks

coverage: setup  ## Lines reached by make test, in all its processes
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --skip-covered

soak: setup  ## Simulated engines under kills, stops, aborts and evictions (SECONDS=600)
	$(BIN)/python -m tests.stress.soak --seconds $(or $(SECONDS),600)

clean:  ## Remove both environments and caches
	rm -rf $(VENV) $(E2E_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
