"""Tests that real engines give the same answers while the planner decides inside their own EPLB.

The figures of the engine's own policy are measured in the same engine with the same requests.
"""

import json
from functools import partial
from statistics import mean

import pytest

from eplb_service.cli.main import run as eplb
from tests.engines.conftest import warm, with_own_eplb
from tests.engines.engine_checks import MAX_TIES, check_same_answers, figures
from tests.engines.environments import VLLM_032

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

WINDOW = 64
LOAD = {"requests": 24, "max_tokens": 48, "rounds": 12}
FOUR_RANKS = with_own_eplb(ranks=4, redundant=8, window=WINDOW)
TWO_RANKS = with_own_eplb(ranks=2, redundant=4, window=WINDOW)
MAX_IMBALANCE_OVER_OWN = 0.03
"""Allowance for the difference between runs of the same policy, which is large because windows are short."""
MAX_ERROR_OF_EVEN_SPLIT = 0.05
"""The service draws each token's replica at random. The engines choose it by the token's row, and batches are small."""
BALANCE_STEPS = 64
"""Number of steps over which the service measures the PAR that it shows."""
SGLANG_LAYERS = 3
"""Number of values per forward pass that ``measure_sglang_routing`` measures."""
MAX_SHARE_FETCHED = 1 / 5


def test_vllm_gives_the_same_answers_in_policy_mode(run_vllm, agent_site, tmp_path):
    load = {"requests": 8, "max_tokens": 120, "rounds": 4}
    alone = run_vllm(VLLM_032, load, name="alone").answers()
    path = tmp_path / "planner.jsonl"
    settings = {"EPLB_AGENT_MODE": "policy", "EPLB_TEST_MEASURE": str(path)}
    run = run_vllm(VLLM_032, load | {"engine": TWO_RANKS}, name="planner", **settings)
    check_same_answers(run.answers(), alone)
    assert "policy: PAR" in run.log.read_text()
    _, fetched = figures(path)
    print(f"{sum(fetched)} experts fetched in {len(fetched)} rearrangements")
    assert sum(fetched) > 0


