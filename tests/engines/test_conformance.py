"""Tests that the conformance kit runs on real vLLM's and SGLang's own EPLB and detects the faults of its controls."""

import json

import pytest

from tests.engines.conformance_on_cpu import SHIMS, run_on_cpu

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("engine", SHIMS)
def test_both_controls_are_detected_and_tokens_do_not_change_while_the_engine_moves_experts(engine, tmp_path):
    report = tmp_path / "report.json"
    scenarios = "no-moves,rotate,random,under-load"
    assert run_on_cpu(engine, "--scenarios", scenarios, "--moves", "6", "--json", str(report)) == 0
    outcomes = {outcome["name"]: outcome for outcome in json.loads(report.read_text())["outcomes"]}
    assert [outcomes[name]["verdict"] for name in scenarios.split(",")] == ["equal"] * 4
    assert outcomes["rotate"]["moves"] == 6
    assert outcomes["under-load"]["moves"] > 0
    assert [outcomes[f"control: {fault}"]["verdict"] for fault in ("weight", "table")] == ["detected"] * 2
