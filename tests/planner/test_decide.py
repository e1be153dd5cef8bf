"""A decision changes the layers that benefit, gives a reason per layer, and does not depend on the thread count."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.solver.heats import generate
from eplb_core.heat.window import HeatError, Window
from eplb_core.placement import Placement, PlacementError, apply_layers, par
from eplb_core.planner import solver_call
from eplb_core.planner.dealing import default_tables
from eplb_core.planner.decide import _cherry_pick, plan, plan_from_scratch
from eplb_core.planner.plan import Layout, Plan
from eplb_core.planner.request import with_options
from eplb_core.planner.score import split_loads
from eplb_core.planner.settings import POLICIES, SPLITS, PlannerSettings
from eplb_core.planner.topology import Topology, TopologyError
from eplb_core.solver.engine import SolverError
from eplb_core.solver.model import Recommendation, SearchOptions
from tests.solver.layers_of import Case, cases

PARS = st.lists(st.tuples(st.integers(100, 130), st.integers(100, 130)), max_size=10)


@settings(max_examples=150)
@given(PARS, st.integers(100, 120), st.integers(0, 10), st.none() | st.integers(1, 4))
def test_cherry_picks_match_a_slow_twin(
    pars: list[tuple[int, int]], threshold: int, gain: int, max_layers: int | None
) -> None:
    # The bounds differ from every ratio by at least 0.005, so that rounding cannot decide a comparison.
    settings = PlannerSettings(
        par_threshold=threshold / 100 + 0.005, min_gain=gain / 100 + 0.005, max_layers=max_layers
    )
    picks = _cherry_pick(
        np.array([before / 100 for before, _ in pars]), np.array([after / 100 for _, after in pars]), settings
    )
    worth = [
        layer for layer, (before, after) in enumerate(pars) if before > threshold and before - after > gain
    ]
    by_gain = sorted(worth, key=lambda layer: pars[layer][1] - pars[layer][0])
    gains = [pars[layer][0] - pars[layer][1] for layer in picks]
    assert gains == [pars[layer][0] - pars[layer][1] for layer in by_gain[:max_layers]]
    assert set(picks.tolist()) <= set(worth)
    assert len(picks) == len(set(picks.tolist()))


def test_a_gain_equal_to_its_bound_does_not_suffice() -> None:
    settings_ = PlannerSettings(par_threshold=1.5, min_gain=0.25)
    par_L = np.array([1.5, 1.75, 1.75, 2.0])
    after_L = np.array([1.0, 1.5, 1.0, 1.0])
    assert _cherry_pick(par_L, after_L, settings_).tolist() == [3, 2]


LAYERS = 4
EXPERTS = 16
RANKS = 4
SLOTS = 5


PLACEMENT = Placement.linear(LAYERS, EXPERTS, RANKS, SLOTS)


def drawn_window() -> Window:
    generator = np.random.default_rng(11)
    popularity_LE = generator.dirichlet(np.full(EXPERTS, 0.6), LAYERS)
    popularity_LE[2] = 1 / EXPERTS
    heat_TLE = np.stack([generator.multinomial(4000, row_E, size=48) for row_E in popularity_LE], axis=1)
    return Window(heat_TLE)


WINDOW = drawn_window()


def decided(window=WINDOW, placement=PLACEMENT, recommendations=(), **options):
    settings, search = with_options(PlannerSettings(), options)
    tables_RLE = placement.default_log2phy()
    flat = Topology.flat(RANKS)
    return plan(window, placement, tables_RLE, flat, settings, search=search, recommendations=recommendations)


def test_the_sender_of_a_move_holds_the_expert() -> None:
    for changed in decided().layers:
        before_RS = PLACEMENT.phy2log_LRS[changed.layer]
        rebuilt_RS = before_RS.copy()
        for source, source_slot, rank, slot, expert in changed.moves_M5.tolist():
            assert before_RS[source, source_slot] == expert
            rebuilt_RS[rank, slot] = expert
        np.testing.assert_array_equal(rebuilt_RS, changed.phy2log_RS)


def test_policy_none_never_moves_an_expert() -> None:
    result = decided(policy="none")
    assert result.layers == ()
    assert {verdict.reason for verdict in result.verdicts} == {"kept: the policy is none"}
    assert result.par_planned == result.par_seen > 1.1


@pytest.mark.parametrize("policy", ["deepseek", "flashlb"])
@pytest.mark.parametrize("split", ["tables", "even", "step"])
def test_policies_improve_balance_under_the_hosts_split(policy: str, split: str) -> None:
    result = decided(policy=policy, split=split)
    assert result.par_planned < result.par_seen - 0.1
    before_L = par(split_loads(WINDOW.heat_TLE, PLACEMENT, PLACEMENT.default_log2phy(), None, split))
    after, table_RLE = apply_layers(PLACEMENT, PLACEMENT.default_log2phy(), result.changes())
    after.check_log2phy(table_RLE)
    gains = [result.verdicts[changed.layer] for changed in result.layers]
    won = [verdict.par_seen - verdict.par_planned for verdict in gains]
    assert won == sorted(won, reverse=True)
    after_L = par(split_loads(WINDOW.heat_TLE, after, table_RLE, None, split))
    np.testing.assert_allclose(before_L, [verdict.par_seen for verdict in result.verdicts], atol=1e-6)
    expected_L = np.maximum(after_L, [verdict.noise_floor for verdict in result.verdicts])
    np.testing.assert_allclose(expected_L, [verdict.par_planned for verdict in result.verdicts], atol=1e-4)


def test_a_decision_does_not_modify_its_arguments() -> None:
    table_RLE = PLACEMENT.default_log2phy()
    heat_TLE = WINDOW.heat_TLE.copy()
    phy2log_LRS = PLACEMENT.phy2log_LRS.copy()
    plan(WINDOW, PLACEMENT, table_RLE, Topology.flat(RANKS), PlannerSettings())
    np.testing.assert_array_equal(WINDOW.heat_TLE, heat_TLE)
    np.testing.assert_array_equal(PLACEMENT.phy2log_LRS, phy2log_LRS)
    np.testing.assert_array_equal(table_RLE, PLACEMENT.default_log2phy())


def assert_same(first: Plan, second: Plan) -> None:
    assert first.verdicts == second.verdicts
    for first_layer, second_layer in zip(first.layers, second.layers, strict=True):
        for field in ("layer", "phy2log_RS", "log2phy_RE", "moves_M5"):
            np.testing.assert_array_equal(getattr(first_layer, field), getattr(second_layer, field))


@pytest.mark.parametrize("threads", [1, 2, 10_000])
def test_the_thread_count_does_not_change_the_decision(threads: int) -> None:
    assert_same(decided(), decided(threads=threads))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_the_decision_on_a_layer_does_not_depend_on_the_other_layers(layer: int) -> None:
    whole = decided()
    single_plan = decided(
        Window(WINDOW.heat_TLE[:, layer : layer + 1]), Placement.linear(1, EXPERTS, RANKS, SLOTS)
    )
    single = single_plan.verdicts[0]
    joint = whole.verdicts[layer]
    assert (single.changed, single.moves, single.reason) == (joint.changed, joint.moves, joint.reason)
    assert single.par_planned == pytest.approx(joint.par_planned)
    changed = [change for change in whole.layers if change.layer == layer]
    for joint_layer, single_layer in zip(changed, single_plan.layers, strict=True):
        np.testing.assert_array_equal(joint_layer.phy2log_RS, single_layer.phy2log_RS)
        np.testing.assert_array_equal(joint_layer.log2phy_RE, single_layer.log2phy_RE)


def test_each_layer_follows_its_own_recommendation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    recommendations = [Recommendation(8.0, 0.1 * layer) for layer in range(LAYERS)]

    def recording(batch, *arguments):
        calls.extend(zip(batch.heat_LNE.sum(axis=1), batch.recommendation_L, strict=True))
        return [SolverError("not solved")] * len(batch.heat_LNE)

    monkeypatch.setattr(solver_call, "solve_many", recording)
    decided(recommendations=recommendations)
    assert len(calls) > 1
    for heat_E, recommendation in calls:
        np.testing.assert_array_equal(
            heat_E, WINDOW.heat_TLE[:, recommendations.index(recommendation)].sum(axis=0)
        )


def test_a_second_decision_on_the_same_window_changes_nothing() -> None:
    result = decided()
    after = apply_layers(PLACEMENT, PLACEMENT.default_log2phy(), result.changes())
    assert plan(WINDOW, *after, Topology.flat(RANKS), PlannerSettings()).moves == 0


@pytest.mark.parametrize("flaw", ["placement", "table", "error"])
def test_a_failure_in_one_layer_leaves_the_other_layers_unaffected(
    monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    original = solver_call.solve_many

    def failing(*arguments):
        answers = original(*arguments)
        if flaw == "placement":
            answers[0].candidate.phy2log_RS[:] = 0
        elif flaw == "table":
            answers[0].candidate.log2phy_GE[1, 2] = -1
        else:
            answers[0] = SolverError("ZeroDivisionError: no ranks")
        return answers

    whole = decided()
    monkeypatch.setattr(solver_call, "solve_many", failing)
    broken = decided()
    worst = max(whole.verdicts, key=lambda verdict: verdict.par_seen).layer
    reason = {
        "placement": "has no slot",
        "table": "log2phy, rank 1: expert 2 points to slot -1, which does not hold it",
        "error": "ZeroDivisionError: no ranks",
    }
    assert broken.verdicts[worst].reason.startswith("kept: the solver failed (")
    assert reason[flaw] in broken.verdicts[worst].reason
    assert not broken.verdicts[worst].changed
    assert {changed.layer for changed in broken.layers} == {changed.layer for changed in whole.layers} - {
        worst
    }
    for intact, verdict in zip(whole.verdicts, broken.verdicts, strict=True):
        assert intact == verdict or intact.layer == worst


def test_contradictory_arguments_are_rejected() -> None:
    tables_RLE = PLACEMENT.default_log2phy()
    flat = Topology.flat(RANKS)
    defaults = PlannerSettings()
    with pytest.raises(HeatError, match="does not match"):
        plan(WINDOW, Placement.linear(LAYERS, EXPERTS + 1, RANKS, SLOTS), tables_RLE, flat, defaults)
    with pytest.raises(PlacementError, match="shape"):
        plan(WINDOW, PLACEMENT, tables_RLE[1:], flat, defaults)
    wrong_RLE = tables_RLE.copy()
    wrong_RLE[2, 1, 3] = 999
    with pytest.raises(PlacementError, match=r"layer 1, rank 2.*expert 3"):
        plan(WINDOW, PLACEMENT, wrong_RLE, flat, defaults)
    with pytest.raises(TopologyError, match="does not match"):
        plan(WINDOW, PLACEMENT, tables_RLE, Topology.flat(RANKS + 1), defaults)
    of_two_ranks = dataclasses.replace(WINDOW, source_RLE=np.ones((2, LAYERS, EXPERTS)))
    with pytest.raises(HeatError, match="source heat"):
        plan(of_two_ranks, PLACEMENT, tables_RLE, flat, defaults)


@settings(max_examples=60)
@given(cases(), st.sampled_from(POLICIES), st.sampled_from(SPLITS), st.booleans())
def test_experts_bound_to_their_ranks_do_not_move(case: Case, policy: str, split: str, warm: bool) -> None:
    placement = Placement.linear(1, case.experts, case.ranks, case.slots)
    topology = dataclasses.replace(Topology.flat(case.ranks), rank_bound=True)
    settings = PlannerSettings(policy=policy, split=split, threads=1)
    window = Window(np.minimum(case.heat_NE, 1e9)[:, None])
    tables_RLE = default_tables(placement, split, settings.deal_width)
    for decision in (
        plan(window, placement, tables_RLE, topology, settings, search=SearchOptions(warm=warm)),
        plan_from_scratch(window, placement, topology, settings),
    ):
        assert decision.layers == ()
        assert [verdict.reason for verdict in decision.verdicts] == [
            "kept: its experts are bound to their ranks"
        ]
        assert decision.moves == 0
        np.testing.assert_equal(decision.par_planned, decision.par_seen)


def test_placements_follow_drift_even_if_their_promise_exceeds_the_par_of_the_window() -> None:
    look_back = 128
    interval = 24
    decisions = 12
    heat_TLE = generate("drift", 2, 256, look_back + decisions * interval, seed=1)
    placement = Placement.linear(2, 256, 32, 9)
    serving = Layout(placement, placement.default_log2phy())
    settings = PlannerSettings(threads=1)
    verdicts = []
    realised = []
    recommendations = ()
    for begin in range(0, decisions * interval, interval):
        window = Window(heat_TLE[begin : begin + look_back].copy())
        deployed = serving.placement, serving.log2phy_RLE
        decision = plan(
            window, *deployed, Topology.flat(32), settings, float(interval), recommendations=recommendations
        )
        serving = serving.changed_by(decision)
        recommendations = decision.recommendations
        verdicts += decision.verdicts if begin else ()
        next_TLE = heat_TLE[begin + look_back : begin + look_back + interval].copy()
        realised.append(serving.par_of_steps(Window(next_TLE), settings.split).mean())
    changed = [verdict for verdict in verdicts if verdict.changed]
    assert any(verdict.par_planned > verdict.par_seen for verdict in changed)
    # Under drift, the older steps do not recur, so a change that fits the newer steps may do worse on the older ones.
    assert any("planned for drift" in verdict.reason for verdict in changed)
    assert np.mean(realised) < 1.26