def check_balance_shown(service, path, capsys, per_pass):
    """Check that a service decided, received all heat, and shows the balance of the current placement.

    Parameters
    ----------
    service
        The service.
    path
        Imbalance and rearrangements as measured in the engine.
    capsys
        Fixture that captures the output of ``eplb status``.
    per_pass
        Number of measured values per forward pass.
    """
    service.wait_until(lambda status: status.status.epoch > 0, 600)
    pars = []
    for _ in range(9):
        enough = service.status().status.steps_received + BALANCE_STEPS
        shown = service.wait_until(
            lambda status, enough=enough: status.status.steps_received >= enough and status.status.par > 1
        )
        pars.append(shown.status.par)
    capsys.readouterr()
    assert eplb(["status", "default", "--json", "--address", service.address]) == 0
    shown = json.loads(capsys.readouterr().out)["status"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(index for index, line in enumerate(lines) if line.get("fetched"))
    counted = [
        [line["imbalance"] for line in part if "imbalance" in line] for part in (lines[:first], lines[first:])
    ]
    # The first value may still include steps before the move.
    pars = pars[1:]
    initial = mean(counted[0])
    recent = mean(counted[1][-len(pars) * BALANCE_STEPS * per_pass :])
    par = mean(pars)
    decisions = service.log.read_text().count("engine_decision")
    with capsys.disabled():
        print(
            f"\nPAR {par:.3f} at epoch {shown['epoch']}; the engine counted {recent:.3f}, and {initial:.3f} in its "
            f"initial placement; {decisions} decisions of the service; {shown['steps_received']} steps arrived "
            f"complete, {shown['steps_lost']} were lost"
        )
    assert decisions > 0
    assert (shown["observed"], shown["plan_id"], shown["steps_lost"]) == (True, 0, 0)
    assert shown["par_steps"] == BALANCE_STEPS
    assert abs(par - recent) < MAX_ERROR_OF_EVEN_SPLIT


def check_policy_with_a_service(start, engine, service, folder, capsys, per_pass=1):
    """Check an engine's answers before and after its service dies, and the balance that the service shows until then.

    ``start`` starts an engine.
    """
    load = {"requests": 24, "max_tokens": 120}
    enough = folder / "enough"
    path = folder / "planner.jsonl"
    settings = {
        "EPLB_AGENT_MODE": "policy",
        "EPLB_AGENT_SERVICE": service.address,
        "EPLB_AGENT_DEPLOYMENT": "default",
        "EPLB_AGENT_DECISION_TIMEOUT_SECONDS": "20",
        "EPLB_TEST_MEASURE": str(path),
    }
    run = start(load | {"rounds": 1000, "until": str(enough), "engine": engine}, name="planner", **settings)
    check_balance_shown(service, path, capsys, per_pass)
    service.kill()
    run.wait_for("the service did not decide, so this rank does")
    enough.touch()
    answers = run.answers()
    alone = start(load | {"rounds": len(answers) // load["requests"]}, name="alone")
    check_same_answers(answers, alone.answers())


def test_vllm_asks_a_service_which_also_shows_the_balance(run_vllm, service, tmp_path, capsys):
    engine = with_own_eplb(ranks=2, redundant=4, window=512)
    check_policy_with_a_service(partial(run_vllm, VLLM_032), engine, service, tmp_path, capsys)


def test_sglang_asks_a_service_which_also_shows_the_balance(run_sglang, service, tmp_path, capsys):
    own_eplb = {"eplb_rebalance_num_iterations": 512, "expert_distribution_recorder_buffer_size": 512}
    engine = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4} | own_eplb
    check_policy_with_a_service(run_sglang, engine, service, tmp_path, capsys, per_pass=SGLANG_LAYERS)


def test_weights_reloaded_in_policy_mode_reach_the_right_experts(run_vllm, agent_site, tmp_path):
    """vLLM's own EPLB fails here: it loads weights into slots that hold different experts by then."""
    load = {"requests": 8, "max_tokens": 120, "rounds": 4, "between": [["reload_weights", {}]]}
    alone = run_vllm(VLLM_032, load, name="alone").answers()
    path = tmp_path / "planner.jsonl"
    settings = {"EPLB_AGENT_MODE": "policy", "EPLB_TEST_MEASURE": str(path)}
    run = run_vllm(VLLM_032, load | {"engine": TWO_RANKS}, name="planner", **settings)
    check_same_answers(run.answers(), alone)
    assert sum(figures(path)[1]) > 0
    assert "all experts return to their initial slots" in run.log.read_text()


def test_sglang_gives_the_same_answers_in_policy_mode(run_sglang, tmp_path):
    load = {"requests": 8, "max_tokens": 120, "rounds": 4}
    alone = run_sglang(load, name="alone").answers()
    own_eplb = {"eplb_rebalance_num_iterations": 48, "expert_distribution_recorder_buffer_size": 48}
    two_ranks = {"tp_size": 2, "ep_size": 2, "enable_eplb": True, "ep_num_redundant_experts": 4} | own_eplb
    measured = {}
    for name, mode in (("own", {}), ("planner", {"EPLB_AGENT_MODE": "policy"})):
        path = tmp_path / f"{name}.jsonl"
        run = run_sglang(load | {"engine": two_ranks}, name=name, EPLB_TEST_MEASURE=str(path), **mode)
        check_same_answers(run.answers(), alone)
        measured[name] = figures(path)[1]
    assert "policy: PAR" in run.log.read_text()
    print(
        f"experts fetched: {sum(measured['own'])} with SGLang's algorithm, {sum(measured['planner'])} with ours"
    )
    assert 0 < sum(measured["planner"]) <= MAX_SHARE_FETCHED * sum(measured["own"])


def test_the_planner_balances_vllm_as_well_as_its_own_policy_and_fetches_fewer_experts(
    run_vllm, agent_site, many_experts, tmp_path
):
    warm(VLLM_032, agent_site)
    alone = run_vllm(VLLM_032, LOAD, name="alone", model=many_experts).answers()
    measured = {}
    for name, mode in (("own", {}), ("planner", {"EPLB_AGENT_MODE": "policy"})):
        path = tmp_path / f"{name}.jsonl"
        run = run_vllm(
            VLLM_032,
            LOAD | {"engine": FOUR_RANKS},
            name=name,
            model=many_experts,
            EPLB_TEST_MEASURE=str(path),
            **mode,
        )
        answers = run.answers()
        measured[name] = figures(path)
    same = sum(ids == expected for (ids, _), (expected, _) in zip(answers, alone, strict=True))
    print(f"{same} of {len(alone)} answers equal those of the unmodified engine")
    assert same >= (1 - MAX_TIES) * len(alone)
    assert "policy: PAR" in run.log.read_text()
    own_policy = measured["own"]
    planner = measured["planner"]
    print(
        f"imbalance {own_policy[0]:.3f} with vLLM's policy, {planner[0]:.3f} with the planner; experts fetched "
        f"{sum(own_policy[1])} and {sum(planner[1])} in {len(own_policy[1])} and {len(planner[1])} rearrangements"
    )
    assert planner[0] <= own_policy[0] + MAX_IMBALANCE_OVER_OWN
    assert 0 < sum(planner[1]) <= MAX_SHARE_FETCHED * sum(own_policy[1])
