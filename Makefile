# Daily commands; each sets up .venv by itself where it must. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
# Tests run in this many processes at once, each test in one of them; many wait for clocks, so there is one more than cores.
PROCESSES ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PARALLEL = --numprocesses $(PROCESSES) --maxprocesses 8 --dist worksteal

# A run of the tests starts hundreds of processes: each would compile every module again where Python may not keep them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: device-checks screenshots proofs properties attack help size idiom stack dashboard notebook pythons demo demo-vllm e2e-observability test test-slow test-oldest check lint types layers docs unit warm format proto wheels clean
.PHONY: test-engines known-engines explore simulate fuzz fuzz-properties mutate faults soak bench-switch bench-solver bench-decide bench-split bench-emulated bench-time bench-scale bench-engine

help: ## show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml setup.py $(wildcard packaging/*/pyproject.toml) packaging/building.py constraints-dev.txt $(wildcard proto/eplb/v1/*.proto) tools/setup_venv.py tools/generate_stubs.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/setup_venv.py
	@touch $@

demo: $(READY) ## the main job: service, live ranks, drifting heat, layers switched while serving
	@$(BIN)/eplb demo $(ARGS)

demo-vllm: warm ## two real vLLM servers on CPU, one balanced, the same drifting load; vLLM is installed once per machine
	@$(BIN)/python -m benchmarks.vllm_serving $(ARGS)

bench-engine: warm ## time to the first token with the agent beside vLLM and without, by what the service does
	@for beside in deciding keeping resting nothing; do \
		$(BIN)/python -m benchmarks.vllm_serving --rounds 24 --beside $$beside $(ARGS) || exit; done

test: $(READY) ## lint, types, layer contracts, docs and the tests: the gate of every change (minutes)
	@$(MAKE) --no-print-directory --jobs 2 check warm
	@$(MAKE) --no-print-directory unit

test-slow: proofs properties ## the proofs that take long, real faults, and properties on twice the examples; CI runs them after `make test`

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

size: $(READY) ## code tokens and function sizes per room, settings, and tours through the code, with their ceilings
	@$(BIN)/python -m tools.size $(ARGS)

idiom: $(READY) ## odd English, parallel assignments and vague names per room, with their ceilings; ARGS=eplb_core/wire lists the places
	@$(BIN)/python -m tools.idiom $(ARGS)

docs: $(READY) ## the docs site, into site/; warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: warm ## the tests alone; ARGS go to pytest
	@$(BIN)/pytest $(PARALLEL) $(ARGS)

warm: $(READY) # the solver's kernels, compiled before anything is timed
	@$(BIN)/eplb warmup

test-oldest: ## the tests on the oldest dependencies that both packages allow, in .venv-oldest
	@test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/python tools/setup_venv.py --oldest
	@.venv-oldest/bin/pytest $(PARALLEL) $(ARGS)

test-engines: warm ## real vLLM and SGLang engines on CPU, balanced; engines are installed once per machine (gigabytes, minutes)
	@$(BIN)/pytest tests/engines -m engines -rsP $(ARGS)

device-checks: $(READY) ## every check that needs a GPU or NPU, in at most eight minutes, as one table; exits with 2 without one
	@$(BIN)/python -m tools.device_checks $(ARGS)

known-engines: $(READY) ## the functions that adapters rely on, from each engine's source, and what changed between releases
	@$(BIN)/python -m tools.engine_fingerprints $(ARGS)

format: $(READY) ## format the code and mend what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(READY) ## generate the stubs again after editing proto/
	@$(BIN)/pip install --quiet --no-deps --editable ./packaging/eplb-core

wheels: $(READY) ## eplb-core, eplb-agent, eplb-service and eplb-lab as wheels in dist/
	@$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist ./packaging/eplb-core ./packaging/eplb-agent ./packaging/eplb-lab .

pythons: $(READY) ## the wheels on every Python from 3.10 to 3.14 that is found, and each extra once (minutes)
	@$(BIN)/python -m tools.pythons $(ARGS)

