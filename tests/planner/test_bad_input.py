"""Heat, shapes and limits that no decision could be made of are refused or clamped, each with a word on why."""

from __future__ import annotations

import os

import numpy as np
import pytest

from eplb_service.heat.window import HeatError, Window
from eplb_service.placement import Placement, PlacementError
from eplb_service.planner.decide import plan, plan_afresh
from eplb_service.planner.plan import Plan
from eplb_service.planner.settings import PlannerSettings
from eplb_service.planner.topology import Topology, TopologyError
from eplb_service.solver import engine


def whole_heat() -> np.ndarray:
    """Five steps of much the same heat, ``[T, L, E]``."""
    generator = np.random.default_rng(1)
    return generator.gamma(0.5, 100, (3, 8)) * generator.uniform(0.98, 1.02, (5, 3, 8))


def decided(heat_TLE: np.ndarray, **settings: object) -> Plan:
    placement = Placement.linear(3, 8, 4, 3)
    return plan(
        Window(heat_TLE),
        placement,
        placement.default_log2phy(),
        Topology.flat(4),
        PlannerSettings(**settings),
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
def test_heat_that_is_no_number_of_tokens_is_refused(value: float) -> None:
    heat_TLE = whole_heat()
    heat_TLE[3, 1, 2] = value
    with pytest.raises(
        HeatError, match=rf"heat is {value} at step 3, layer 1, expert 2; it must be a finite"
    ):
        decided(heat_TLE)


def test_sums_that_float64_cannot_distinguish_are_refused() -> None:
    most = 2**53 // (5 * 8)
    assert decided(np.full((5, 3, 8), most)).par_seen >= 1.0
    with pytest.raises(HeatError, match=r"past 2\*\*53"):
        decided(np.full((5, 3, 8), most + 1))
    with pytest.raises(HeatError, match=r"past 2\*\*53"):
        decided(np.full((5, 3, 8), 2**62))


@pytest.mark.parametrize("value", [np.nan, -1.0, np.inf])
def test_source_heat_that_is_no_number_of_tokens_is_refused(value: float) -> None:
    source_RLE = np.ones((4, 3, 8))
    source_RLE[0, 2, 5] = value
    with pytest.raises(HeatError, match="source heat holds negative or non-finite values"):
        Window(whole_heat(), source_RLE)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(HeatError, match="no steps"):
        decided(np.zeros((0, 3, 8)))


@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "message"),
    [
        (9, 2, 4, "8 slots cannot hold 9 experts; use at least 5 slots per rank"),
        (3, 2, 4, "4 slots per rank must hold one of only 3 experts twice"),
        (8, 0, 4, "must be positive"),
        (0, 2, 4, "must be positive"),
        (8, 2, -4, "must be positive"),
    ],
)
def test_shapes_that_cannot_be_placed_are_refused(experts: int, ranks: int, slots: int, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement.linear(1, experts, ranks, slots)


def test_ranks_that_are_given_twice_are_refused() -> None:
    with pytest.raises(TopologyError, match="nodes of 4 ranks but token groups of 3"):
        Topology(np.zeros(4), np.zeros(3))
    with pytest.raises(TopologyError, match="bytes_per_expert is -1"):
        Topology(np.zeros(4), np.zeros(4), bytes_per_expert=-1)


def test_threads_past_the_machine_are_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, asked = engine.ThreadPoolExecutor, []

    def pool(workers: int, **options: object) -> object:
        asked.append(workers)
        return honest(workers, **options)

    monkeypatch.setattr(engine, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert decided(whole_heat(), threads=1_000_000).layers
    assert asked == [2]


def test_a_spent_budget_leaves_layers_waiting_and_says_so() -> None:
    found = decided(whole_heat(), budget_ms=1e-9)
    assert found.layers == ()
    assert {verdict.reason for verdict in found.verdicts} == {"waits: the budget of 1e-09 ms was spent"}


def test_a_failing_layer_keeps_its_placement_and_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = engine.solve_layer
    heat_TLE = whole_heat()

    def failing(heat_NE: np.ndarray, *arguments: object) -> object:
        if np.array_equal(heat_NE, heat_TLE[:, 1]):
            raise MemoryError("no room for a packing")
        return honest(heat_NE, *arguments)

    whole = decided(heat_TLE, threads=2)
    monkeypatch.setattr(engine, "solve_layer", failing)
    broken = decided(heat_TLE, threads=2)
    assert [changed.layer for changed in whole.layers if changed.layer != 1] == [
        changed.layer for changed in broken.layers
    ]
    assert broken.verdicts[1].reason == "kept: the solver failed (MemoryError: no room for a packing)"
    assert (broken.verdicts[0], broken.verdicts[2]) == (whole.verdicts[0], whole.verdicts[2])


@pytest.mark.parametrize("policy", ["deepseek", "flashlb"])
@pytest.mark.parametrize("split", ["tables", "even", "deal", "step"])
def test_heat_without_tokens_is_no_error(policy: str, split: str) -> None:
    placement = Placement.linear(2, 8, 4, 3)
    heat_TLE = np.zeros((5, 2, 8))
    heat_TLE[:, 1, 3] = 7
    found = plan_afresh(
        Window(heat_TLE), placement, Topology.flat(4), PlannerSettings(policy=policy, split=split)
    )
    assert not any("failed" in verdict.reason for verdict in found.verdicts)
    idle = found.verdicts[0]
    assert np.isnan([idle.par_seen, idle.par_planned, idle.noise_floor]).all()
    assert idle.reason == "left alone: it received no tokens"
    assert found.par_planned == found.verdicts[1].par_planned
    # One hot expert is split over all ranks, and nothing is left to win.
    assert found.verdicts[1].par_planned == pytest.approx(1.0, abs=1e-5)
