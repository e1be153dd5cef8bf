"""Tests that every scenario passes on a correct engine, and that the scenarios detect faults in moves."""

import itertools

import numpy as np
import pytest

from eplb_lab.conformance.comparison import Tolerance
from eplb_lab.conformance.engine import EngineError, Setup
from eplb_lab.conformance.placements import random_placements, rotated, swap_rounds, swapped
from eplb_lab.conformance.run import run
from eplb_lab.conformance.scenarios import CONTROLS, SCENARIOS, Load
from tests.conformance.toy_engine import EXPERTS, LAYERS, SLOTS, VOCABULARY, ToyEngine

LOAD = Load(VOCABULARY, requests=6, tokens=12, moves=8)
NAMES = [scenario.name for scenario in SCENARIOS]
FAULTS = {
    "unstable": ("no-moves", "differs"),
    "adopts-nothing": ("rotate", "failed"),
    "drops-moves-within-a-rank": ("swap", "differs"),
    "fills-two-replicas": ("random", "differs"),
    "switches-tables-late": ("under-load", "differs"),
    "forgets-tables": ("sleep", "differs"),
    "no-sleep-mode": ("sleep", "not possible"),
    "reloads-initial-slots": ("reload", "differs"),
    "cannot-reload": ("reload", "failed"),
    "leaves-scales": ("quantised", "differs"),
}


def report_of(*faults, names=NAMES):
    started = []

    def start(setup):
        assert all(engine.closed for engine in started)
        started.append(ToyEngine(setup, faults))
        return started[-1]

    scenarios = [scenario for scenario in SCENARIOS if scenario.name in names]
    report = run("toy", start, LOAD, Tolerance(), scenarios=scenarios)
    assert all(engine.closed for engine in started)
    return report, started


def verdicts(report):
    return {outcome.name: outcome.verdict for outcome in report.outcomes}


def test_a_correct_engine_passes_every_scenario_and_all_controls_are_detected():
    report, _ = report_of()
    expected = dict.fromkeys(NAMES, "equal") | {f"control: {fault}": "detected" for fault, _ in CONTROLS}
    assert verdicts(report) == expected
    assert report.passed
    for outcome in report.outcomes:
        assert outcome.tokens > 0
        assert (outcome.moves > 0) == (outcome.name != "no-moves")
        assert outcome.detail or outcome.largest < 1e-12


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_detected_by_the_scenario_for_it(fault):
    name, verdict = FAULTS[fault]
    report, _ = report_of(fault, names=[name])
    outcome = report.outcomes[0]
    assert (outcome.name, outcome.verdict) == (name, verdict)
    assert outcome.detail
    assert not report.passed


def test_only_the_scenario_under_load_detects_tables_that_switch_late():
    """The scenario is therefore necessary, and it compares tokens of the steps around a move."""
    report, _ = report_of("switches-tables-late", names=["rotate", "swap", "random", "under-load"])
    by_name = verdicts(report)
    assert [by_name[name] for name in ("rotate", "swap", "random", "under-load")] == ["equal"] * 3 + [
        "differs"
    ]


def test_the_scenario_after_a_failed_one_runs_on_a_new_engine():
    report, engines = report_of("fills-two-replicas", names=["random", "under-load"])
    assert verdicts(report)["random"] == "differs"
    assert verdicts(report)["under-load"] == "equal"
    # One engine for each scenario. The controls do not run, because they need rotate.
    assert len(engines) == 2


def test_an_engine_that_does_not_start_is_started_once_and_the_reason_is_reported():
    attempts = []

    def start(setup):
        attempts.append(setup)
        raise EngineError("out of memory")

    report = run("toy", start, LOAD, Tolerance(), SCENARIOS[:3])
    assert [(outcome.verdict, outcome.detail) for outcome in report.outcomes] == [
        ("not possible", "out of memory")
    ] * 3
    assert len(attempts) == 1
    assert not report.passed


def test_a_control_that_is_not_detected_fails_the_report():
    def start(setup):
        return ToyEngine(Setup(setup.quantised, setup.sleeps))

    report = run(
        "toy",
        start,
        LOAD,
        Tolerance(),
        scenarios=[scenario for scenario in SCENARIOS if scenario.name == "rotate"],
    )
    assert verdicts(report)["control: weight"] == "not detected"
    assert not report.passed


def test_a_run_without_moves_does_not_pass():
    report, _ = report_of(names=["no-moves"])
    assert verdicts(report) == {"no-moves": "equal"}
    assert not report.passed


def test_rotation_moves_every_expert_to_every_slot():
    placement = ToyEngine().placement()
    visited = [set() for _ in range(EXPERTS)]
    for _ in range(SLOTS):
        placement = rotated(placement)
        for slot, expert in enumerate(placement[0]):
            visited[expert].add(slot)
    assert visited == [set(range(SLOTS))] * EXPERTS


@pytest.mark.parametrize("slots", [2, 3, 8, 9])
def test_the_swap_rounds_contain_every_pair_of_slots_once(slots):
    rounds = swap_rounds(slots)
    pairs = [pair for round_ in rounds for pair in round_]
    assert sorted(pairs) == list(itertools.combinations(range(slots), 2))
    for round_ in rounds:
        assert len(set(itertools.chain(*round_))) == 2 * len(round_)


def test_swaps_keep_each_layers_replica_counts():
    placement = ToyEngine().placement()
    for number in range(SLOTS):
        assert (np.sort(swapped(placement, number)) == np.sort(placement)).all()
        assert (swapped(placement, number) != placement).any(axis=1).all()


def test_random_placements_contain_every_expert_and_the_last_gives_one_expert_all_spare_slots():
    *_, last = placements = list(random_placements(ToyEngine().placement(), 5, seed=3))
    for placement in placements:
        assert placement.shape == (LAYERS, SLOTS)
        assert [set(row) for row in placement.tolist()] == [set(range(EXPERTS))] * LAYERS
    assert [np.bincount(row).max() for row in last] == [1 + SLOTS - EXPERTS] * LAYERS
    assert len({placement.tobytes() for placement in placements}) == 5
