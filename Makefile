# Commands for development. Each sets up .venv if it needs one. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
# Number of test processes. Many tests spend their time waiting, so there is one more process than there are cores.
PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PARALLEL = --numprocesses $(PROCESSES) --maxprocesses 8 --dist worksteal

# The tests start hundreds of processes. Without bytecode files, each of them would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: device-checks screenshots proofs properties attack help size idiom stack dashboard notebook pythons demo demo-vllm e2e-observability test test-slow test-oldest check lint types layers docs unit warm format proto wheels clean
.PHONY: conformance test-engines known-engines explore simulate fuzz fuzz-properties mutate faults soak bench-switch bench-solver bench-decide bench-split bench-emulated bench-scale bench-engine

help: ## list these commands
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml setup.py $(wildcard packaging/*/pyproject.toml) packaging/building.py constraints-dev.txt $(wildcard proto/eplb/v1/*.proto) tools/setup_venv.py tools/generate_stubs.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/setup_venv.py
	@touch $@

demo: $(READY) ## run the demo: a service and live ranks that switch layers under drifting heat while they serve
	@$(BIN)/eplb demo $(ARGS)

demo-vllm: warm ## run two real vLLM servers on CPU under one drifting load, one of them balanced; installs vLLM once
	@$(BIN)/python -m benchmarks.vllm_serving $(ARGS)

bench-engine: warm ## measure vLLM's times to the first token and per token with and without the agent
	@for beside in deciding keeping resting nothing; do \
		$(BIN)/python -m benchmarks.vllm_serving --rounds 24 --beside $$beside $(ARGS) || exit; done

test: $(READY) ## run lint, types, layer contracts, docs and tests: the gate for every change (minutes)
	@$(MAKE) --no-print-directory --jobs 2 check warm
	@$(MAKE) --no-print-directory unit

test-slow: proofs properties ## run long proofs, real faults, and property tests with twice the examples; CI runs it too

proofs: warm
	@$(BIN)/pytest $(PARALLEL) -m "slow or faults" $(ARGS)

properties: warm
	@$(BIN)/python -m pytest $(PARALLEL) -m "hypothesis and not slow and not faults" -p tests.properties --examples-times 2 $(ARGS)

check: lint types layers docs size idiom

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(READY)
	@$(BIN)/mypy

layers: $(READY)
	@$(BIN)/lint-imports

idiom: $(READY) ## count odd constructions, parallel assignments and vague names per component, with their ceilings
	@$(BIN)/python -m tools.idiom $(ARGS)

size: $(READY) ## print code tokens and function sizes per package, settings and reading tours, with their ceilings
	@$(BIN)/python -m tools.size $(ARGS)

docs: $(READY) ## build the docs site into site/; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: warm ## run only the tests; ARGS go to pytest
	@$(BIN)/pytest $(PARALLEL) $(ARGS)

warm: $(READY) # compile the solver's kernels before anything is timed
	@$(BIN)/eplb warmup

test-oldest: ## run the tests with the oldest dependencies that the packages allow, in .venv-oldest
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/python tools/setup_venv.py --oldest
	@.venv-oldest/bin/pytest $(PARALLEL) $(ARGS)

test-engines: warm ## balance real vLLM and SGLang engines on CPU; installs them once (gigabytes, minutes)
	@$(BIN)/pytest tests/engines -m engines -rsP $(ARGS)

conformance: $(READY) ## move experts with an engine's EPLB on CPU, compare tokens; ARGS="--engine vllm"
	@$(BIN)/python -m tests.engines.conformance_on_cpu $(ARGS)

device-checks: $(READY) ## run every check that needs a GPU or NPU and print one table; exits with 2 without a device
	@$(BIN)/python -m tools.device_checks $(ARGS)

known-engines: $(READY) ## record the engine functions that adapters rely on, and print changes between releases
	@$(BIN)/python -m tools.engine_fingerprints $(ARGS)

format: $(READY) ## format the code and fix lint errors that ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(READY) ## regenerate the gRPC stubs after editing proto/
	@$(BIN)/pip install --quiet --no-deps --editable ./packaging/eplb-core

wheels: $(READY) ## build eplb-core, eplb-agent, eplb-service and eplb-lab as wheels in dist/
	@$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist ./packaging/eplb-core ./packaging/eplb-agent ./packaging/eplb-lab .

pythons: $(READY) ## test the wheels on every Python from 3.10 to 3.14 on this machine, and each extra once (minutes)
	@$(BIN)/python -m tools.pythons $(ARGS)

clean: ## remove the virtual environment and all generated files
	rm -rf $(VENV) .venv-fuzz build dist packaging/*/build packaging/*/*.egg-info site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

explore: $(READY) ## model-check all interleavings of layer switch and service; must detect deliberate bugs (minutes)
	@$(BIN)/python -m tests.swap.explorer
	@$(BIN)/python -m tests.control.core.explored_service

simulate: $(READY) ## simulate agents, engine and service with faults; ARGS="--seeds 500", or "--seed 7" to replay a run
	@$(BIN)/python -m tests.simulation $(ARGS)

fuzz: $(READY) ## fuzz every decoder, guided by coverage, in .venv-fuzz; ARGS="--seconds 60 --seed 1"
	@$(BIN)/python -m tests.fuzz.fuzz $(ARGS)

fuzz-properties: warm ## run property tests with 40 times the examples, random; ARGS="--seed 7 --times 5 tests/solver"
	@$(BIN)/python -m tests.properties $(ARGS)

mutate: warm ## insert small defects into a package, report those that tests miss; ARGS="--room planner --sample 40"
	@$(BIN)/pip install --quiet cosmic-ray
	@$(BIN)/python -m tools.mutate $(ARGS)

e2e-observability: warm ## check every panel and every alert with a real Prometheus (three minutes)
	@$(BIN)/pytest tests/observability -m "" -rs $(ARGS)

stack: warm ## run service, Prometheus and demo ranks on this machine, on fixed ports, until Ctrl-C
	@$(BIN)/python -m tools.stack $(ARGS)

screenshots: warm ## regenerate the pictures of the docs; needs Chromium, except for ARGS=advise
	@$(BIN)/python -m tools.screenshots $(ARGS)

notebook: warm ## regenerate the notebook of the docs after editing docs/examples/decision.py
	@$(BIN)/python -m tools.notebook

dashboard: $(READY) ## regenerate the Grafana dashboard after editing tools/dashboard
	@$(BIN)/python -m tools.dashboard

faults: $(READY) ## inject real faults into real services and ranks (minutes); ARGS go to pytest
	@$(BIN)/pytest $(PARALLEL) tests/faults -m "" $(ARGS)

attack: $(READY) ## attack a real service as a stranger would, and print one table; ARGS go to pytest
	@$(BIN)/pytest tests/attacks -m "" -s $(ARGS)

soak: warm ## inject random faults for ten minutes, then check the ranks' histories; ARGS="--seconds 60 --seed 1"
	@$(BIN)/python -m tests.faults.soak $(ARGS)

bench-switch: $(READY) ## measure the cost of the layer switch for the model; ARGS="--json out.json"
	@$(BIN)/python -m benchmarks.switch.run $(ARGS)

bench-solver: warm ## compare the solver with its peers, which are fetched once (about 11 minutes; ARGS=--quick: two)
	@$(BIN)/python -m benchmarks.solver $(ARGS)

bench-split: warm ## compare token splits by table, dealt and per step (minutes); ARGS="--routes routes.npz"
	@$(BIN)/python -m benchmarks.split $(ARGS)

bench-emulated: warm ## measure time per token on emulated devices: unbalanced, engine's EPLB, ours (12 minutes)
	@$(BIN)/python -m benchmarks.emulated $(ARGS)

bench-decide: warm ## measure false alarms, delays, and triggered against periodic decisions; ARGS="--traces DIR"
	@$(BIN)/python -m benchmarks.decide $(ARGS)

bench-scale: warm ## load one service with 64, 256 and 1,024 agents (minutes); ARGS="--ranks 64 --seconds 10"
	@$(BIN)/python -m benchmarks.scale $(ARGS)

