# Daily commands; each sets up .venv by itself where it must. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest check lint types layers unit format proto clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml setup.py constraints-dev.txt $(wildcard proto/eplb/v1/*.proto) tools/setup_venv.py tools/generate_stubs.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/setup_venv.py
	@touch $@

demo: $(READY) ## the main job: service, live ranks, drifting heat, layers switched while serving
	@$(BIN)/eplb demo $(ARGS)

test: check unit ## everything that CI runs: lint, types, layer contracts, all tests

check: lint types layers

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

layers: $(READY)
	@$(BIN)/lint-imports

unit: $(READY) ## the tests alone; ARGS go to pytest
	@$(BIN)/pytest $(ARGS)

test-oldest: ## the service's tests on the oldest dependencies that the package allows, in .venv-oldest
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/pip install --quiet --constraint constraints-oldest.txt --editable ".[test]"
	@.venv-oldest/bin/pytest tests --ignore tests/agent --ignore tests/swap --ignore tests/moe --ignore tests/e2e \
	  --ignore tests/test_ranks.py $(ARGS)

format: $(READY) ## format the code and mend what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(READY) ## generate the stubs again after editing proto/
	@$(BIN)/pip install --quiet --no-deps --editable .

clean: ## remove the virtual environment and everything that was made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
