"""Tests of policy mode with vLLM-Ascend's real EPLB classes on two CPU ranks, with real processes and transfers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.service import free_address
from tests.engines.ascend_policy_rank import SLOTS
from tests.engines.engine_source import source_of
from tests.engines.environments import ROOT, VLLM_023, VLLM_030, VLLM_032, python_of
from tools.engine_sources import VLLM_ASCEND_023, VLLM_ASCEND_030

HERE = Path(__file__).parent
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

RELEASES = [VLLM_ASCEND_023, VLLM_ASCEND_030]


def serve(release, policy=1, **options):
    """Run two ranks of the first runner for some EPLB cycles, and return each rank's results."""
    source = source_of("vllm_ascend", release)
    return run_ranks(sys.executable, "ascend_policy_rank.py", source, (ROOT,), policy=policy, **options)


def serve_second_runner(**options):
    """Run two ranks of the second runner for some windows, and return each rank's results."""
    source = source_of("vllm_ascend", VLLM_ASCEND_030)
    path = (HERE / "fake_npu", source, ROOT)
    return run_ranks(python_of(VLLM_032), "ascend_second_runner_rank.py", source, path, **options)


def load_again(release, runner):
    """Let the engine move experts on two ranks and load weights again, and return each rank's results."""
    vllm, version = {"0.23": (VLLM_023, VLLM_ASCEND_023), "0.30": (VLLM_030, VLLM_ASCEND_030)}[release]
    source = source_of("vllm_ascend", version)
    path = (HERE / "fake_npu", source, ROOT)
    options = {"release": release, "runner": runner}
    return run_ranks(python_of(vllm), "ascend_reload_rank.py", source, path, **options)


def run_ranks(python, script, source, path, **options):
    """Run a script on two ranks, and return the results that each prints."""
    port = free_address().rpartition(":")[2]
    options = json.dumps({"cycles": 6, **options})
    ranks = [
        subprocess.Popen(
            [python, HERE / script, str(rank), port, source, options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    results = []
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("FOUND ")]
        assert lines, output[-4000:]
        results.append(json.loads(lines[-1].removeprefix("FOUND ")))
    return results


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("policy", [1, 3])
def test_the_planner_balances_the_layers_and_every_token_reaches_its_experts_weights(release, policy):
    first, second = serve(release, policy=policy)
    print(f"PAR of each cycle: {first['pars']}")
    assert first["agreed"] == second["agreed"] == 6
    assert first["wrong"] == second["wrong"] == 0
    assert first["maps"] == second["maps"]
    assert first["moved"]
    for maps_RE in first["maps"]:
        for slot_E in maps_RE:
            assert sorted(slot for slot in slot_E if slot >= 0) == list(range(SLOTS))
    # Heat changes before the fourth cycle. A cycle's decision takes effect at its end.
    assert max(first["pars"][1:3] + first["pars"][4:]) < 1.06 < min(first["pars"][0], first["pars"][3])


def test_switching_the_tables_but_not_the_weights_is_detected():
    for result in serve(RELEASES[-1], broken=True, cycles=2):
        assert result["wrong"] > 0


def test_the_second_runner_routes_tokens_with_the_planners_placement_and_routing_table():
    first, second = serve_second_runner(cycles=4)
    print(f"PAR of each window: {first['pars']}")
    assert first == second
    assert first["wrong"] == 0
    assert first["changed"][0] > 0
    assert max(first["pars"][1:]) < 1.06 < first["pars"][0]
    # ``rows`` counts the routing-table rows per slot. Equal turns would give multiples of 512.
    assert any(rows % 512 for rows_P in first["rows"] for rows in rows_P)


def test_the_second_runners_own_policy_decides_until_the_planner_is_compiled():
    first, second = serve_second_runner(cycles=2, warm=False)
    assert first == second
    assert first["wrong"] == 0
    assert all(rows % 512 == 0 for rows_P in first["rows"] for rows in rows_P)


@pytest.mark.parametrize(("release", "runner"), [("0.23", 1), ("0.30", 1), ("0.30", 2)])
def test_weights_that_the_engine_would_load_into_wrong_slots_are_refused(release, runner):
    """After the refused calls, the engine's own methods load the weights, as a control."""
    for result in load_again(release, runner):
        wrong = result["wrong"]
        print(f"experts in wrong slots: {wrong}")
        assert wrong["moves"] == wrong["refusals"] == 0
        assert set(result["refused"]) == {"reload_weights", "update", "sleep"}
        assert all("restart the engine to load weights" in error for error in result["refused"].values())
        assert wrong["reload"] == wrong["update"] > 0
        assert result["tables_kept"] is ((release, runner) != ("0.30", 1))
