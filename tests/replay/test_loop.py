"""A replay decides on each window as the service does, and scores the steps that follow under the current layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eplb_core.heat.window import Window, checked_heat
from eplb_core.placement import Placement, apply_layers, par
from eplb_core.planner.decide import plan, plan_from_scratch
from eplb_core.planner.score import noise_floor, sampling_floor, split_steps
from eplb_core.planner.settings import PlannerSettings
from eplb_core.planner.topology import Topology
from eplb_service.io.synthetic import synthetic_heat
from eplb_service.io.trace import ArrayTrace
from eplb_service.replay.costs import Costs
from eplb_service.replay.jobs import jobs_for, replay, scene_for
from eplb_service.replay.loop import Scene
from eplb_service.replay.loop import run as run_job
from eplb_service.replay.moves import arrivals, sent
from eplb_service.replay.policy import ABLATIONS, NAMES, Job, ReplayError, Setup
from tests.planner.drawn import whole_loads

HEAT_TLE = checked_heat(synthetic_heat("phased", 130, layers=3, experts=16, tokens=256, top_k=2, seed=5))
LINEAR = Placement.linear(layers=3, experts=16, ranks=4, slots=5)
SETUP = Setup(slots=5, window=40, interval=30, start=40)


def run(policies, heat_TLE=HEAT_TLE, setups=(SETUP,), costs=None, settings=None, **options):
    jobs = jobs_for(policies, setups, settings or PlannerSettings(), **options)
    return replay(ArrayTrace(heat_TLE), jobs, scene_for(4, costs))


def test_policy_none_keeps_the_initial_placement_and_the_fixed_tables():
    result = run(["none"], hindsight=False)
    [none] = result.policies
    expected_L = par(whole_loads(HEAT_TLE[40:], LINEAR, LINEAR.default_log2phy(), first_step=40))
    assert none.par_realised_L == pytest.approx(expected_L)
    assert none.moves == 0
    score = result.score(none)
    assert score.par_left_alone == pytest.approx(score.par)
    assert (score.hindsight, score.regret) == (None, None)
    in_order = LINEAR, LINEAR.default_log2phy(), None, "tables"
    floors_L = [sampling_floor(split_steps(HEAT_TLE[at : at + 30], *in_order)).mean() for at in (40, 70, 100)]
    assert score.floor == pytest.approx(np.mean(floors_L))


def test_each_decision_equals_the_planners_decision_on_its_window():
    result = run(["deepseek"], settings=PlannerSettings(seed=2))
    settings = PlannerSettings(policy="deepseek", seed=2)
    placement = LINEAR
    log2phy_RLE = LINEAR.default_log2phy()
    for decision, step in zip(result.policies[0].decisions, (40, 70, 100), strict=True):
        window = Window(HEAT_TLE[step - 40 : step])
        decided = plan(window, placement, log2phy_RLE, Topology.flat(4), settings)
        placement, log2phy_RLE = apply_layers(placement, log2phy_RLE, decided.changes())
        assert (decision.step, decision.steps, decision.late) == (step, 30, 0)
        assert (decision.moves, decision.layers_changed) == (decided.moves, len(decided.layers))
        assert (decision.par_seen, decision.par_planned) == (decided.par_seen, decided.par_planned)
        served_TLE = HEAT_TLE[step : step + 30]
        expected_L = par(whole_loads(served_TLE, placement, log2phy_RLE, first_step=step))
        assert decision.par_realised_L == pytest.approx(expected_L)


def test_hindsight_is_fitted_to_the_scored_steps_and_no_policy_beats_it():
    result = run(["none", "deepseek", "flashlb"])
    [baseline] = result.baselines
    for row, step in enumerate((40, 70, 100)):
        window = Window(HEAT_TLE[step : step + 30])
        fitted = plan_from_scratch(window, LINEAR, Topology.flat(4), PlannerSettings())
        placement, log2phy_RLE = apply_layers(LINEAR, LINEAR.default_log2phy(), fitted.changes())
        expected_L = par(whole_loads(window.heat_TLE, placement, log2phy_RLE, first_step=step))
        assert baseline.rows("hindsight_L")[row] == pytest.approx(expected_L)
    assert all(result.score(policy).regret >= 0 for policy in result.policies)
    assert result.score(result.policies[2]).regret < result.score(result.policies[0]).regret


def test_no_policy_goes_below_the_noise_floor():
    # Each token selects eight of nine experts, so rank loads scatter less than with independent draws.
    generator = np.random.default_rng(0)
    left_out_TL = generator.multinomial(24, np.full(9, 1 / 9), size=(120, 2))
    result = run(["none", "flashlb"], checked_heat(24 - left_out_TL), [Setup(3, 40, 30)])
    scores = [result.score(policy) for policy in result.policies]
    assert all(score.floor <= min(score.par, score.hindsight) for score in scores)
    independent = noise_floor(np.full((1, 1), 8 * 24), 4)
    assert max(score.floor for score in scores) < independent[0] - 0.05


@pytest.mark.parametrize("each", [1, 3])
def test_a_decision_takes_effect_part_by_part_after_each_transfer(each: int) -> None:
    costs = Costs(step_ms=10, solve_ms=5, bytes_per_expert=1000, link_bandwidth=1e-3, move_price=0.01)
    costs = replace(costs, model_layers=3 * each)
    settings = PlannerSettings(policy="deepseek", move_price=0.01)
    late = run(["deepseek"], costs=costs, settings=settings).policies[0].decisions[0]
    decided = plan(Window(HEAT_TLE[:40]), LINEAR, LINEAR.default_log2phy(), Topology.flat(4), settings)
    served = LINEAR, LINEAR.default_log2phy()
    # A layer represents ``each`` layers of the model. The first is not rotated; every further one is rotated by one
    # more rank.
    sent_LR, received_LR = (
        [
            np.roll(np.bincount(update.moves_M5[:, column], minlength=4), turn)
            for update in decided.layers
            for turn in range(each)
        ]
        for column in (0, 2)
    )
    arrives_L = np.minimum(40 + costs.arrival_steps(received_LR, sent_LR, rows=20), 70)
    step = 40
    loads = []
    # Layers take effect part by part, starting with the layers that gain most.
    for update, arrives in zip(decided.layers, arrives_L[each // 2 :: each], strict=True):
        if arrives > step:
            loads.append(whole_loads(HEAT_TLE[step:arrives], *served, first_step=step))
        served = apply_layers(*served, [(update.layer, update.phy2log_RS, update.log2phy_RE)])
        step = arrives
    assert late.late == arrives_L[-1] - 40
    if step < 70:
        loads.append(whole_loads(HEAT_TLE[step:70], *served, first_step=step))
    assert len(loads) >= 2
    assert late.par_realised_L == pytest.approx(par(np.concatenate(loads)))


def test_no_decision_is_made_during_a_transfer():
    costs = Costs(step_ms=1, solve_ms=22.5, bytes_per_expert=1)
    decisions = run(["deepseek"], costs=costs).policies[0].decisions
    assert [decision.late for decision in decisions[:2]] == [30, 7]
    assert decisions[0].layers_changed > 0
    assert (decisions[1].layers_changed, decisions[1].moves) == (0, 0)


def test_a_step_time_without_a_curve_yields_an_estimated_range():
    costs = Costs.of(PlannerSettings(), layers=3, step_ms=40)
    result = run(["none", "flashlb"], costs=costs)
    none, flashlb = map(result.score, result.policies)
    assert (none.saved_ms, flashlb.saved_ms, flashlb.net_ms) == (None, None, None)
    share = 1 - flashlb.par / none.par
    assert costs.estimated_ms(flashlb.par, none.par) == pytest.approx((8 * share, 32 * share))
    assert costs.estimate_text(flashlb.par, none.par).startswith("estimated saving: ")
    assert Costs.of(PlannerSettings(), layers=3).estimated_ms(1.1, 1.5) is None


def test_time_and_bytes_follow_from_the_stated_costs():
    settings = PlannerSettings(link_bandwidth=1e3, layer_ms=20 / 3)
    costs = Costs.of(settings, layers=3, step_ms=40, bytes_per_expert=10_000_000, solve_ms=0, commit_ms=2)
    result = run(["none", "flashlb"], costs=costs, settings=settings)
    none, flashlb = map(result.score, result.policies)
    assert (none.saved_ms, none.stall_ms, none.bytes_moved) == (0, 0, 0)
    assert flashlb.saved_ms == pytest.approx(20 * (1 - flashlb.par / none.par))
    assert costs.estimate_text(flashlb.par, none.par) is None
    moved = result.policies[1]
    assert flashlb.bytes_moved == 10_000_000 * moved.moves
    # Each expert costs a fifth of its transfer time of 10 us, and each layer costs 2 ms.
    charged_ms = 0.002 * moved.total("moves_busiest") + 2 * moved.total("layers_moved")
    assert flashlb.stall_ms == pytest.approx(charged_ms / 90)


def test_all_setups_of_a_replay_are_scored_on_the_same_steps():
    setups = [Setup(slots, window, 20) for slots in (4, 5) for window in (20, 60)]
    result = run(["none", "flashlb"], setups=setups, hindsight=False)
    assert [policy.label for policy in result.policies] == [
        f"{name}, {slots} slots, window {window}"
        for slots in (4, 5)
        for window in (20, 60)
        for name in ("none", "flashlb")
    ]
    assert {policy.decisions[0].step for policy in result.policies} == {20}
    assert {policy.steps for policy in result.policies} == {110}


def rotated(heat_TLE, phy2log_LRS):
    assert heat_TLE.shape[0] == 40
    return np.roll(phy2log_LRS, 1, axis=1)


def with_tables(heat_TLE, phy2log_LRS):
    return phy2log_LRS, Placement(phy2log_LRS, heat_TLE.shape[2]).default_log2phy()


def broken(heat_TLE, phy2log_LRS):
    raise RuntimeError("no\nlicence")


def absurd(heat_TLE, phy2log_LRS):
    return phy2log_LRS * 0


def wrong_tables(heat_TLE, phy2log_LRS):
    return phy2log_LRS, np.zeros((4, 3, 16), dtype=int)


def test_external_policies_are_replayed():
    result = run([f"{__name__}:rotated", f"{__name__}:with_tables", "none"])
    turned, same, none = result.policies
    assert (
        turned.moves_per_interval
        == arrivals(LINEAR.phy2log_LRS, np.roll(LINEAR.phy2log_LRS, 1, axis=1)).sum()
    )
    assert same.par_realised == none.par_realised
    assert (same.moves, same.decisions[0].layers_changed) == (0, 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("greedy", "unknown policy 'greedy'"),
        ("absent_module:f", "cannot import 'absent_module'"),
        (f"{__name__}:absent", "has no function 'absent'"),
        (f"{__name__}:broken", r"failed \(RuntimeError: no licence\)"),
        (f"{__name__}:absurd", "returned an invalid placement .*expert 1 has no slot"),
        (f"{__name__}:wrong_tables", "returned an invalid placement .*does not hold it"),
    ],
)
def test_policies_that_fail_are_reported_in_one_line(name, message):
    with pytest.raises(ReplayError, match=message) as caught:
        run([name])
    assert "\n" not in str(caught.value)


def test_every_ablation_changes_a_setting():
    policies = [Job.of(name, SETUP, name, PlannerSettings(max_layers=2)) for name in NAMES]
    switched = {(policy.settings, policy.search) for policy in policies}
    assert len(switched) == len(NAMES) == 3 + len(ABLATIONS)


def test_only_experts_new_to_a_rank_count_as_moves():
    before = np.array([[[0, 1], [2, 3]]])
    after = np.array([[[1, 2], [3, 0]]])
    assert arrivals(before, after).tolist() == [[1, 1]]
    assert arrivals(before, before[:, :, ::-1]).tolist() == [[0, 0]]


def test_a_replay_starts_from_the_given_placement():
    start = Placement(np.roll(LINEAR.phy2log_LRS, 1, axis=1), 16)
    jobs = jobs_for(["none"], [SETUP], PlannerSettings(), hindsight=False)
    scene = Scene(Topology.flat(4), Costs(), start.phy2log_LRS)
    [none] = replay(ArrayTrace(HEAT_TLE), jobs, scene).policies
    assert none.par_realised_L == pytest.approx(
        par(whole_loads(HEAT_TLE[40:], start, start.default_log2phy(), first_step=40))
    )


def test_every_decision_is_reported_and_an_interrupted_replay_keeps_complete_policies():
    reported = []

    def report(label, decision):
        reported.append((label, decision.step, decision.par_realised))
        if label == "flashlb":
            raise KeyboardInterrupt

    jobs = jobs_for(["none", "flashlb"], [SETUP], PlannerSettings())
    stopped = replay(ArrayTrace(HEAT_TLE), jobs, scene_for(4), report)
    whole = run(["none"])
    assert (stopped.interrupted, whole.interrupted) == (True, False)
    assert [label for label, *_ in reported] == ["baseline"] * 3 + ["none"] * 3 + ["flashlb"]
    [none] = stopped.policies
    [same] = whole.policies
    assert none.decisions[1].step == reported[4][1] == 70
    assert [decision.par_realised for decision in none.decisions] == [
        decision.par_realised for decision in same.decisions
    ]
    with pytest.raises(KeyboardInterrupt):
        replay(ArrayTrace(HEAT_TLE), jobs[::2], scene_for(4), report)


def test_a_short_last_interval_is_weighted_by_its_steps():
    [policy] = run(["none"], HEAT_TLE[:75]).policies
    assert [decision.steps for decision in policy.decisions] == [30, 5]
    expected = np.average([decision.par_realised for decision in policy.decisions], weights=[30, 5])
    assert policy.par_realised == pytest.approx(expected)


@pytest.mark.parametrize(
    ("setup", "steps", "first_steps"),
    [
        (SETUP, 41, [40]),
        (SETUP, 70, [40]),
        (SETUP, 71, [40, 70]),
        (Setup(5, 30, 40), 80, [30, 70]),
        (Setup(5, 80, 40), 90, [40, 80]),
    ],
)
def test_a_decision_is_made_at_every_interval_after_the_first_window(setup, steps, first_steps):
    assert list(setup.decisions(steps)) == first_steps


def test_invalid_setups_and_costs_are_rejected():
    with pytest.raises(ReplayError, match="has 40 steps, so a first window of 40 leaves no step to score"):
        SETUP.decisions(40)
    with pytest.raises(ReplayError, match="interval is 0"):
        Setup(5, window=1, interval=0)
    with pytest.raises(ReplayError, match="start is 8; it must be at least 9, the end of the first window"):
        Setup(5, window=9, interval=9, start=8)
    with pytest.raises(ReplayError, match="at least one policy"):
        run([])
    for values, message in [
        ({"step_ms": -1}, "step_ms is -1"),
        ({"commit_ms": -1}, "commit_ms is -1"),
        ({"link_bandwidth": 0}, "link_bandwidth is 0; it must be greater than 0"),
        ({"solve_ms": float("nan")}, "solve_ms is nan"),
    ]:
        with pytest.raises(ReplayError, match=message):
            Costs(**values)


class CountedTrace(ArrayTrace):
    """A trace that records which steps are read from it."""

    def heat(self, first, last):
        self.facts.__dict__.setdefault("read", []).extend(range(first, last))
        return super().heat(first, last)


@pytest.mark.parametrize("policy", ["none", "flashlb"])
def test_each_step_is_read_once_and_in_order(policy):
    trace = CountedTrace(HEAT_TLE)
    job = Job.of(policy, Setup(5, 40, 13), policy, PlannerSettings())
    assert sum(decision.steps for decision in run_job(job, trace, scene_for(4))) == 130 - 13
    assert trace.facts.__dict__["read"] == list(range(130))


@pytest.mark.parametrize("slots", [4, 5, 6])
def test_a_replay_starts_from_a_different_balancers_placement(slots):
    raw_LRS = np.stack(
        [np.array([[0, 0, 1, 2, 3], [4, 5, 6, 7, 7], [8, 9, 10, 11, -1], [12, 13, 14, 15, 0]])] * 3
    )
    raw_LRS = raw_LRS.astype(np.int32)
    scene = Scene(Topology.flat(4), Costs(), raw_LRS)
    setup = Setup(slots, window=40, interval=30, start=40)
    jobs = jobs_for(["none", "flashlb"], [setup], PlannerSettings())
    result = replay(ArrayTrace(HEAT_TLE), jobs, scene)
    none, flashlb = result.policies
    # Even the policy without moves must fill empty slots and replace duplicates.
    filled = {4: 0, 5: 3, 6: 3 + 4}[slots]
    held = [set(row[:slots]) - {-1} for row in raw_LRS[0].tolist()]
    placed = scene.placement(ArrayTrace(HEAT_TLE), slots).phy2log_LRS[0].tolist()
    assert none.moves == 3 * sum(len(set(now) - was) for now, was in zip(placed, held, strict=True))
    assert none.moves >= 3 * filled
    assert flashlb.moves >= 3 * filled
    if slots == 5:
        served = scene.left_alone(ArrayTrace(HEAT_TLE), slots)
        assert served.phy2log_LRS[:, :2].tolist() == raw_LRS[:, :2].tolist()


def test_a_policy_may_return_duplicates_and_empty_slots(monkeypatch):
    def wasteful(heat_TLE, phy2log_LRS):
        return np.array([[[0, 0, 1, 2, 3], [4, 5, 6, 7, 7], [8, 9, 10, 11, -1], [12, 13, 14, 15, 0]]] * 3)

    monkeypatch.setattr("tests.replay.policies_of_others.wasteful", wasteful, raising=False)
    [policy] = run(["tests.replay.policies_of_others:wasteful"], hindsight=False).policies
    assert policy.decisions[0].moves > 0


def test_an_expert_that_only_changes_its_slot_is_neither_received_nor_sent():
    before = Placement(np.array([[[0, 1], [2, 3]]], dtype=np.int32), 4)
    after = Placement(np.array([[[1, 2], [3, 0]]], dtype=np.int32), 4)
    assert arrivals(before.phy2log_LRS, after.phy2log_LRS).tolist() == [[1, 1]]
    assert sent(before, after, np.zeros(2, dtype=np.int32)).tolist() == [[1, 1]]
    assert sent(before, before, np.zeros(2, dtype=np.int32)).tolist() == [[0, 0]]
