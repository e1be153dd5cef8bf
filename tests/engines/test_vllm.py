"""Real vLLM, balanced by the agent, answers what vLLM answers alone; its layers switch while it does."""

import os
import signal
import subprocess

import numpy as np
import pytest

from eplb_service.cli.main import run
from eplb_service.io.open_trace import open_trace
from tests.engines.conftest import TRACES, TRITON_IN_PYTHON
from tests.engines.environments import VLLM_032, VLLM_032_TRITON, python_of
from tests.engines.generate_vllm import prompts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SMALLEST_DIFFERENCE_THAT_MATTERS = 1e-4
"""Of log-probabilities in float32: sums over experts run in another order where an expert has moved."""

EXPERT_PARALLEL = {"enable_expert_parallel": True, "enable_eplb": True}
TWO_TENSOR_RANKS = EXPERT_PARALLEL | {
    "tensor_parallel_size": 2,
    "eplb_config": {"num_redundant_experts": 4, "use_async": False},
}
TWO_DATA_RANKS = EXPERT_PARALLEL | {
    "data_parallel_size": 2,
    "eplb_config": {"num_redundant_experts": 4, "use_async": False},
}


def same_answers(balanced, alone):
    assert [ids for ids, _ in balanced] == [ids for ids, _ in alone]
    worst = max(
        abs(here - there)
        for (_, some), (_, others) in zip(balanced, alone, strict=True)
        for here, there in zip(some, others, strict=True)
    )
    assert worst < SMALLEST_DIFFERENCE_THAT_MATTERS


@pytest.fixture(scope="module")
def alone():
    """Answers of the untouched engine on one rank, by engine and load; each made once."""
    known = {}

    def answers(run_vllm, engine, options):
        key = (engine.name, options["requests"], options["rounds"])
        if key not in known:
            known[key] = run_vllm(engine, options, name="alone").answers()
        return known[key]

    return answers


@pytest.mark.parametrize("engine", [VLLM_032], ids=lambda engine: engine.name)
@pytest.mark.parametrize(
    ("parallel", "requests", "rounds"),
    [(TWO_TENSOR_RANKS, 8, 4), (TWO_DATA_RANKS, 8, 4), (TWO_DATA_RANKS, 1, 12)],
    ids=["tp2", "dp2", "dp2-one-rank-idle"],
)
def test_answers_are_the_same_over_many_switches(
    engine, parallel, requests, rounds, run_vllm, alone, service, tmp_path
):
    load = {"requests": requests, "max_tokens": 160, "rounds": rounds}
    expected = alone(run_vllm, engine, load)
    agent = {"EPLB_AGENT_SERVICE": service.address, "EPLB_AGENT_DEPLOYMENT": "default"}
    balanced = run_vllm(engine, load | {"engine": parallel}, **agent)
    same_answers(balanced.answers(), expected)
    status = service.status().status
    assert status.layers_switched >= 20, balanced.tail()
    assert status.steps_lost == 0
    what_was_recorded_can_be_replayed(tmp_path)


def what_was_recorded_can_be_replayed(folder):
    """vLLM counts no tokens by slot: they follow from every rank's own choices and the tables of the time."""
    path = folder / TRACES / "default-1.zarr"
    trace = open_trace(path)
    heat_TLE, loads_TLR = trace.heat(0, trace.steps), trace.served_loads(0, trace.steps)
    chosen_TL = heat_TLE.sum(axis=2)
    assert trace.steps >= 64
    assert (chosen_TL > 0).all()
    # Every token chooses as many experts in one layer as in another.
    assert (chosen_TL == chosen_TL[:, :1]).all()
    assert np.array_equal(loads_TLR.sum(axis=2), chosen_TL)
    assert np.array_equal(trace.source_rows(0, trace.steps).sum(axis=1), heat_TLE)
    size = ["--ranks", str(trace.facts.ranks), "--slots", str(trace.facts.slots)]
    pace = ["--window", "32", "--interval", "16", "--policy", "none,flashlb"]
    assert run(["replay", "--heat", str(path), *size, *pace]) == 0


def test_tables_that_change_without_weights_are_seen(run_vllm, alone, service):
    load = {"requests": 8, "max_tokens": 160, "rounds": 4}
    expected = alone(run_vllm, VLLM_032, load)
    broken = run_vllm(
        VLLM_032,
        load | {"engine": TWO_TENSOR_RANKS},
        EPLB_AGENT_SERVICE=service.address,
        EPLB_AGENT_VERIFY_TRANSFERS="false",
        EPLB_TEST_COMMIT_WITHOUT_WEIGHTS="1",
    )
    assert [ids for ids, _ in broken.answers()] != [ids for ids, _ in expected]


def test_weights_that_are_loaded_while_experts_have_moved_are_each_expert_s_own(run_vllm, service):
    """The untouched engine loads them as well: on CPU vLLM itself answers differently once it has."""
    load = {"requests": 8, "max_tokens": 120, "rounds": 3, "between": [["reload_weights", {}]]}
    expected = run_vllm(VLLM_032, load, name="alone").answers()
    options = load | {"engine": TWO_TENSOR_RANKS}
    balanced = run_vllm(VLLM_032, options, EPLB_AGENT_SERVICE=service.address)
    same_answers(balanced.answers(), expected)
    assert service.status().status.layers_switched > 5, balanced.tail()


