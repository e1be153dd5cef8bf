"""Tests that real SGLang, balanced by the agent, gives the same answers while its layers switch."""

import pytest

from tests.engines.conftest import DECIDE_OFTEN, ON_CPU
from tests.engines.engine_checks import (
    OBSERVE,
    WITHOUT_WEIGHTS,
    check_heat,
    check_observed,
    check_same_answers,
    check_switches,
    check_without_a_service,
    has_damaged_experts,
    in_engine,
)
from tests.engines.environments import SGLANG_0523

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

TWO_TENSOR_RANKS = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4}
TWO_ATTENTION_RANKS = TWO_TENSOR_RANKS | {"attn_dp_size": 2}
"""Each rank has its own requests, whose tokens are gathered before they are routed."""
CASES = {
    "tp2": (SGLANG_0523, TWO_TENSOR_RANKS),
    "attention-dp2": (SGLANG_0523, TWO_ATTENTION_RANKS),
}
EACH_CASE = pytest.mark.parametrize(("engine", "parallel"), CASES.values(), ids=CASES)
LOAD = {"requests": 8, "max_tokens": 120, "rounds": 4}
DEALING = f"{DECIDE_OFTEN} --split deal"


@pytest.fixture(scope="module")
def alone():
    """Return a function that returns an unmodified engine's answers on one rank.

    The longest run of each engine is cached.
    """
    longest = {}

    def answers(run_sglang, rounds=LOAD["rounds"], engine=SGLANG_0523):
        count = rounds * LOAD["requests"]
        if len(longest.get(engine, ())) < count:
            load = LOAD | {"rounds": rounds}
            longest[engine] = run_sglang(load, name=f"alone-{rounds}", engine=engine).answers()
        return longest[engine][:count]

    return answers


@EACH_CASE
@pytest.mark.parametrize("service", [DEALING], indirect=True)
def test_answers_are_the_same_over_many_switches(engine, parallel, run_sglang, alone, service, tmp_path):
    """Serve until 20 layers have switched. While the planner sees no gain, layers stay unchanged for many rounds."""
    enough = tmp_path / "enough"
    agent = {"EPLB_AGENT_SERVICE": service.address, "EPLB_AGENT_DEPLOYMENT": "default"}
    endless = LOAD | {"rounds": 1000, "until": str(enough), "engine": parallel}
    balanced = run_sglang(endless, engine=engine, **agent)
    service.wait_until(lambda status: status.status.layers_switched >= 20, 900)
    enough.touch()
    answers = balanced.answers()
    check_same_answers(answers, alone(run_sglang, len(answers) // LOAD["requests"], engine))
    check_heat(check_switches(service, 20, balanced.tail()), service)


@EACH_CASE
@pytest.mark.parametrize("service", [DEALING], indirect=True)
def test_switching_the_tables_but_not_the_weights_is_detected(
    engine, parallel, run_sglang, alone, service, tmp_path
):
    """Serve until there is damage to detect, because on a busy machine the service may decide late."""
    enough = tmp_path / "enough"
    agent = WITHOUT_WEIGHTS | {"EPLB_AGENT_SERVICE": service.address}
    endless = LOAD | {"rounds": 1000, "until": str(enough), "engine": parallel}
    broken = run_sglang(endless, engine=engine, **agent)
    service.wait_until(has_damaged_experts, 900)
    broken.wait_for_another_round()
    broken.wait_for_another_round()
    enough.touch()
    answers = broken.answers()
    expected = alone(run_sglang, len(answers) // LOAD["requests"], engine)
    assert [ids for ids, _ in answers] != [ids for ids, _ in expected]


def test_answers_do_not_change_if_eplb_is_disabled(run_sglang, alone, service):
    expected = alone(run_sglang)
    answers = run_sglang(LOAD, EPLB_AGENT_SERVICE=service.address).answers()
    assert answers == expected


def test_an_unsupported_combination_stops_the_engine_and_the_error_gives_the_reason(run_sglang):
    refused = TWO_TENSOR_RANKS | {"ep_dispatch_algorithm": "fake"}
    run = run_sglang(LOAD | {"engine": refused}, EPLB_AGENT_SERVICE="127.0.0.1:1")
    output = run.failure()
    assert "--ep-dispatch-algorithm fake" in output
    assert "unset EPLB_AGENT_SERVICE" in output


def test_an_unknown_release_stops_the_engine_without_patching_it(sglang_site):
    check = (
        "import sglang.version; sglang.version.__version__ = '0.6.0'\n"
        "from sglang.srt.plugins import load_plugins\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "try: load_plugins()\n"
        "finally: print('hooks of the agent', [hook for hook in HookRegistry._hooks if 'ModelRunner' in hook])"
    )
    done = in_engine(SGLANG_0523, sglang_site, check, EPLB_AGENT_SERVICE="127.0.0.1:1", **ON_CPU)
    assert done.returncode == 1, done.stderr
    assert "hooks of the agent []" in done.stdout
    assert "SGLang 0.6.0" in done.stderr
    assert "0.5.23" in done.stderr


OBSERVED = {
    "tp2": {"tp_size": 2, "ep_size": 2},
    "tp2-eplb": TWO_TENSOR_RANKS | {"eplb_rebalance_num_iterations": 256},
    "attention-dp2": {"tp_size": 2, "ep_size": 2, "attn_dp_size": 2},
}
"""Engines without EPLB, and one whose own EPLB moves experts while it is observed."""


@pytest.mark.parametrize("case", OBSERVED)
def test_an_observed_engine_gives_the_same_answers_and_reports_its_heat(
    case, run_sglang, alone, service, tmp_path
):
    enough = tmp_path / "enough"
    load = LOAD | {"rounds": 1000, "until": str(enough), "engine": OBSERVED[case]}
    agent = OBSERVE | {"EPLB_AGENT_SERVICE": service.address, "EPLB_AGENT_DEPLOYMENT": "default"}
    observed = run_sglang(load, name="observed", **agent)
    check_observed(service, tmp_path)
    if case == "tp2-eplb":
        service.wait_until(lambda status: status.status.epoch > 0, 900)
    enough.touch()
    answers = observed.answers()
    check_same_answers(answers, alone(run_sglang, len(answers) // LOAD["requests"]))


def test_an_engine_observed_without_a_service_logs_its_balance_and_writes_a_trace(
    run_sglang, alone, tmp_path
):
    trace = tmp_path / "heat.npz"
    settings = OBSERVE | {"EPLB_AGENT_LOG_INTERVAL_STEPS": "64", "EPLB_AGENT_TRACE": str(trace)}
    observed = run_sglang(LOAD | {"engine": OBSERVED["tp2"]}, name="observed", **settings)
    check_same_answers(observed.answers(), alone(run_sglang))
    check_without_a_service(observed.log, trace)
