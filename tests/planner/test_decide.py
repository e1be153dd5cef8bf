"""A decision changes the layers that are worth it, says why for each, and never depends on threads."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eplb_service.heat.window import HeatError, Window
from eplb_service.placement import Placement, PlacementError, check_log2phy
from eplb_service.planner import decide
from eplb_service.planner.decide import plan
from eplb_service.planner.scoring import par, rank_loads
from eplb_service.planner.settings import PlannerSettings, SettingsError
from eplb_service.planner.topology import Topology, TopologyError

LAYERS, EXPERTS, RANKS, SLOTS = 4, 16, 4, 5


@pytest.fixture
def placement() -> Placement:
    return Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)


@pytest.fixture
def window() -> Window:
    generator = np.random.default_rng(11)
    popularity_LE = generator.dirichlet(np.full(EXPERTS, 0.6), LAYERS)
    popularity_LE[2] = 1 / EXPERTS
    heat_TLE = np.stack([generator.multinomial(4000, row_E, size=48) for row_E in popularity_LE], axis=1)
    return Window(heat_TLE)


def decided(window, placement, **settings):
    return plan(
        window, placement, placement.default_log2phy(), Topology.flat(RANKS), PlannerSettings(**settings)
    )


def test_planned_ratio_is_what_the_tables_realise(window: Window, placement: Placement) -> None:
    result = decided(window, placement)
    assert result.layers
    table_RLE = placement.default_log2phy()
    after = placement
    for changed in result.layers:
        after = after.with_layer(changed.layer, changed.phy2log_RS)
        table_RLE[:, changed.layer] = changed.log2phy_RE
        for rank in range(RANKS):
            check_log2phy(changed.log2phy_RE[rank], changed.phy2log_RS)
    realised_L = par(rank_loads(window.episodes(64), after, table_RLE, None))
    np.testing.assert_allclose(realised_L, [verdict.par_planned for verdict in result.verdicts], atol=1e-4)
    assert result.par_planned < result.par_seen
    gains = [result.verdicts[changed.layer] for changed in result.layers]
    assert [v.par_seen - v.par_planned for v in gains] == sorted(
        (v.par_seen - v.par_planned for v in gains), reverse=True
    )


def test_moves_name_senders_that_hold_the_expert(window: Window, placement: Placement) -> None:
    for changed in decided(window, placement).layers:
        before_RS = placement.phy2log_LRS[changed.layer]
        rebuilt_RS = before_RS.copy()
        for source, source_slot, rank, slot, expert in changed.moves_M5.tolist():
            assert before_RS[source, source_slot] == expert
            rebuilt_RS[rank, slot] = expert
        np.testing.assert_array_equal(rebuilt_RS, changed.phy2log_RS)


def test_threshold_leaves_layers_alone(window: Window, placement: Placement) -> None:
    result = decided(window, placement, par_threshold=50.0)
    assert result.layers == ()
    assert all("threshold" in verdict.reason for verdict in result.verdicts)
    assert result.par_planned == result.par_seen


def test_worst_layers_come_first(window: Window, placement: Placement) -> None:
    result = decided(window, placement, max_layers=1)
    assert len(result.layers) == 1
    worst = max(result.verdicts, key=lambda verdict: verdict.par_seen)
    assert result.layers[0].layer == worst.layer
    assert sum("waits" in verdict.reason for verdict in result.verdicts) >= 1


def test_policy_none_never_moves(window: Window, placement: Placement) -> None:
    assert decided(window, placement, policy="none").layers == ()


@pytest.mark.parametrize("policy", ["deepseek", "flashlb"])
def test_policies_win_balance(window: Window, placement: Placement, policy: str) -> None:
    result = decided(window, placement, policy=policy)
    assert result.par_planned < result.par_seen - 0.1
    assert all(verdict.par_planned <= verdict.par_seen for verdict in result.verdicts)


def test_ranks_that_share_tokens_get_one_table(window: Window, placement: Placement) -> None:
    topology = Topology(np.zeros(RANKS, dtype=np.int32), np.array([7, 7, 3, 3], dtype=np.int32))
    result = plan(window, placement, placement.default_log2phy(), topology, PlannerSettings())
    assert result.layers
    for changed in result.layers:
        np.testing.assert_array_equal(changed.log2phy_RE[0], changed.log2phy_RE[1])
        np.testing.assert_array_equal(changed.log2phy_RE[2], changed.log2phy_RE[3])


def test_deciding_again_changes_nothing(window: Window, placement: Placement) -> None:
    result = decided(window, placement)
    table_RLE = placement.default_log2phy()
    after = placement
    for changed in result.layers:
        after = after.with_layer(changed.layer, changed.phy2log_RS)
        table_RLE[:, changed.layer] = changed.log2phy_RE
    again = plan(window, after, table_RLE, Topology.flat(RANKS), PlannerSettings())
    assert again.moves == 0


def test_failure_in_one_layer_spoils_no_other(
    window: Window, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = decide.solve_many

    def failing(*arguments):
        answers = honest(*arguments)
        answers[0].found.phy2log_RS[:] = 0
        return answers

    whole = decided(window, placement)
    monkeypatch.setattr(decide, "solve_many", failing)
    broken = decided(window, placement)
    worst = max(whole.verdicts, key=lambda verdict: verdict.par_seen).layer
    assert "solver failed" in broken.verdicts[worst].reason
    assert {changed.layer for changed in broken.layers} == {changed.layer for changed in whole.layers} - {
        worst
    }


def test_contradicting_arguments_are_refused(window: Window, placement: Placement) -> None:
    tables_RLE, flat, defaults = placement.default_log2phy(), Topology.flat(RANKS), PlannerSettings()
    with pytest.raises(HeatError, match="does not fit"):
        plan(window, Placement.linear(LAYERS, EXPERTS + 1, RANKS, SLOTS), tables_RLE, flat, defaults)
    with pytest.raises(PlacementError, match="shape"):
        plan(window, placement, tables_RLE[1:], flat, defaults)
    wrong_RLE = tables_RLE.copy()
    wrong_RLE[2, 1, 3] = 999
    with pytest.raises(PlacementError, match=r"layer 1, rank 2.*expert 3"):
        plan(window, placement, wrong_RLE, flat, defaults)
    with pytest.raises(TopologyError, match="does not fit"):
        plan(window, placement, tables_RLE, Topology.flat(RANKS + 1), defaults)
    with pytest.raises(HeatError, match="source heat"):
        plan(
            dataclasses.replace(window, source_RLE=np.ones((2, LAYERS, EXPERTS))),
            placement,
            tables_RLE,
            flat,
            defaults,
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "magic"),
        ("par_threshold", 0.5),
        ("min_gain", float("nan")),
        ("max_layers", 0),
        ("threads", 0),
    ],
)
def test_settings_refuse_what_cannot_be_followed(field: str, value: object) -> None:
    with pytest.raises(SettingsError, match=field):
        PlannerSettings(**{field: value})