EVERY_EIGHT_STEPS = (
    "--window-steps 16 --decision-interval 8 --report-steps 4 --par-threshold 1.0 --min-gain 0.0"
)


@pytest.mark.parametrize("service", [EVERY_EIGHT_STEPS], indirect=True)
def test_the_second_model_runner(run_vllm, service):
    """vLLM's default on accelerators; its Triton kernels run in Python here."""
    load = {"requests": 4, "max_tokens": 40, "rounds": 5}
    expected = run_vllm(VLLM_032_TRITON, load, name="alone", **TRITON_IN_PYTHON).answers()
    agent = TRITON_IN_PYTHON | {"EPLB_AGENT_SERVICE": service.address}
    balanced = run_vllm(VLLM_032_TRITON, load | {"engine": TWO_TENSOR_RANKS}, **agent)
    same_answers(balanced.answers(), expected)
    assert "Using V2 Model Runner" in balanced.log.read_text()
    assert service.status().status.layers_switched >= 20, balanced.tail()


def test_a_worker_that_is_killed_ends_the_engine_and_the_next_one_is_balanced(run_vllm, alone, service):
    agent = {"EPLB_AGENT_SERVICE": service.address}
    endless = {"requests": 8, "max_tokens": 160, "rounds": 1000, "engine": TWO_TENSOR_RANKS}
    struck = run_vllm(VLLM_032, endless, name="struck", **agent)
    struck.wait_for("ROUND 1 ")
    workers = struck.workers()
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    assert "EngineDeadError" in struck.failure(seconds=180)
    load = {"requests": 8, "max_tokens": 160, "rounds": 4}
    before = service.status().status.layers_switched
    balanced = run_vllm(VLLM_032, load | {"engine": TWO_TENSOR_RANKS}, **agent)
    same_answers(balanced.answers(), alone(run_vllm, VLLM_032, load))
    assert service.status().status.layers_switched > before, balanced.tail()


def test_a_server_streams_the_same_tokens(serve_vllm, service):
    redundancy = '{"num_redundant_experts": 4, "use_async": false}'
    options = ["-tp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config", redundancy]
    untouched = serve_vllm(VLLM_032, [], name="alone")
    balanced = serve_vllm(VLLM_032, options, name="balanced", EPLB_AGENT_SERVICE=service.address)
    for server in (untouched, balanced):
        server.wait_until_healthy()
    for turn in range(6):
        wave = prompts(8, seed=turn + 1)
        expected, found = (
            [answer.ids for answer in server.answers(wave, 120)] for server in (untouched, balanced)
        )
        assert found == expected
        assert all(len(ids) == 120 for ids in found)
    assert service.status().status.layers_switched >= 10, balanced.tail()


def test_a_service_killed_and_started_again(run_vllm, alone, service):
    load = {"requests": 8, "max_tokens": 160, "rounds": 8}
    expected = alone(run_vllm, VLLM_032, load)
    balanced = run_vllm(VLLM_032, load | {"engine": TWO_TENSOR_RANKS}, EPLB_AGENT_SERVICE=service.address)
    balanced.wait_for("ROUND 1 ")
    service.kill()
    balanced.wait_for("ROUND 2 ")
    service.start()
    same_answers(balanced.answers(), expected)


def test_no_service_at_all(run_vllm, alone):
    load = {"requests": 8, "max_tokens": 160, "rounds": 4}
    expected = alone(run_vllm, VLLM_032, load)
    unheard = run_vllm(VLLM_032, load | {"engine": TWO_TENSOR_RANKS}, EPLB_AGENT_SERVICE="127.0.0.1:1")
    same_answers(unheard.answers(), expected)


@pytest.mark.parametrize("engine", [VLLM_032], ids=lambda engine: engine.name)
def test_every_function_that_the_adapter_relies_on_is_the_known_one(engine, agent_site):
    check = (
        "import vllm; from worker_agent.adapters import compat; from worker_agent.adapters.vllm.known import KNOWN\n"
        "compat.require('vLLM', vllm.__version__, KNOWN)"
    )
    done = in_engine(engine, agent_site, check)
    assert done.returncode == 0, done.stderr


def test_an_unknown_release_is_refused_and_left_as_it_is(agent_site):
    check = (
        "import vllm; vllm.__version__ = '9.9.0'\n"
        "from vllm.distributed.eplb.eplb_state import EplbState\n"
        "step = EplbState.step\n"
        "from worker_agent.adapters.vllm import plugin\n"
        "try: plugin.register()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "assert EplbState.step is step"
    )
    done = in_engine(VLLM_032, agent_site, check, EPLB_AGENT_SERVICE="127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    assert "UnsupportedEngineError" in done.stdout
    assert "vLLM 9.9.0" in done.stdout
    assert "0.32" in done.stdout


def in_engine(engine, site, code, **environment):
    """Run ``code`` with the engine's interpreter and the agent on its path."""
    settings = {"PYTHONPATH": str(site), "VLLM_PLUGINS": "", "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        [python_of(engine), "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=settings,
        timeout=600,
    )