clean: ## remove the virtual environment and everything that was made
	rm -rf $(VENV) .venv-fuzz build dist packaging/*/build packaging/*/*.egg-info site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

explore: $(READY) ## every interleaving of the layer switch, and of service and ranks, and the mutants caught (minutes)
	@$(BIN)/python -m tests.swap.explorer
	@$(BIN)/python -m tests.control.core.explored_service

simulate: $(READY) ## agents, engine and service on one seeded clock, under faults; ARGS="--seeds 500", or "--seed 7" for its story
	@$(BIN)/python -m tests.simulation $(ARGS)

fuzz: $(READY) ## every decoder under coverage-guided fuzzing, in .venv-fuzz; ARGS="--seconds 60 --seed 1"
	@$(BIN)/python -m tests.fuzz.fuzz $(ARGS)

fuzz-properties: warm ## every property test on 40 times the examples, random ones; ARGS="--seed 7 --times 5 tests/solver"
	@$(BIN)/python -m tests.properties $(ARGS)

mutate: warm ## small defects put into a room's modules by cosmic-ray, and whether its tests notice; ARGS="--room planner --sample 40"
	@$(BIN)/pip install --quiet cosmic-ray
	@$(BIN)/python -m tools.mutate $(ARGS)

e2e-observability: warm ## a real Prometheus: every panel has data, every alert fires and ends (three minutes)
	@$(BIN)/pytest tests/observability -m "" -rs $(ARGS)

stack: warm ## service, Prometheus and demo ranks on this machine, on fixed ports, until Ctrl-C
	@$(BIN)/python -m tools.stack $(ARGS)

screenshots: warm ## the pictures of the docs again; needs a Chromium, ARGS=advise does not
	@$(BIN)/python -m tools.screenshots $(ARGS)

notebook: warm ## the notebook of the docs again, after editing docs/examples/decision.py
	@$(BIN)/python -m tools.notebook

dashboard: $(READY) ## the Grafana dashboard again, after editing tools/dashboard
	@$(BIN)/python -m tools.dashboard

faults: $(READY) ## real faults on real services and ranks (minutes); ARGS go to pytest
	@$(BIN)/pytest $(PARALLEL) tests/faults -m "" $(ARGS)

attack: $(READY) ## what strangers try on a real service, as one table; ARGS go to pytest
	@$(BIN)/pytest tests/attacks -m "" -s $(ARGS)

soak: warm ## ten minutes of random faults, then the proof from the ranks' histories; ARGS="--seconds 60 --seed 1"
	@$(BIN)/python -m tests.faults.soak $(ARGS)

bench-switch: $(READY) ## what the layer switch costs the model; ARGS="--json out.json"
	@$(BIN)/python -m benchmarks.switch.run $(ARGS)

bench-solver: warm ## the solver beside its peers, which are fetched once (about 11 minutes; ARGS=--quick: two)
	@$(BIN)/python -m benchmarks.solver $(ARGS)

bench-split: warm ## tokens over replicas by table, dealt and by step, beside targets (minutes); ARGS="--routes routes.npz"
	@$(BIN)/python -m benchmarks.split $(ARGS)

bench-emulated: warm ## time per token left alone, with the engine's own EPLB and with ours, on emulated devices (12 minutes)
	@$(BIN)/python -m benchmarks.emulated $(ARGS)

bench-time: warm ## planning for time beside balancing tokens (minutes); ARGS="--routes routes.npz --table moe_perf.parquet"
	@$(BIN)/python -m benchmarks.time $(ARGS)

bench-decide: warm ## when to decide: false alarms, delays, and change against clock (minutes; ARGS="--traces DIR")
	@$(BIN)/python -m benchmarks.decide $(ARGS)

bench-scale: warm ## one service under the heat of 64, 256 and 1,024 agents (minutes); ARGS="--ranks 64 --seconds 10"
	@$(BIN)/python -m benchmarks.scale $(ARGS)

